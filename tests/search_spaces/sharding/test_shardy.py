"""Rules against what the operations do: by notation worked out by hand and by changing the inputs block by block."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, Primitive

from search_spaces.sharding import shardy
from search_spaces.sharding.base import Rule
from search_spaces.sharding.shardy import operation_rules
from tests.search_spaces.sharding.rule_cases import CASES, f32, i32


def _last_equation(function, arguments):
    """The last equation that a function does, calls opened, and the values of its operands."""
    closed = jax.make_jaxpr(function)(*arguments)
    values = jax.tree.leaves(arguments)
    while True:
        known = dict(zip(closed.jaxpr.invars, values, strict=True))

        def read(v, known=known):
            return v.val if isinstance(v, Literal) else known[v]

        *before, last = closed.jaxpr.eqns
        for equation in before:
            results = _run(equation, [read(v) for v in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        values = [read(v) for v in last.invars]
        if last.primitive.name not in ("jit", "pjit"):
            return last, values
        closed = last.params["jaxpr"]


def _run(equation, values):
    results = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def _notation(rule: Rule) -> str:
    letters = {}
    for array in (*rule.operands, *rule.results):
        for factor in itertools.chain(*array):
            if rule.sizes[factor] != 1 and factor not in letters:
                letters[factor] = chr(ord("a") + len(letters))

    def name(factor):
        closed = factor in rule.need_replication | rule.permutation
        return "1" if factor not in letters else letters[factor].upper() if closed else letters[factor]

    def text_of(dims):
        names = ["".join(name(f) for f in dim if rule.sizes[f] != 1) or "1" for dim in dims]
        return "".join(n if len(n) == 1 else f"({n})" for n in names)

    text = f"{','.join(map(text_of, rule.operands))}->{','.join(map(text_of, rule.results))}"
    partial = "".join(sorted(letters[f] for f in rule.reduction if f in letters))
    return text + (f"|{partial}{'+' * rule.reduction_is_sum}" if partial else "")


def _blocks(values, dims_of_arrays, rule, factor, num_blocks):
    """For each array the block number of each entry along a factor, or None where the array lacks it."""
    blocks = []
    for value, dims in zip(values, dims_of_arrays, strict=True):
        shape = np.shape(value)
        found = None
        for axis, dim in enumerate(dims):
            if factor in dim:
                minor = math.prod(rule.sizes[f] for f in dim[dim.index(factor) + 1 :])
                part = np.arange(shape[axis]) // minor % rule.sizes[factor] // (rule.sizes[factor] // num_blocks)
                found = np.broadcast_to(np.expand_dims(part, tuple(i for i in range(len(shape)) if i != axis)), shape)
        blocks.append(found)
    return blocks


def _shardable(rule):
    mentioned = {f for array in (*rule.operands, *rule.results) for dim in array for f in dim}
    return [f for f in sorted(mentioned - rule.need_replication - rule.permutation) if rule.sizes[f] > 1]


def _keep(value, blocks, block, other):
    """A value with another one's entries outside of a block."""
    if blocks is None:
        return value
    if jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key):
        return jnp.where(blocks == block, value, jax.random.key(9))
    return jnp.where(blocks == block, value, jnp.asarray(other, value.dtype))


def _identity_of(equation):
    """What blocks held by other devices are replaced with, so that the reduction ignores them."""
    return {"reduce_max": -np.inf, "reduce_and": True}.get(equation.primitive.name, 0)


def _combine(equation, parts):
    if equation.primitive.name == "reduce_max":
        return functools.reduce(jnp.maximum, parts)
    return functools.reduce(jnp.logical_and if equation.primitive.name == "reduce_and" else jnp.add, parts)


