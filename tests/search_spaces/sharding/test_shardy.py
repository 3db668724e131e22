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


def _f(*shape):
    return np.random.default_rng(len(shape)).uniform(0.1, 0.9, shape).astype(np.float32)


def _i(*values):
    return np.array(values, np.int32)


def _conv(feature_group_count=1, **options):
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=feature_group_count, **options
    )


def _embed(mode):
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lambda table, index: lax.gather(table, index, numbers, (1, 6), mode=mode)


def _scatter_add(table, index, rows):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(table, index, rows, numbers, mode="fill")


_KEY = jax.random.key(3)
_POSITIVE_DEFINITE = np.eye(4, dtype=np.float32) + 0.1 * np.ones((6, 4, 4), np.float32)

# One letter for a factor, in order of appearance: capitals must not be sharded, "1" has size one, "(ab)" is one
# dimension with a the major factor. After "|" come the factors that leave partial results, "+" where these are sums.
CASES = {
    "add": (lambda x, y: x + y, [_f(4, 6), _f(4, 6)], "ab,ab->ab"),
    "add_scalar": (lambda x: x + 1, [_f(4, 6)], "ab,->ab"),
    "select_n": (lambda c, x, y: lax.select_n(c, x, y), [_f(4, 6) > 0.5, _f(4, 6), _f(4, 6)], "ab,ab,ab->ab"),
    "clamp": (lambda x: lax.clamp(0.2, x, 0.6), [_f(4, 6)], ",ab,->ab"),
    "logistic": (lax.logistic, [_f(4, 6)], "ab->ab"),
    "erf": (lax.erf, [_f(4, 6)], "ab->ab"),
    "erf_inv": (lax.erf_inv, [_f(4, 6)], "ab->ab"),
    "lgamma": (lax.lgamma, [_f(4, 6)], "ab->ab"),
    "digamma": (lax.digamma, [_f(4, 6)], "ab->ab"),
    "igamma": (lax.igamma, [_f(4, 6), _f(4, 6)], "ab,ab->ab"),
    "integer_pow": (lambda x: x**3, [_f(4, 6)], "ab->ab"),
    "convert": (lambda x: x.astype(jnp.bfloat16), [_f(4, 6)], "ab->ab"),
    "barrier": (lax.optimization_barrier, [(_f(4, 6), _f(8))], "ab,c->ab,c"),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), [], "->ab"),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (8, 4, 6), (1, 2)), [_f(4, 1)], "a1->bac"),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [_f(4, 6, 8)], "abc->cab"),
    "rev": (lambda x: lax.rev(x, (1,)), [_f(4, 6)], "aB->aB"),
    "reshape_merge": (lambda x: x.reshape(24, 8), [_f(4, 6, 8)], "abc->(ab)c"),
    "reshape_split": (lambda x: x.reshape(4, 2, 12), [_f(8, 12)], "(ab)c->abc"),
    "reshape_both": (lambda x: x.reshape(16, 6), [_f(4, 24)], "a(bc)->(ab)c"),
    "expand_dims": (lambda x: lax.expand_dims(x, (1,)), [_f(4, 6)], "ab->a1b"),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [_f(4, 1, 6)], "a1b->ab"),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [_f(4, 6), _f(4, 2)], "aB,aB->aB"),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5)), [_f(4, 8)], "aB->aB"),
    "split": (lambda x: lax.split(x, (2, 6), axis=1), [_f(4, 8)], "aB->aB,aB"),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), [_f(4, 6)], "aB,->aB"),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (0, i), (4, 2)), [_f(4, 6), np.int32(3)], "aB,,->aB"),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        [_f(4, 6), _f(4, 2), np.int32(3)],
        "aB,aC,,->aB",
    ),
    "dynamic_update_row": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        [_f(4, 6), _f(4, 1), np.int32(3)],
        "ab,a1,,->ab",
    ),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), [_f(4, 6)], "ab->a|b+"),
    "reduce_max": (lambda x: x.max(0), [_f(4, 6)], "ab->b|a"),
    "reduce_and": (lambda x: x.all(0), [_f(4, 6) > 0.2], "ab->b|a"),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), [_f(4, 6)], "aB->a"),
    "cumsum": (lambda x: lax.cumsum(x, 1), [_f(4, 6)], "aB->aB"),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), [_f(4, 6)], "Ab->Ab"),
    "sort": (lambda x: lax.sort(x, dimension=1), [_f(4, 6)], "aB->aB"),
    "sort_pairs": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), [_f(4, 6), _f(4, 6)], "Ab,Ab->Ab,Ab"),
    "top_k": (lambda x: lax.top_k(x, 3), [_f(4, 6)], "aB->aB,aB"),
    "dot": (lambda x, y: x @ y, [_f(4, 6), _f(6, 8)], "ab,bc->ac|b+"),
    "dot_batched": (lambda x, y: jnp.einsum("abc,abd->acd", x, y), [_f(4, 6, 2), _f(4, 6, 8)], "abc,abd->acd|b+"),
    "dot_bfloat16": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        [jnp.asarray(_f(4, 6), jnp.bfloat16), jnp.asarray(_f(6, 8), jnp.bfloat16)],
        "ab,bc->ac|b+",
    ),
    "convolution": (_conv(padding="SAME"), [_f(2, 8, 8, 4), _f(3, 3, 4, 6)], "aBCd,EFdg->aBCg|d+"),
    "convolution_depthwise": (_conv(4, padding="VALID"), [_f(2, 8, 8, 4), _f(3, 3, 1, 4)], "aBCd,EF1d->aBCd"),
    "max_pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        [_f(4, 8, 6)],
        "aBc->aBc",
    ),
    "embed": (_embed("clip"), [_f(8, 6), _i([[1], [3]], [[0], [5]])], "ab,cd1->cdb|a+"),
    "embed_fill": (_embed("fill"), [_f(8, 6), _i([[1], [3]], [[0], [5]])], "ab,cd1->cdb|a+"),
    "scatter_add": (_scatter_add, [_f(8, 6), _i([1], [3], [1], [5]), _f(4, 6)], "ab,c1,cb->ab|c+"),
    "ragged_dot": (lax.ragged_dot, [_f(8, 6), _f(2, 6, 4), _i(3, 5)], "Ab,Cbd,E->Ad|b+"),
    "ragged_contraction": (
        lambda x, y, sizes: lax.ragged_dot_general(
            x, y, sizes, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        ),
        [_f(8, 6), _f(8, 4), _i(3, 5)],
        "Ab,Ac,D->ebc",
    ),
    "reshape_uncommon": (lambda x: x.reshape(3, 8), [_f(4, 6)], "A(Bc)->d(ec)"),
    "fft": (lambda x: jnp.fft.fft(x), [_f(4, 6).astype(np.complex64)], "aB->aB"),
    "cholesky": (lambda x: lax.linalg.cholesky_p.bind(x), [_POSITIVE_DEFINITE], "aBC->aDE"),
    "eigh": (lambda x: lax.linalg.eigh(x), [_POSITIVE_DEFINITE], "aBC->aDE,aF"),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), [_POSITIVE_DEFINITE], "aBC->aDE,aFG"),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        [_POSITIVE_DEFINITE, _f(6, 4, 2)],
        "aBC,aDE->aFG",
    ),
    "random_bits": (lambda k: jax.random.bits(k, (4, 6)), [_KEY], "->ab"),
    "random_bits_keys": (
        lambda k: jax.vmap(lambda k: jax.random.bits(k, (6,)))(k),
        [jax.random.split(_KEY, 4)],
        "a->ab",
    ),
    "random_split": (lambda k: jax.random.split(k, 4), [_KEY], "->a"),
    "fold_in": (lambda k, i: jax.random.fold_in(k, i), [_KEY, np.uint32(1)], ",->"),
}


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
    x = _f(4)

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
    equations = _equations(lambda x: jnp.sin(unknown.bind(jnp.cos(x))), _f(5, 3))
    assert [rule is not None for rule in operation_rules(equations)] == [True, False, True]


def test_equal_equations_of_two_traces_are_looked_up_once(monkeypatch):
    def trace():  # a new function each time: JAX caches traces by identity
        return _equations(lambda x, i, u: x.at[i].add(u) * 3, _f(7, 5), _i(1, 2), _f(2, 5))

    first = operation_rules(trace())
    monkeypatch.setattr(shardy, "_new_rules", lambda equations: pytest.fail("looked up again") if equations else [])
    assert operation_rules(trace()) == first


def test_rules_do_not_depend_on_what_is_lowered_beside_them():
    x = _f(4, 6, 9)
    together = operation_rules(_equations(lambda x: (x.sum(0), x.reshape(24, 9), jnp.sort(x, 1)), x))
    alone = [operation_rules(_equations(f, x))[-1] for f in (lambda x: x.sum(0), lambda x: x.reshape(24, 9))]
    assert together[:2] == alone
