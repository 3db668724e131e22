"""`search(fn, cluster, pipeline=...)` finds stages, and runs them with the results of one device."""

import dataclasses
import html
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.plans.consistency import from_json, to_json
from tests.diffshard.pipelines import scanned_models, small_mixture
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, train_step

DEFAULT_RESIDUALS = diffshard.Pipeline(microbatches=(4,), schedules=("1f1b",), max_stages=4)
# Most of these tests need no residuals that are made again, and without them the search takes a third less.
PIPELINE = dataclasses.replace(DEFAULT_RESIDUALS, residuals=("keep",))


def search(step, pipeline=PIPELINE, **options):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:4], hardware="h100")
    return diffshard.search(step, cluster, pipeline=pipeline, **options)


def leave(monkeypatch, num_devices, share):
    """Leaves submeshes of a number of devices and stages of a share of the layers, so that small models are cut."""
    initialise = DivisionSearch.__post_init__

    def initialise_limited(self):
        initialise(self)
        sizes = np.array([submesh.num_devices for submesh in self.submeshes])
        lengths = np.arange(len(self.chain) + 1)[None, :] - np.arange(len(self.chain))[:, None]
        is_long = lengths > -(-len(self.chain) // share)
        self.least_s[is_long[:, :, None] | (sizes != num_devices)[None, None, :]] = np.inf

    monkeypatch.setattr(DivisionSearch, "__post_init__", initialise_limited)


@pytest.mark.parametrize(
    ("step", "args", "devices", "stages", "pipeline"),
    [
        (train_step, arguments, 1, 3, PIPELINE),
        (scanned_models.train_step, scanned_models.arguments, 1, 3, PIPELINE),
        (small_mixture.train_step, small_mixture.arguments, 2, 2, DEFAULT_RESIDUALS),
    ],
)
def test_results_are_those_of_one_device(step, args, devices, stages, pipeline, monkeypatch):
    args = args()
    leave(monkeypatch, devices, stages)
    pipelined, expected = search(step, pipeline), jax.jit(step)(*args)
    plan = pipelined.plan(*args)
    assert len(plan.stages) >= stages
    used = sorted(device for stage in plan.stages for device in stage.devices)
    assert used == list(range(devices * len(plan.stages)))
    assert all(stage.source for stage in plan.stages)  # the user's line with which it begins
    assert plan.stages[0].first_layer == 0
    assert plan.stages[-1].last_layer == plan.num_layers - 1
    assert from_json(to_json(plan), "plan.json", diffshard.PipelinePlan) == plan
    assert "1 plan>" in repr(pipelined)
    assert html.escape(plan.html()) in pipelined._repr_html_()
    for _ in range(2):
        found = pipelined(*args)
        check_close(found, expected)
        args, expected = (found[0], args[1]), jax.jit(step)(expected[0], args[1])
    programs = pipelined._prepare(args, {}).found.plans._functions
    assert all("1 plan>" in repr(program) for program in programs.values())  # no program is planned again when it runs


def linear_loss(params, x):
    return (jnp.tanh(x @ params["up"]) @ params["down"]).mean()


def linear_weights():
    return {"up": jnp.full((16, 32), 0.1), "down": jnp.full((32, 16), 0.2)}


def test_python_numbers_are_arguments_and_state():
    def step(state, x, rate):
        loss, gradients = jax.value_and_grad(linear_loss)(state["params"], x)
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], gradients)
        return {"params": params, "count": state["count"] + 1}, loss

    args = {"params": linear_weights(), "count": 3}, jnp.ones((8, 16)), 0.1
    pipelined = search(step)
    assert "state['count']" in [tensor.path for stage in pipelined.plan(*args).stages for tensor in stage.arguments]
    found, expected = pipelined(*args), jax.jit(step)(*args)
    check_close(found, expected)
    check_close(pipelined(found[0], *args[1:]), jax.jit(step)(expected[0], *args[1:]))


def test_equinox_modules_are_arguments_and_results():
    equinox = pytest.importorskip("equinox")

    def step(model, x):
        params, static = equinox.partition(model, equinox.is_inexact_array)
        loss, gradients = jax.value_and_grad(lambda p: (jax.vmap(equinox.combine(p, static))(x) ** 2).mean())(params)
        updates = jax.tree.map(lambda g: -0.1 * g, gradients)
        return equinox.apply_updates(model, updates), {"loss": loss, "name": "squared"}

    args = equinox.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), jnp.ones((8, 8))
    pipelined, (expected, loss) = search(step), equinox.filter_jit(step)(*args)
    for fn in (
        diffshard.pipelines.in_microbatches(step, 4),
        equinox.filter_jit(diffshard.pipelines.in_microbatches(step, 4)),
        pipelined,
    ):
        found, metrics = fn(*args)
        check_close(
            (equinox.filter(found, equinox.is_array), metrics.pop("loss")),
            (equinox.filter(expected, equinox.is_array), loss["loss"]),
        )
        assert metrics == {"name": "squared"}
        assert found.activation is args[0].activation
    assert len(pipelined(found, args[1])) == 2
    assert "1 plan>" in repr(pipelined)