def _same(left, right):
    if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        left, right = jax.random.key_data(left), jax.random.key_data(right)
    np.testing.assert_allclose(np.asarray(left, np.complex64), np.asarray(right, np.complex64), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_devices_that_hold_blocks_find_the_whole_result(name):
    """A device's results do not depend on other devices' blocks, and partial results combine to the whole."""
    function, arguments, _ = CASES[name]
    equation, values = _last_equation(function, arguments)
    (rule,) = operation_rules([equation])
    assert rule is not None
    whole = _run(equation, values)
    for factor in _shardable(rule):
        num_blocks = 2 if rule.sizes[factor] % 2 == 0 else rule.sizes[factor]
        operand_blocks = _blocks(values, rule.operands, rule, factor, num_blocks)
        result_blocks = _blocks(whole, rule.results, rule, factor, num_blocks)
        partial = []
        for block in range(num_blocks):
            fill = _identity_of(equation) if factor in rule.reduction else 0.37
            kept = [_keep(v, b, block, fill) for v, b in zip(values, operand_blocks, strict=True)]
            results = _run(equation, kept)
            if factor in rule.reduction:
                partial.append(results)
                continue
            for found, expected, blocks in zip(results, whole, result_blocks, strict=True):
                mine = np.ones(expected.shape, bool) if blocks is None else blocks == block
                _same(found[mine], expected[mine])
        if partial:
            assert len(whole) == 1
            combined = _combine(equation, [results[0] for results in partial])
            # Each device starts a scatter from the operand, which counts once.
            if equation.primitive.name == "scatter-add":
                combined = combined - (num_blocks - 1) * values[0]
            _same(combined, whole[0])


@pytest.mark.parametrize("name", CASES)
def test_rule_is_the_one_worked_out_by_hand(name):
    function, arguments, expected = CASES[name]
    equation, _ = _last_equation(function, arguments)
    (rule,) = operation_rules([equation])
    assert rule is not None
    assert _notation(rule) == expected
    assert len(rule.operands) == len(equation.invars)
    for v, dims in zip((*equation.invars, *equation.outvars), (*rule.operands, *rule.results), strict=True):
        assert len(dims) == len(v.aval.shape)


def _equations(function, *arguments):
    return jax.make_jaxpr(function)(*arguments).jaxpr.eqns


def test_higher_order_equations_and_effects_have_no_rule():
    x = f32(4)

    def function(x):
        jax.debug.print("{}", x)
        x = jax.jit(jnp.sin)(x)
        x = lax.fori_loop(0, 3, lambda i, x: x + i, x)
        x = lax.cond(x[0] > 0, lambda x: x, lambda x: -x, x)
        return jax.checkpoint(jnp.cos)(x)

    equations = _equations(function, x)
    for equation, rule in zip(equations, operation_rules(equations), strict=True):
        if equation.primitive.name not in ("slice", "squeeze", "gt", "convert_element_type", "reshape"):
            assert rule is None, equation


def test_a_primitive_that_cannot_be_lowered_costs_no_other_its_rule():
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    equations = _equations(lambda x: jnp.sin(unknown.bind(jnp.cos(x))), f32(5, 3))
    assert [rule is not None for rule in operation_rules(equations)] == [True, False, True]


def test_equal_equations_of_two_traces_are_looked_up_once(monkeypatch):
    def trace():  # a new function each time: JAX caches traces by identity
        return _equations(lambda x, i, u: x.at[i].add(u) * 3, f32(7, 5), i32(1, 2), f32(2, 5))

    first = operation_rules(trace())
    monkeypatch.setattr(shardy, "_new_rules", lambda equations: pytest.fail("looked up again") if equations else [])
    assert operation_rules(trace()) == first


def test_rules_do_not_depend_on_what_is_lowered_beside_them():
    x = f32(4, 6, 9)
    together = operation_rules(_equations(lambda x: (x.sum(0), x.reshape(24, 9), jnp.sort(x, 1)), x))
    alone = [operation_rules(_equations(f, x))[-1] for f in (lambda x: x.sum(0), lambda x: x.reshape(24, 9))]
    assert together[:2] == alone
