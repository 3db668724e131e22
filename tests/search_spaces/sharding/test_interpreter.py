"""What both executors run of a traced function: barriers of remat, and the steps of every reshard."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from search_spaces.sharding.schedule import ProgramSchedule
from tests.search_spaces.sharding.small_spaces import array, space_of

MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def equations_of(function, space):
    """All equations of a function of the space's arguments, those inside other equations included."""
    arguments = [jax.ShapeDtypeStruct(v.results[0].shape, v.results[0].dtype) for v in space.graph.inputs]

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(lambda *arrays: function(*arrays))(*arguments).jaxpr))


def both_executors(space, choice):
    """A layout by constraints, and as a program that the compiler orders."""
    layout = space.layout(choice)
    program = space.device_program(layout, MESH)
    program.schedule = ProgramSchedule()
    return {"constraints": space.execution(layout, MESH), "program": program}


@pytest.mark.parametrize("executor", ["constraints", "program"])
def test_what_is_rematerialised_reads_through_a_barrier(executor):
    def fn(w, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        return jax.grad(lambda w: (layer(layer(x, w), w) ** 2).sum())(w)

    space = space_of(fn, array(8, 8), array(8, 8))
    equations = equations_of(both_executors(space, [0] * len(space.nodes))[executor], space)
    barriers = [equation for equation in equations if equation.primitive.name == "optimization_barrier"]
    products = [equation for equation in equations if equation.primitive.name == "dot_general"]
    # Two products forward; in each region one again, and two for the gradients, of which the first layer needs one.
    assert len(products) == 2 + 2 + 3
    assert len(barriers) == 2
    for barrier in barriers:
        reads = [product for product in products if set(barrier.outvars) & set(product.invars)]
        assert reads, "no product reads what has passed the barrier"


@pytest.mark.parametrize("executor", ["constraints", "program"])
def test_a_forward_pass_alone_has_no_barrier(executor):
    space = space_of(lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x).sum(), array(8, 8), array(8, 8))
    equations = equations_of(both_executors(space, [0] * len(space.nodes))[executor], space)
    names = [equation.primitive.name for equation in equations]
    assert "dot_general" in names
    assert "optimization_barrier" not in names