def test_one_stage_is_a_pipeline_too():
    args = arguments()
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipeline = diffshard.Pipeline(microbatches=4, schedules=("1f1b",), max_stages=1)
    pipelined = diffshard.search(train_step, cluster, pipeline=pipeline, donate_argnums=0)
    plan = pipelined.plan(*args)
    assert len(plan.stages) == 1
    assert plan.lower_bound_s <= plan.step_s
    assert plan.gap == (plan.step_s - plan.lower_bound_s) / plan.step_s
    expected = jax.jit(train_step)(*args)
    check_close(pipelined(*args), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "h100"}, ValueError, "`hardware` must be None for a Cluster"),
        ({"memory_limit_bytes": -1}, ValueError, "`memory_limit_bytes` must be a positive number"),
        ({"solver": "nope"}, ValueError, "nope"),
        ({"progress": "zzz"}, ValueError, "`progress` must be one of .*'zzz'"),
        ({"time_limit_s": "x"}, ValueError, "`time_limit_s` must be a positive number .*'x'"),
        ({"time_limit_s": -1}, ValueError, "`time_limit_s` must be a positive number"),
        ({"donate_argnums": 9}, ValueError, r"`donate_argnums` \(9,\) names a position"),
        ({"donate_argnums": "0"}, ValueError, "`donate_argnums` must be positions"),
        ({"donate_argnames": "zz"}, ValueError, "`donate_argnames` has 'zz', which is no argument of train_step"),
        ({"devices": 2}, TypeError, "not both"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        search(train_step, **options)


def test_arguments_donated_by_name_are_donated_by_position_too():
    options = search(train_step, donate_argnames="state").options
    assert (options.donate_argnums, options.donate_argnames) == ((0,), ("state",))


def test_a_mesh_is_refused():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    with pytest.raises(TypeError, match="divides devices into meshes itself"):
        diffshard.search(train_step, mesh, pipeline=PIPELINE)  # type: ignore[call-overload]


def test_a_batch_that_nothing_divides_is_refused():
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=2, hardware="h100")])
    pipelined = diffshard.search(train_step, cluster, pipeline=diffshard.Pipeline(microbatches=(3, 5)))
    with pytest.raises(ValueError, match=r"`Pipeline.microbatches` must divide the batch; got 3"):
        pipelined.plan(*arguments())
    with pytest.raises(ValueError, match=r"The batch must have rows, but `x` has the shape \(0, 8\)"):
        diffshard.search(lambda w, x: w - x.sum(), cluster, pipeline=PIPELINE).plan(jnp.ones(8), jnp.ones((0, 8)))


def test_an_error_names_the_least_memory_that_would_do_and_the_stage_that_needs_it():
    def step(params, x):
        loss, gradients = jax.value_and_grad(linear_loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    cluster, pipeline = [diffshard.Hosts(1, devices=2, hardware="h100")], diffshard.Pipeline(microbatches=(2, 4))

    def plan(memory_limit_bytes):
        pipelined = diffshard.search(
            step, diffshard.Cluster(cluster), pipeline=pipeline, memory_limit_bytes=memory_limit_bytes
        )
        return pipelined.plan(linear_weights(), jnp.ones((8, 16)))

    with pytest.raises(diffshard.InfeasibleError, match=r"Its state alone has 4,096 bytes.* donate the state") as error:
        plan(100.0)
    found = re.search(
        r"with (\d) micro-batches: its largest stage, layers 0-\d+ of \d+ \(from test_pipelined_function.*\) on 2 x "
        r"H100.* needs at least (\S+) bytes on each device, and (\S+) are enough",
        str(error.value),
    )
    assert found is not None, error.value
    least, enough = (float(number.replace(",", "")) for number in found.groups()[1:])
    with pytest.raises(diffshard.InfeasibleError):
        plan(least - 1)
    fitting = plan(enough)
    assert fitting.num_microbatches == int(found[1])
    assert max(stage.peak_bytes for stage in fitting.stages) <= enough


def test_a_cluster_that_is_only_described_is_planned_for_but_not_run_on():
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=2, hardware="h100")])
    pipelined = diffshard.search(train_step, cluster, pipeline=PIPELINE)
    with pytest.raises(ValueError, match="only described"):
        pipelined(*arguments())


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        (
            {"batch_argnums": 0},
            2,
            r"`Pipeline.batch_argnums` must name .* but small_step replaces all arrays .* such as weights, by results"
            r".* Give the positions of the batch",
        ),
        ({"batch_argnums": 0, "microbatches": 3}, 2, r"must divide the batch; got 3 and weights .*`Pipeline.batch_arg"),
        (
            {},
            1,
            r"`Pipeline.batch_argnums` names .* 1 \(x\), which small_step was not given; .* weights\. Give",
        ),
    ],
)
def test_a_batch_that_is_named_wrongly_is_refused_with_what_to_do(options, args, message):
    def small_step(weights, x):
        gradient = jax.grad(lambda weights: jnp.tanh(x @ weights).sum())(weights)
        return weights - gradient, jnp.sum(x)

    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipeline = diffshard.Pipeline(**{"microbatches": 4, **options})
    with pytest.raises(ValueError, match=message):
        diffshard.search(small_step, cluster, pipeline=pipeline).plan(*(jnp.ones((8, 8)), jnp.ones((16, 8)))[:args])


