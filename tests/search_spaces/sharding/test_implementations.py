"""Primitives of other libraries, and loops with a condition for each example, stand in a graph as what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import diffshard
from tests.search_spaces.sharding.small_spaces import array, graph_of
from tests.search_spaces.sharding.test_device_program import check


def primitive_of(implementation, lowering=None):
    """A primitive with two results, as Equinox makes them: lowered to its implementation unless told otherwise."""
    primitive = Primitive("foreign")
    primitive.multiple_results = True
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(lambda a, b, **params: [b, b])
    mlir.register_lowering(primitive, lowering or mlir.lower_fun(implementation, multiple_results=True))
    return primitive


def solved(matrices, vectors, *, structure):
    """Solves linear systems for vectors of the type for which it was traced, as Lineax does, which asks for it."""
    if jax.eval_shape(lambda: vectors) != structure:
        raise ValueError("`vectors` do not match `structure`.")
    return [jnp.linalg.solve(matrices, vectors[..., None])[..., 0], -vectors]


def names_of(primitive, **params):
    graph = graph_of(lambda a, b: primitive.bind(a, b, **params), array(16, 4, 4), array(16, 4))
    return [vertex.primitive for vertex in graph.operations()]


@pytest.mark.parametrize("seed", range(3))
def test_a_primitive_whose_parameters_hold_the_types_of_its_operands_runs_on_blocks(seed):
    solve = primitive_of(solved)

    def fn(matrices, vectors):
        structure = jax.eval_shape(lambda: vectors)
        return solve.bind(matrices + 9 * jnp.eye(4), vectors, structure=structure)

    program = check(fn, (array(16, 4, 4), array(16, 4)), seed, (2, 4))
    names = [vertex.primitive for vertex in program.graph.operations()]
    assert "foreign" not in names
    assert {"lu", "triangular_solve"} <= set(names)


def test_equal_equations_share_an_implementation():
    traces = []

    def implementation(a, b):
        traces.append(a)
        return [a @ b, b]

    twice = primitive_of(implementation, lambda context, *operands: operands[1:] * 2)
    graph = graph_of(lambda a, b: (twice.bind(a, b), twice.bind(a + 1, b)), array(4, 4), array(4, 4))
    assert [vertex.primitive for vertex in graph.operations()].count("dot_general") == 2
    assert len(traces) == 1


def test_a_primitive_that_is_lowered_to_a_kernel_stays_one_operation():
    kernel = jax.ffi.ffi_lowering("solve_in_one")
    assert names_of(primitive_of(lambda a, b: [-b, b], kernel)) == ["foreign"]
    assert names_of(primitive_of(lambda a, b: [-b, b])) == ["neg"]


def test_a_primitive_that_is_implemented_in_numpy_stays_one_operation():
    def implementation(a, b):
        del a
        return [np.negative(np.asarray(b)), np.asarray(b)]

    assert names_of(primitive_of(implementation, lambda context, *operands: operands[1:] * 2)) == ["foreign"]


def grown(number, limit):
    """Doubles a number until it exceeds a limit; returns it with how often that took."""
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (2 * c[0], c[1] + 1), (1 + number**2, 0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_maps", [1, 2])
def test_a_while_loop_under_vmap_ends_for_each_example_at_its_own_trip(seed, num_maps):
    def fn(numbers, limits):
        loop = grown
        for _ in range(num_maps):
            loop = jax.vmap(loop)
        return loop(numbers, limits**2 * 40)

    shape = (8, 4)[:num_maps]
    check(fn, (array(*shape), array(*shape)), seed, (2, 4))


def test_the_trips_of_a_while_loop_under_vmap():
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    numbers, limits = jnp.zeros(8), jnp.array([0.5, 1, 2, 3, 4, 5, 9, 16])
    for executor in ("program", "constraints"):
        given = (PartitionSpec(("data", "model")),) * 2
        step = diffshard.search(jax.vmap(grown), mesh, hardware="h100", in_shardings=given, executor=executor)
        result, trips = step(*step.plan(numbers, limits).shard(numbers, limits))
        assert trips.tolist() == [0, 0, 1, 2, 2, 3, 4, 4]
        assert result.tolist() == [1, 1, 2, 4, 4, 8, 16, 16]
