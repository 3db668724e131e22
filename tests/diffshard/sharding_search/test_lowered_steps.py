"""What is lowered is what was planned: every collective, and every donated argument; and bounds are bounds."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.checks.collectives import split_by_axis, with_reduce_scatters
from diffshard.checks.explicit_collectives import explicit_collectives
from diffshard.checks.hlo import memory_plan
from tests.diffshard.sharding_search.small_searches import SLOW, mesh_2x2

MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers(weights, x):
    """Layers in a scan."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def gradient_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    return w - 0.1 * gradient, loss


# Each with the shardings that are given, and the kinds of collectives that it then needs.
STEPS = {
    "gradient step on a stored weight": (
        gradient_step, (array(16, 16), array(64, 16)), (P("x"), P("x")), {"all_gather", "reduce_scatter", "all_reduce"},
    ),
    "sort of split columns": (
        lambda x: jnp.sort(x, axis=0), (array(64, 64),), (P(("x", "y")),), {"all_to_all"},
    ),
    "layers in a loop": (
        layers, (array(3, 16, 16), array(8, 16)), (P(None, "y"), P("x")), {"all_gather", "reduce_scatter"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("executor", ["constraints", "program"])
@pytest.mark.parametrize("name", STEPS)
def test_the_lowered_collectives_are_those_of_the_plan(name, executor):
    fn, args, specs, kinds = STEPS[name]
    step = diffshard.search(fn, MESH, hardware=SLOW, in_shardings=specs, executor=executor)
    plan = step.plan(*args)
    planned: dict[tuple[str, ...], float] = collections.defaultdict(float)
    lowered: dict[tuple[str, ...], float] = collections.defaultdict(float)
    for collective in plan.collectives:
        planned[collective.kind, collective.axis] += collective.num_bytes * collective.count
    records = with_reduce_scatters(explicit_collectives(step.lower(*args)), MESH.shape)
    for record in split_by_axis(records, MESH.shape):
        lowered[(record.kind, *record.axes)] += record.num_bytes * record.count
    assert planned == lowered
    assert kinds <= {kind for kind, *_ in planned}


@pytest.mark.parametrize("executor", ["constraints", "program", "propagation"])
def test_donated_arguments_are_deleted_and_others_are_not(executor):
    def update(weights, gradient):
        return weights - 0.1 * gradient

    step = diffshard.search(update, mesh_2x2(), hardware=SLOW, donate_argnums=0, executor=executor)
    plan = step.plan(array(8, 8), array(8, 8))
    for donating in (step, plan.apply(update)):
        weights, gradient = plan.shard(jnp.ones((8, 8)), jnp.ones((8, 8)))
        np.testing.assert_allclose(donating(weights, gradient), 0.9)
        assert weights.is_deleted()
        assert not gradient.is_deleted()


@pytest.mark.parametrize("donated", [0, 1, ()])
def test_results_of_the_compiled_program_lie_over_donated_arguments(donated):
    step = diffshard.search(lambda w, g: w - 0.1 * g, mesh_2x2(), hardware=SLOW, donate_argnums=donated)
    plan = step.plan(array(8, 8), array(8, 8))
    own_bytes = 8 * 8 * 4 / 4  # all are split over four devices
    compiled = step.lower(array(8, 8), array(8, 8)).compile()
    memory = memory_plan(compiled)
    assert memory is not None
    assert [plan.arguments[i].spec for i in range(2)] == [plan.outputs[0].spec] * 2
    assert (memory.arguments, memory.outputs) == (2 * own_bytes, own_bytes)
    assert memory.aliased == (0 if donated == () else own_bytes)
    aliases = f"{{}}: ({donated}, {{}}, may-alias)"
    assert (aliases in compiled.as_text()) == (donated != ())


@pytest.mark.filterwarnings("ignore::diffshard.plans.WholeWorkWarning")  # a sort
def test_the_bound_leaves_out_what_only_storing_costs():
    """A sort runs whole. Links are so fast that the cost prefers to store a quarter and gather it, which is slower."""
    hardware = diffshard.Hardware("fast links", 1e9, 1e9, 1e9, {axis: diffshard.Link(0.0, 1e-14) for axis in "xy"})
    plan, whole = (
        diffshard.search(jnp.sort, MESH, hardware=hardware, in_shardings=specs).plan(array(1024))
        for specs in (None, P())
    )
    assert plan.arguments[0].spec != ((),)
    assert plan.step_s > whole.step_s
    assert plan.lower_bound_s <= whole.step_s