@pytest.mark.parametrize("count", [1, 4])
def test_a_loss_that_compares_examples_is_refused_with_what_to_do(count):
    def two_towers(weights, batch):
        def loss(weights):
            one, other = (jnp.tanh(x @ w) for x, w in zip(batch, weights, strict=True))
            return -jnp.diag(jax.nn.log_softmax(one @ other.T)).mean()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipelined = diffshard.search(two_towers, cluster, pipeline=diffshard.Pipeline(microbatches=count))
    weights, batch = [jnp.ones((8, 4))] * 2, [jnp.ones((16, 8))] * 2
    message = r"two_towers cannot be a pipeline.*dot_general .* mixes the examples.* Search without `pipeline`"
    with pytest.raises(ValueError, match=message):
        pipelined.plan(weights, batch)


def test_a_variance_over_the_batch_is_refused_with_how_to_write_it():
    def step_of(variance):
        return lambda w, x: w - jax.grad(lambda w: variance(x @ w).sum())(w)

    def planned(step, batch_means):
        cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
        pipeline = diffshard.Pipeline(microbatches=2, batch_means=batch_means)
        return diffshard.search(step, cluster, pipeline=pipeline).plan(w, x)

    w, x = jnp.ones((8, 4)), jax.random.normal(jax.random.key(0), (16, 8))
    two_passes = step_of(lambda h: jnp.mean((h - h.mean(0)) ** 2, axis=0))
    one_pass = step_of(lambda h: jnp.mean(h**2, axis=0) - h.mean(0) ** 2)
    written = "Write a variance over the batch as the mean of squares less the square of the mean"
    with pytest.raises(ValueError, match=r'`Pipeline\(batch_means="each_microbatch"\)`\. ' + written):
        planned(two_passes, "whole")
    with pytest.raises(ValueError, match=r"comparisons between examples\. " + written):
        planned(two_passes, "each_microbatch")
    with pytest.raises(ValueError, match=r"compute each example without the others\. " + written):
        diffshard.pipelines.in_microbatches(two_passes, 2)(w, x)
    assert "means of their micro-batch" in planned(one_pass, "each_microbatch").notes[0]
    found = diffshard.pipelines.in_microbatches(one_pass, 2)(w, x)
    np.testing.assert_allclose(found, two_passes(w, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_a_pipeline_under_a_transformation_is_refused(transform):
    pipelined = search(train_step)
    with pytest.raises(TypeError, match=r"cannot be planned or called under `jax.jit`"):
        transform(lambda x: pipelined(x, jnp.ones(8)))(jnp.float32(1.0))
    with pytest.raises(TypeError, match=r"cannot be planned or called under `jax.jit`"):
        transform(lambda x: pipelined.plan(x, jnp.ones(8)))(jnp.float32(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "`Pipeline.microbatches` must be whole numbers"),
        ({"microbatches": ()}, "`Pipeline.microbatches` must be whole numbers"),
        ({"microbatches": "4"}, "`Pipeline.microbatches` must be whole numbers"),
        ({"max_stages": 0}, "`Pipeline.max_stages` must be a whole number"),
        ({"schedules": ("zb-h9",)}, "`Pipeline.schedules` must be some of"),
        ({"schedules": ("1f1b", "1f1b")}, "`Pipeline.schedules` must name each choice once"),
        ({"batch_argnums": "1"}, "`batch_argnums` must be positions"),
        ({"batch_argnums": ()}, "`batch_argnums` must be positions"),
        ({"batch_argnames": 1}, "`batch_argnames` must be names of arguments, not 1; `batch_argnums` takes positions"),
        ({"stages_per_device": 3, "schedules": ("1f1b",)}, "is for the schedule 'interleaved'.*'1f1b'.*not 3"),
    ],
)
def test_what_a_pipeline_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diffshard.Pipeline(**options)


@pytest.mark.parametrize(
    ("field", "name"), [("schedules", "1f1b"), ("gradient_reductions", "once"), ("residuals", "keep")]
)
def test_names_in_place_of_tuples_of_names_are_refused(field, name):
    for given in (name, 3):
        options: dict[str, Any] = {field: given}
        message = rf"`Pipeline.{field}` must be a tuple of names, such as \('\w+',\), not {given!r}"
        with pytest.raises(TypeError, match=message):
            diffshard.Pipeline(**options)


def test_one_number_of_micro_batches_may_be_given_alone():
    assert diffshard.Pipeline(microbatches=4).microbatch_counts == (4,)
    assert diffshard.Pipeline(microbatches=(8, 4, 8)).microbatch_counts == (4, 8)
