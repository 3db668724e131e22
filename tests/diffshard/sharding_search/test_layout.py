"""From a plan back to a layout: every operation has a strategy of the space again, its collectives included."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.tracing import space_of, trace_function
from tests.diffshard.sharding_search.small_searches import SLOW

MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(w)


def content_of(strategy):
    """A strategy without the specs between two collectives, which a plan does not keep."""
    reductions = [[(s.kind, s.axis, s.fraction) for s in steps] for steps in strategy.reductions]
    return strategy.operands, strategy.unreduced, strategy.results, strategy.parts, reductions


@pytest.mark.parametrize("stored", [P(), P("x")], ids=["all reduced", "scattered"])
def test_a_plan_s_layout_has_strategies_of_the_space(stored):
    args = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    search = diffshard.search(step, MESH, hardware=SLOW, in_shardings=(stored, P(("x", "y"))))
    plan = search.plan(*args)
    space = space_of(search.options, trace_function(search.options, args))
    strategies = layout_of(plan, space).strategies
    fractions = []
    for vertex, strategy in zip(space.graph.vertices, strategies, strict=True):
        if vertex.kind == "operation":
            assert content_of(strategy) in map(content_of, space.nodes[vertex.index].strategies)
            fractions += [[s.fraction for s in steps] for steps in strategy.reductions if len(steps) > 1]
    # What is summed over one axis first has its whole size there; scattered, a half of it is left for the other axis.
    assert fractions
    assert all(first == 2 * second for first, second in fractions)
