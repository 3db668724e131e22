"""A step whose batch is computed in interleaved pieces is the step of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from experiments import interleaved_pieces
from experiments.models import mlp
from tests.search_spaces.pipelines.microbatch_functions import FUNCTIONS


@pytest.mark.parametrize("name", ["training step", "dropout", "rematerialised layers", "balanced experts"])
def test_results_are_those_of_the_whole_batch(name):
    fn, args = FUNCTIONS[name]
    results = jax.jit(interleaved_pieces.in_pieces(fn, 2))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))


def test_weights_are_converted_once_and_products_divided():
    """The shared cast of a weight stands once in the program; the product that reads it stands once for each piece."""

    def step(weight, x):
        return (x.astype("bfloat16") @ weight.astype("bfloat16")).sum()

    args = jnp.ones((4, 8)), jnp.ones((6, 4))
    equations = jax.make_jaxpr(interleaved_pieces.in_pieces(step, 3))(*args).eqns
    assert [e.primitive.name for e in equations].count("dot_general") == 3
    assert [e.invars[0].aval.shape for e in equations if e.primitive.name == "convert_element_type"].count((4, 8)) == 1


def test_gradients_that_are_reduced_once_take_no_longer():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    row = list(interleaved_pieces.cells(mlp.make(), mesh, 2, 2.0, is_compiled=False))
    assert len(row) == len(interleaved_pieces.COLUMNS)
    *separate, once, once_without_pauses = map(float, row[4:-1])
    assert 0 < once <= separate[0]
    assert 0 < once_without_pauses <= separate[1]
