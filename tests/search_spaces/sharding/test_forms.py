"""Vertices of one form compute the same as often, on arrays of equal types; what they read does not matter."""

import jax
import jax.numpy as jnp

from search_spaces.sharding.base import Rule
from search_spaces.sharding.forms import forms_of
from tests.search_spaces.sharding.small_spaces import array, graph_of, space_of

X = array(8, 8)


def forms(fn, *args, primitive):
    """The forms of a function's operations of one kind, in order."""
    space = space_of(fn, *args)
    return [space.forms[v.index] for v in space.graph.operations() if v.primitive == primitive]


def scan(trips, x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=trips)[0]


def test_equal_operations_have_one_form_whatever_they_read():
    one, other = forms(lambda a, b: jnp.sin(a) @ jnp.sin(b), X, X, primitive="sin")
    assert one == other
    one, other = forms(lambda a, b: jnp.sin(a).sum() + jnp.sin(b).sum(), X, array(8, 4), primitive="sin")
    assert one != other


def test_operations_that_run_more_often_have_another_form():
    one, other, again = forms(lambda x, w: scan(3, scan(5, scan(3, x, w), w), w), X, X, primitive="dot_general")
    assert one == again
    assert one != other


def test_operations_without_operands_that_run_more_often_have_another_form():
    def counted(trips, x):
        return jax.lax.scan(lambda c, _: (c + jax.lax.broadcasted_iota(jnp.float32, (8, 8), 0), None), x, length=trips)[
            0
        ]

    one, other, again = forms(lambda x: counted(3, counted(5, counted(3, x))), X, primitive="iota")
    assert one == again
    assert one != other


def test_carries_of_longer_loops_have_another_form():
    space = space_of(lambda x, w: scan(3, scan(5, scan(3, x, w), w), w), X, X)
    one, other, again = (space.forms[v.index] for v in space.graph.vertices if v.kind == "carry")
    assert one == again  # its body reads it three times, and leaves it once
    assert one != other


def test_arrays_of_other_types_and_literals_are_told_apart():
    graph = graph_of(lambda a, b, s: (a.astype(jnp.float32) + b) * 2.0 * s, array(8, 8, dtype=jnp.bfloat16), X, array())
    rule = Rule((), (), ())
    numbers = forms_of(graph, [rule] * len(graph.vertices))
    a, b, _ = (numbers[v.index] for v in graph.inputs)
    assert a != b
    by_literal, by_scalar = (numbers[v.index] for v in graph.operations() if v.primitive == "mul")
    assert by_literal != by_scalar


def test_an_operation_without_a_rule_has_a_form_of_its_own():
    graph = graph_of(lambda a: jnp.sin(jnp.sin(a)), X)
    one, other = (forms_of(graph, [None] * len(graph.vertices))[v.index] for v in graph.operations())
    assert one != other
