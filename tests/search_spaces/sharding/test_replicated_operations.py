"""Which operations have no form on blocks is a question about a graph and its strategies alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.replicated_operations import impossible_operations, is_replicated, replicated_operations
from search_spaces.sharding.strategies import replicated_strategy
from tests.search_spaces.sharding.small_spaces import array, graph_of, space_of


def test_only_operations_that_a_strategy_splits_run_whole():
    space = space_of(lambda x: jnp.sin(x) + jnp.prod(x), array(4, 6))
    whole = [replicated_strategy([2], [2])] * len(space.graph.vertices)
    assert replicated_operations(space.graph, whole, space.axis_sizes) == []
    # The first axis splits the rows of every array: the sine is the same on blocks, a product of rows is not.
    rows = [s._replace(operands=(((0,), ()),), unreduced=(((0,), ()),)) for s in whole]
    combined = ((ReshardStep("all_reduce", 0, 1.0, ()),),)
    product = next(v.index for v in space.graph.operations() if v.primitive == "reduce_prod")
    rows[product] = rows[product]._replace(reductions=combined)
    names = [vertex.primitive for vertex in replicated_operations(space.graph, rows, space.axis_sizes)]
    assert names == ["reduce_prod"]


def test_mappings_that_track_varying_values_are_impossible():
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def fn(x, check_vma):
        return jax.shard_map(
            jnp.sin, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=check_vma
        )(x)

    assert [v.primitive for v in impossible_operations(graph_of(lambda x: fn(x, True), array(4, 4)))] == ["shard_map"]
    assert impossible_operations(graph_of(lambda x: fn(x, False), array(4, 4))) == []


def elementwise_functions():
    """The functions of `jax.lax` that are one operation on an array of floats and keep its shape."""
    for name in sorted(dir(jax.lax)):
        function = getattr(jax.lax, name)
        try:
            (equation,) = jax.make_jaxpr(function)(jnp.ones((4, 4))).eqns
        except (TypeError, ValueError, AttributeError):
            continue
        if [getattr(v.aval, "shape", None) for v in equation.outvars] == [(4, 4)] and not equation.effects:
            yield name, function


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in elementwise_functions()])
def test_what_works_element_by_element_has_a_form_on_blocks(name, function):
    def step(x):
        y, pull = jax.vjp(function, x)
        return y, pull(y)

    try:
        space = space_of(step, array(4, 4), sizes=(2,))
    except TypeError:  # it has no derivative with respect to floats
        space = space_of(function, array(4, 4), sizes=(2,))
    for node in space.nodes:
        if node.vertex.kind == "operation" and node.shared_value is None:
            whole = [s for s in node.strategies if is_replicated(node.vertex, s, space.axis_sizes)]
            assert whole == [], f"{node.vertex.primitive} of {name} is split, but runs whole"
