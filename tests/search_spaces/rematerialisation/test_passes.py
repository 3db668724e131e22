"""Forward and backward passes are found in a step that is differentiated already."""

import jax
import jax.numpy as jnp
import pytest

from search_spaces.rematerialisation.passes import is_backward, passes_of
from search_spaces.sharding.graph import Vertex
from tests.search_spaces.rematerialisation.differentiated_steps import STEPS, arguments, graph_of


def test_equations_of_a_backward_pass_stand_in_transpose():
    """JAX writes it so; if a version spells it in another way, everything is forward, and nothing is computed again."""

    def fn(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    graph = graph_of(fn, (jnp.ones((3, 4)), jnp.ones((2, 3))))
    names = [(step.primitive, is_backward(graph, step)) for step in graph.block.steps if isinstance(step, Vertex)]
    assert ("tanh", False) in names
    assert [back for name, back in names if name == "dot_general"] == [False, True]


def test_transposing_an_array_is_no_backward_pass():
    graph = graph_of(lambda x: jnp.sin(jnp.transpose(x)) @ x, (jnp.ones((3, 3)),))
    assert passes_of(graph) == []


@pytest.mark.parametrize(
    ("name", "pairs"), [("layers", 0), ("scan", 1), ("scan in microbatches", 1), ("nested scans", 1)]
)
def test_two_scans_that_are_the_passes_of_one_loop_are_a_pair(name, pairs):
    passes = passes_of(graph_of(STEPS[name], arguments()))
    assert [one.pair is not None for one in passes] == [False] + [True] * pairs
    assert all(one.length == 3 for one in passes if one.pair is not None)
