"""Equations of one operation each, with the rules that were worked out for them by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def f32(*shape):
    """Numbers between 0.1 and 0.9."""
    return np.random.default_rng(len(shape)).uniform(0.1, 0.9, shape).astype(np.float32)


def i32(*values):
    """A vector of the given numbers."""
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
    "add": (lambda x, y: x + y, [f32(4, 6), f32(4, 6)], "ab,ab->ab"),
    "add_scalar": (lambda x: x + 1, [f32(4, 6)], "ab,->ab"),
    "select_n": (
        lambda c, x, y: lax.select_n(c, x, y),
        [f32(4, 6) > 0.5, f32(4, 6), f32(4, 6)],
        "ab,ab,ab->ab",
    ),
    "clamp": (lambda x: lax.clamp(0.2, x, 0.6), [f32(4, 6)], ",ab,->ab"),
    "logistic": (lax.logistic, [f32(4, 6)], "ab->ab"),
    "erf": (lax.erf, [f32(4, 6)], "ab->ab"),
    "erf_inv": (lax.erf_inv, [f32(4, 6)], "ab->ab"),
    "lgamma": (lax.lgamma, [f32(4, 6)], "ab->ab"),
    "digamma": (lax.digamma, [f32(4, 6)], "ab->ab"),
    "igamma": (lax.igamma, [f32(4, 6), f32(4, 6)], "ab,ab->ab"),
    "integer_pow": (lambda x: x**3, [f32(4, 6)], "ab->ab"),
    "convert": (lambda x: x.astype(jnp.bfloat16), [f32(4, 6)], "ab->ab"),
    "barrier": (lax.optimization_barrier, [(f32(4, 6), f32(8))], "ab,c->ab,c"),
    "name": (lambda x: checkpoint_name(x, "hidden"), [f32(4, 6)], "ab->ab"),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), [], "->ab"),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (8, 4, 6), (1, 2)), [f32(4, 1)], "a1->bac"),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [f32(4, 6, 8)], "abc->cab"),
    "rev": (lambda x: lax.rev(x, (1,)), [f32(4, 6)], "aB->aB"),
    "reshape_merge": (lambda x: x.reshape(24, 8), [f32(4, 6, 8)], "abc->(ab)c"),
    "reshape_split": (lambda x: x.reshape(4, 2, 12), [f32(8, 12)], "(ab)c->abc"),
    "reshape_both": (lambda x: x.reshape(16, 6), [f32(4, 24)], "a(bc)->(ab)c"),
    "expand_dims": (lambda x: lax.expand_dims(x, (1,)), [f32(4, 6)], "ab->a1b"),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [f32(4, 1, 6)], "a1b->ab"),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [f32(4, 6), f32(4, 2)], "aB,aB->aB"),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5)), [f32(4, 8)], "aB->aB"),
    "split": (lambda x: lax.split(x, (2, 6), axis=1), [f32(4, 8)], "aB->aB,aB"),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), [f32(4, 6)], "aB,->aB"),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (0, i), (4, 2)), [f32(4, 6), np.int32(3)], "aB,,->aB"),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        [f32(4, 6), f32(4, 2), np.int32(3)],
        "aB,aC,,->aB",
    ),
    "dynamic_update_row": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        [f32(4, 6), f32(4, 1), np.int32(3)],
        "ab,a1,,->ab",
    ),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), [f32(4, 6)], "ab->a|b+"),
    "reduce_max": (lambda x: x.max(0), [f32(4, 6)], "ab->b|a"),
    "reduce_and": (lambda x: x.all(0), [f32(4, 6) > 0.2], "ab->b|a"),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), [f32(4, 6)], "aB->a"),
    "cumsum": (lambda x: lax.cumsum(x, 1), [f32(4, 6)], "aB->aB"),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), [f32(4, 6)], "Ab->Ab"),
    "sort": (lambda x: lax.sort(x, dimension=1), [f32(4, 6)], "aB->aB"),
    "sort_pairs": (
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=1),
        [f32(4, 6), f32(4, 6)],
        "Ab,Ab->Ab,Ab",
    ),
    "top_k": (lambda x: lax.top_k(x, 3), [f32(4, 6)], "aB->aB,aB"),
    "dot": (lambda x, y: x @ y, [f32(4, 6), f32(6, 8)], "ab,bc->ac|b+"),
    "dot_batched": (
        lambda x, y: jnp.einsum("abc,abd->acd", x, y),
        [f32(4, 6, 2), f32(4, 6, 8)],
        "abc,abd->acd|b+",
    ),
    "dot_bfloat16": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        [jnp.asarray(f32(4, 6), jnp.bfloat16), jnp.asarray(f32(6, 8), jnp.bfloat16)],
        "ab,bc->ac|b+",
    ),
    "convolution": (_conv(padding="SAME"), [f32(2, 8, 8, 4), f32(3, 3, 4, 6)], "aBCd,EFdg->aBCg|d+"),
    "convolution_depthwise": (_conv(4, padding="VALID"), [f32(2, 8, 8, 4), f32(3, 3, 1, 4)], "aBCd,EF1d->aBCd"),
    "max_pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        [f32(4, 8, 6)],
        "aBc->aBc",
    ),
    "embed": (_embed("clip"), [f32(8, 6), i32([[1], [3]], [[0], [5]])], "ab,cd1->cdb|a+"),
    "embed_fill": (_embed("fill"), [f32(8, 6), i32([[1], [3]], [[0], [5]])], "ab,cd1->cdb|a+"),
    "scatter_add": (_scatter_add, [f32(8, 6), i32([1], [3], [1], [5]), f32(4, 6)], "ab,c1,cb->ab|c+"),
    "ragged_dot": (lax.ragged_dot, [f32(8, 6), f32(2, 6, 4), i32(3, 5)], "Ab,Cbd,E->Ad|b+"),
    "ragged_contraction": (
        lambda x, y, sizes: lax.ragged_dot_general(
            x, y, sizes, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        ),
        [f32(8, 6), f32(8, 4), i32(3, 5)],
        "Ab,Ac,D->ebc",
    ),
    "reshape_uncommon": (lambda x: x.reshape(3, 8), [f32(4, 6)], "A(Bc)->d(ec)"),
    "fft": (lambda x: jnp.fft.fft(x), [f32(4, 6).astype(np.complex64)], "aB->aB"),
    "cholesky": (lambda x: lax.linalg.cholesky_p.bind(x), [_POSITIVE_DEFINITE], "aBC->aDE"),
    "eigh": (lambda x: lax.linalg.eigh(x), [_POSITIVE_DEFINITE], "aBC->aDE,aF"),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), [_POSITIVE_DEFINITE], "aBC->aDE,aFG"),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        [_POSITIVE_DEFINITE, f32(6, 4, 2)],
        "aBC,aDe->aFe",
    ),
    "triangular_solve_rows": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True),
        [_POSITIVE_DEFINITE, f32(6, 2, 4)],
        "aBC,adE->adF",
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
