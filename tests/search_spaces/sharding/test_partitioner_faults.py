"""What XLA's partitioner is known to compute wrongly is neither planned nor run by constraints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from search_spaces.partition_specs import named_spec, partition_spec
from search_spaces.sharding.base import Axes
from search_spaces.sharding.replicated_operations import is_partitioned_wrongly
from search_spaces.sharding.strategies import strategies_of_rule
from tests.search_spaces.sharding.small_spaces import array, hardware_of, space_of

AXES = ("x", "y", "z")
SIZES = (2, 2, 2)


def space_of_product(equation, *shapes):
    arrays = [array(*shape) for shape in shapes]
    hardware = hardware_of(AXES)
    return space_of(lambda *a: jnp.einsum(equation, *a), *arrays, sizes=SIZES, hardware=hardware)


def all_strategies(space):
    (vertex,) = space.graph.operations()
    return vertex, strategies_of_rule(space.rules[vertex.index], Axes(SIZES, (0, 1, 2)))


def test_by_constraints_all_but_the_refused_strategies_are_right():
    shapes = (8, 8), (8, 8)
    vertex, strategies = all_strategies(space_of_product("bk,bk->b", *shapes))
    mesh = jax.make_mesh(SIZES, AXES, (AxisType.Auto,) * 3, devices=jax.devices()[:8])
    arrays = [np.arange(-32, 32).reshape(shape).astype(np.float32) % (7 + i) for i, shape in enumerate(shapes)]
    wrong, refused = set(), set()
    for strategy in strategies:

        def sharding(spec):
            return NamedSharding(mesh, partition_spec(named_spec(spec, AXES)))

        def run(x, y, strategy=strategy, sharding=sharding):
            pair = [
                jax.lax.with_sharding_constraint(a, sharding(s)) for a, s in zip((x, y), strategy.operands, strict=True)
            ]
            return jax.lax.with_sharding_constraint(jnp.einsum("bk,bk->b", *pair), sharding(strategy.results[0]))

        shardings = [sharding(spec) for spec in (*strategy.operands, *strategy.results)]
        result = jax.jit(run, in_shardings=tuple(shardings[:2]), out_shardings=shardings[2])(*arrays)
        if not np.array_equal(result, (arrays[0] * arrays[1]).sum(1)):
            wrong.add(strategy)
        if is_partitioned_wrongly(vertex, strategy):
            refused.add(strategy)
    assert wrong <= refused  # a later partitioner may be right about some
    assert len(refused) == 3 < len(strategies) / 10


@pytest.mark.parametrize(
    ("equation", "shapes", "count"),
    [
        ("bk,bjk->bj", ((8, 8), (8, 8, 8)), 3),
        ("abk,abk->ab", ((8, 8, 8), (8, 8, 8)), 6),
        ("bkl,bkl->b", ((8, 8, 8), (8, 8, 8)), 12),
        ("ikl,klj->ij", ((8, 8, 8), (8, 8, 8)), 0),  # without a batch the same sums are right
    ],
)
def test_only_a_batch_over_some_of_several_contracted_axes_is_refused(equation, shapes, count):
    vertex, strategies = all_strategies(space_of_product(equation, *shapes))
    assert sum(is_partitioned_wrongly(vertex, strategy) for strategy in strategies) == count


@pytest.mark.parametrize("as_program", [False, True])
def test_only_a_program_is_planned_with_what_the_partitioner_computes_wrongly(as_program):
    space = space_of_product("bk,bk->b", (8, 8), (8, 8))
    space = dataclasses.replace(space, as_program=as_program, given={0: ((0,), (1, 2))})
    (vertex,) = space.graph.operations()
    planned = [s for s in space.nodes[vertex.index].strategies if is_partitioned_wrongly(vertex, s)]
    assert bool(planned) == as_program
