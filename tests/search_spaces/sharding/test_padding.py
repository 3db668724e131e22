"""Dimensions that do not divide: split and padded inside the function, whole where they come in and go out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from diffshard.checks.collectives import hlo_collectives
from search_spaces.sharding.base import Axes, Rule
from search_spaces.sharding.spec import may_split, specs_of_shape
from search_spaces.sharding.strategies import strategies_of_rule
from tests.search_spaces.sharding.small_spaces import array, space_of

VOCABULARY, WIDTH, TOKENS = 1003, 8, 24
# Arithmetic dear and links fast, so that all that can be split is.
HARDWARE = diffshard.Hardware(
    "odd", 1e7, float("inf"), float("inf"), {a: diffshard.Link(1e-9, 1e-9) for a in ("x", "y")}
)


def step(table, tokens, targets):
    """Cross entropy over an odd vocabulary with tied embeddings, and a step of the table."""

    def loss(table):
        logits = jnp.tanh(table[tokens]) @ table.T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).mean()

    value, gradient = jax.value_and_grad(loss)(table)
    return table - 0.1 * gradient, value


def test_long_dimensions_may_be_padded_and_short_ones_not():
    assert may_split(50257, (0,), (8,))
    assert may_split(16, (0,), (8,))
    assert not may_split(12, (0,), (8,))
    assert not may_split(3, (0,), (2,))
    assert not may_split(50257, (0,), (40000,))


def test_padded_dimensions_are_split_by_one_longest_axis():
    """Parts of different numbers would not start at the same places."""
    assert {axes for (axes,) in specs_of_shape((1003,), (2, 4, 4), with_padding=True)} == {(), (1,), (2,)}
    assert {axes for (axes,) in specs_of_shape((1003,), (2, 4, 4))} == {()}


def test_a_padded_factor_is_all_of_its_dimensions():
    """A dimension that a reshape has merged cannot be padded in its middle."""
    odd = Rule((((0,), (1,)),), (((0,), (1,)),), (1003, 8))
    assert ((0,), ()) in {s.operands[0] for s in strategies_of_rule(odd, Axes((8,), (0,)))}
    merged = Rule((((0,), (1,)),), (((0, 1),),), (1003, 8))
    assert {s.operands[0][0] for s in strategies_of_rule(merged, Axes((8,), (0,)))} == {()}


def test_sums_are_not_scattered_into_padded_dimensions():
    rule = Rule((((0,), (1,)),), (((0,),),), (1003, 8), reduction=frozenset({1}), reduction_is_sum=True)
    kinds = {m.kind for s in strategies_of_rule(rule, Axes((8,), (0,))) for moves in s.reductions for m in moves}
    assert kinds == {"all_reduce"}


def test_arguments_and_results_are_whole_where_they_do_not_divide():
    space = space_of(lambda x: jnp.cos(x).astype(jnp.bfloat16), array(VOCABULARY, 4), sizes=(8,))
    cos, convert = space.graph.operations()
    even = set(specs_of_shape((VOCABULARY, 4), (8,)))
    assert even == {((), ())}
    assert {s.unreduced[0] for s in space.nodes[0].strategies} == even
    assert {s.results[0] for s in space.nodes[cos.index].strategies} == {((), ()), ((0,), ())}
    assert {s.results[0] for s in space.nodes[convert.index].strategies} == even


def is_vocabulary_split(operation):
    """Whether an operation splits a dimension of the vocabulary's size."""
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\[([\d,]+)\]", operation.signature)]
    specs = (*operation.operands, *operation.results)
    return any(
        axes
        for shape, spec in zip(shapes, specs, strict=True)
        for n, axes in zip(shape, spec, strict=True)
        if n == VOCABULARY
    )


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_an_odd_vocabulary_runs_as_on_one_device(sizes, capfd):
    names = ("x", "y")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes))
    keys = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(keys[0], (VOCABULARY, WIDTH))
    tokens, targets = (jax.random.randint(key, (TOKENS,), 0, VOCABULARY) for key in keys[1:])
    searched = diffshard.search(step, mesh, hardware=HARDWARE)
    plan = searched.plan(table, tokens, targets)
    assert any(is_vocabulary_split(o) for o in plan.operations if o.signature.startswith("dot_general"))
    expected = jax.jit(step)(table, tokens, targets)
    found = searched(table, tokens, targets)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=1e-6)
    assert "rematerialization" not in capfd.readouterr().err  # what XLA warns of where a reshard is no single step


def test_xla_pads_and_splits_the_arithmetic():
    """Each of eight devices does an eighth of the product with an odd dimension, and exchanges it in one step."""
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))

    def sharding(*spec):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def fn(table, h):
        table = jax.lax.with_sharding_constraint(table, sharding("x", None))
        return jax.lax.with_sharding_constraint(h @ table.T, sharding(None, "x")).max(axis=1)

    arguments = array(VOCABULARY, 64), array(32, 64)
    compiled = jax.jit(fn, in_shardings=(sharding(None, "x"), sharding())).lower(*arguments).compile()
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    assert cost is not None
    whole = 2 * VOCABULARY * 64 * 32
    assert whole / 8 <= cost["flops"] <= 1.1 * whole / 8
    found = hlo_collectives(compiled.as_text() or "", {"x": 8})
    assert [c.kind for c in found] == ["all_to_all", "all_reduce"]
    assert found[0].num_bytes == pytest.approx(VOCABULARY * 64 * 4, rel=0.01)
