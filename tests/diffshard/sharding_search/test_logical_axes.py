"""Partitioning metadata of flax: kept by rules, free without them, and written back as rules."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from diffshard.sharding_search.plan import Plan

MESH = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jnp.ones((8, 4))
INIT = nn.initializers.lecun_normal()
RULES = (("embed", "data"), ("mlp", ("model",)), ("unused", None))


def linen_args(partitioning, names):
    """Two layers of linen, the first with names."""
    model = nn.Sequential([nn.Dense(8, kernel_init=partitioning(INIT, names)), nn.Dense(4)])
    return model, jax.eval_shape(model.init, jax.random.key(0), X)


def plan_of(model, params, **options):
    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(lambda p: model.apply(p, x).mean())(params))

    return diffshard.search(step, MESH, hardware="h100", solver="exact", **options).plan(params, X)


def kernel_of(plan, path="layers_0"):
    (tensor,) = [t for t in plan.arguments if path in t.path and "kernel" in t.path]
    return tensor


def test_logical_names_are_kept_by_rules_and_free_without():
    model, params = linen_args(nn.with_logical_partitioning, ("embed", "mlp"))
    kernel = kernel_of(plan_of(model, params, logical_axis_rules=RULES))
    assert (kernel.given, kernel.spec, kernel.logical_axes) == (True, (("data",), ("model",)), ("embed", "mlp"))
    free = plan_of(model, params)
    assert not any(t.given for t in free.arguments)
    assert kernel_of(free).logical_axes == ("embed", "mlp")
    assert kernel_of(free, "layers_1").logical_axes is None


def test_names_of_mesh_axes_need_no_rule():
    model, params = linen_args(nn.with_partitioning, ("model", None))
    kernel = kernel_of(plan_of(model, params, logical_axis_rules=()))
    assert (kernel.given, kernel.spec) == (True, (("model",), ()))
    model, params = linen_args(nn.with_partitioning, (("data", "model"), None))
    assert kernel_of(plan_of(model, params, logical_axis_rules=())).spec == (("data", "model"), ())
    assert not kernel_of(plan_of(model, params)).given


def test_in_shardings_go_first_and_no_mesh_axis_is_used_twice():
    model, params = linen_args(nn.with_logical_partitioning, ("embed", "mlp"))
    rules = (("embed", "data"), ("mlp", "data"), ("mlp", "model"))
    assert kernel_of(plan_of(model, params, logical_axis_rules=rules)).spec == (("data",), ("model",))
    assert kernel_of(plan_of(model, params, logical_axis_rules=rules[:2])).spec == (("data",), ())
    in_shardings = (PartitionSpec(), None)
    plan = plan_of(model, params, logical_axis_rules=rules, in_shardings=in_shardings)
    assert kernel_of(plan).spec == ((), ())


def test_variables_of_nnx():
    def linear(names, **metadata):
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(INIT, names, **metadata)
            return nnx.split(nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0)))

    def planned(names, rules, **metadata):
        graph, state = linear(names, **metadata)

        def step(state, x):
            gradients = jax.grad(lambda s: nnx.merge(graph, s)(x).mean())(state)
            return jax.tree.map(lambda p, g: p - g, state, gradients)

        search = diffshard.search(step, MESH, hardware="h100", solver="exact", logical_axis_rules=rules)
        return kernel_of(search.plan(state, X), "kernel")

    kernel = planned(("embed", "mlp"), RULES)
    assert (kernel.given, kernel.spec, kernel.logical_axes) == (True, (("data",), ("model",)), ("embed", "mlp"))
    assert planned((None, "data"), ()).spec == ((), ("data",))
    assert planned(("embed", None), (), sharding_rules=(("embed", "model"),)).spec == (("model",), ())
    assert not planned(("embed", "mlp"), None).given


def test_rules_are_written_back_and_give_the_same_plan(tmp_path):
    model, params = linen_args(nn.with_logical_partitioning, ("embed", "mlp"))
    plan = plan_of(model, params, logical_axis_rules=RULES)
    rules, disagreements = plan.logical_rules()
    assert rules == (("embed", "data"), ("mlp", "model"))
    assert disagreements == ()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").logical_rules() == plan.logical_rules()
    assert kernel_of(plan_of(model, params, logical_axis_rules=rules)).spec == kernel_of(plan).spec


def test_arrays_that_disagree_are_named():
    def step(a, b):
        return a["w"].sum() + b["w"].sum()

    a = {"w": nn.LogicallyPartitioned(jnp.ones((8, 8)), ("embed", None))}
    b = {"w": nn.LogicallyPartitioned(jnp.ones((4, 4)), ("embed", None))}
    specs = (PartitionSpec("data"), PartitionSpec("model"))
    fn = lambda a, b: step(nn.unbox(a), nn.unbox(b))  # noqa: E731
    plan = diffshard.search(fn, MESH, hardware="h100", solver="exact", in_shardings=specs).plan(a, b)
    rules, (sentence,) = plan.logical_rules()
    assert rules == (("embed", "data"),)
    assert sentence == "'embed' is split over data in a['w'].value (256 B); model in b['w'].value (64 B)."


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        (
            (("embed", "data"),),
            ValueError,
            r"'mlp' neither has a rule in `logical_axis_rules` \{'embed': \('data',\)\}",
        ),
        ((("embed", "modle"),), ValueError, r"has the mesh axis 'modle' for 'embed'; the mesh has \('data', 'model'\)"),
        (("embed", "data"), TypeError, "must be pairs such as"),
        ("embed", TypeError, "must be pairs such as"),
    ],
)
def test_rules_and_names_that_do_not_fit(rules, error, words):
    model, params = linen_args(nn.with_logical_partitioning, ("embed", "mlp"))
    with pytest.raises(error, match=words):
        plan_of(model, params, logical_axis_rules=rules)
