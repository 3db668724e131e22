"""Options that shape the stages of a pipeline: given shardings, executors, keys, and what is computed again."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import diffshard
from tests.diffshard.pipelines.small_mlp import mlp_arguments, mlp_step
from tests.diffshard.pipelines.small_pipeline import check_close

PIPELINE = diffshard.Pipeline(microbatches=4, schedules=("1f1b",), max_stages=1, residuals=("keep",))
UP, X = PartitionSpec(None, "y"), PartitionSpec("x")


def search(step=mlp_step, pipeline=PIPELINE, devices=8, **options):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:devices], hardware="h100")
    return diffshard.search(step, cluster, pipeline=pipeline, **options)


def specs_of(plan):
    return {tensor.path: tensor.spec for stage in plan.stages for tensor in stage.arguments}


def test_given_shardings_are_kept_and_results_are_those_of_one_device():
    args = mlp_arguments(2)
    step = search(in_shardings=([{"up": UP, "down": PartitionSpec()}, None], X))
    plan = step.plan(*args)
    assert dict(plan.stages[0].mesh_axes) == {"x": 2, "y": 4}
    specs = specs_of(plan)
    assert (specs["params[0]['up']"], specs["params[0]['down']"]) == (((), ("y",)), ((), ()))
    assert specs["x"] == (("x",), ())
    found = step(*args)
    check_close(found, jax.jit(mlp_step)(*args))
    assert found[0][0]["up"].sharding.spec == UP


def test_an_axis_that_a_stage_does_not_have_has_one_device():
    plan = search(devices=2, in_shardings=([{"up": UP, "down": None}, None], X)).plan(*mlp_arguments(2))
    assert dict(plan.stages[0].mesh_axes) == {"x": 2}
    assert specs_of(plan)["params[0]['up']"] == ((), ())
    assert specs_of(plan)["x"] == (("x",), ())


def test_meshes_that_cannot_divide_an_argument_as_given_are_not_taken():
    params, x = mlp_arguments(2)
    params[0] = {"up": jnp.ones((32, 65)), "down": jnp.ones((65, 32))}
    for devices in (4, 1):
        pipelined = search(devices=devices, in_shardings=([{"up": PartitionSpec(None, "x"), "down": None}, None], None))
        plan = pipelined.plan(params, x)
        assert [len(stage.devices) for stage in plan.stages] == [1]


@pytest.mark.parametrize(
    ("in_shardings", "message"),
    [
        (PartitionSpec("model"), "`in_shardings` has an axis 'model'; use axes of the mesh: \\('x', 'y'\\)"),
        (lambda: NamedSharding(jax.make_mesh((8,), ("x",)), X), "`in_shardings` is on the mesh .* `pipeline` chooses"),
        ((None,), "`in_shardings` must be a tuple with an entry for each of the 2 positional arguments"),
    ],
)
def test_shardings_that_no_stage_can_have_are_refused(in_shardings, message):
    given = in_shardings() if callable(in_shardings) and not isinstance(in_shardings, tuple) else in_shardings
    with pytest.raises(ValueError, match=message):
        search(in_shardings=given).plan(*mlp_arguments(2))


def test_names_in_flax_metadata_are_split_by_rules():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
            return nn.Dense(32, use_bias=False)(jnp.tanh(nn.Dense(64, use_bias=False, kernel_init=init)(x)))

    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: jnp.square(jnp.asarray(Model().apply(p, x))).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    x = jax.random.normal(jax.random.key(0), (1024, 32))
    args = Model().init(jax.random.key(1), x), x
    pipelined = search(step, logical_axis_rules=(("embed", None), ("hidden", "y")))
    assert "y" in pipelined.plan(*args).stages[0].mesh_axes
    (spec,) = [spec for path, spec in specs_of(pipelined.plan(*args)).items() if "Dense_1" in path]
    assert spec == ((), ("y",))
    check_close(pipelined(*args), jax.jit(step)(*args))
    with pytest.raises(ValueError, match=r"'embed' neither has a rule in `logical_axis_rules`"):
        search(step, logical_axis_rules=(("hidden", "y"),)).plan(*args)
    with pytest.raises(ValueError, match="`logical_axis_rules` has the mesh axis 'model'"):
        search(step, logical_axis_rules=(("hidden", "model"),))


def test_the_executor_is_that_of_all_programs_and_stays_in_the_plan():
    args = mlp_arguments(2)
    pipelined = search(executor="constraints", key=3)
    plan = pipelined.plan(*args)
    assert {program.executor for program in plan.programs().values()} == {"constraints"}
    check_close(pipelined(*args), jax.jit(mlp_step)(*args))
    check_close(plan.apply(mlp_step, pipelined.options.cluster)(*args), jax.jit(mlp_step)(*args))
    with pytest.raises(ValueError, match="`executor` must be one of"):
        search(executor="jit")


def test_remat_says_what_stages_may_do_with_residuals():
    assert search(remat="search").options.pipeline.residuals == ("keep", "recompute")
    assert search(remat="offload").options.pipeline.residuals == ("keep", "recompute", "offload")
    with pytest.raises(ValueError, match='`remat` must be "search", "offload" or None'):
        search(remat="all")


def test_an_option_of_the_stages_is_another_question(tmp_path):
    plan = functools.partial(lambda **options: search(cache=tmp_path, **options).plan(*mlp_arguments(1)))
    assert plan().stored_in == ""
    assert plan(key=1).stored_in == ""
    assert plan(executor="constraints").stored_in == ""
    assert plan(in_shardings=(None, X)).stored_in == ""
    assert plan(in_shardings=(None, X)).stored_in != ""
    assert len(list(tmp_path.iterdir())) == 4


def test_another_precision_of_products_is_another_program():
    step, args = search(devices=2), mlp_arguments(1)
    step(*args)
    with jax.default_matmul_precision("highest"):
        plan = step.plan(*args)
        programs = step.execution(*args)
        check_close(step(*args), jax.jit(mlp_step)(*args))
    assert step.execution(*args) is not programs
    assert step.plan(*args).question != plan.question
    assert len(step._plans) == 2
