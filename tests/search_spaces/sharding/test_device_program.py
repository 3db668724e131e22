"""Layouts as explicit programs for each device compute what one device computes, also with layouts drawn at random."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import diffshard
from cost.base import num_strategies
from search_spaces.sharding import scheduling
from tests.search_spaces.sharding.small_spaces import EXAMPLES, array, hardware_of, space_of

AXES = ("x", "y", "z")


def run(fn, arrays, choose, sizes):
    """Results of a function by a layout, and by one device."""
    space = space_of(fn, *jax.tree.map(lambda a: array(*a.shape, dtype=a.dtype), arrays), sizes=sizes)
    mesh = jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    program = space.device_program(space.layout(choose(space)), mesh)
    results = jax.jit(program)(*jax.tree.leaves(arrays))
    return results, jax.tree.leaves(jax.jit(fn)(*arrays)), program


def at_random(seed):
    """A strategy for each node, drawn evenly."""
    return lambda space: np.random.default_rng(seed).integers(num_strategies(space.problem)).tolist()


def numbers(aval, seed):
    """Random numbers of a shape and type."""
    rng = np.random.default_rng(seed)
    if aval.dtype == jnp.bool:
        return jnp.asarray(rng.random(aval.shape) < 0.5)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(rng.integers(-3, 9, aval.shape), aval.dtype)
    return jnp.asarray(rng.normal(size=aval.shape) / 2, aval.dtype)


def check(fn, avals, seed, sizes):
    leaves, structure = jax.tree.flatten(avals)
    arrays = jax.tree.unflatten(structure, [numbers(a, i) for i, a in enumerate(leaves)])
    results, expected, program = run(fn, arrays, at_random(seed), sizes)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-4, atol=2e-5)
    return program


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", EXAMPLES)
def test_random_layouts_of_programs(name, seed, sizes):
    fn, avals = EXAMPLES[name]
    check(fn, avals, seed, sizes)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", EXAMPLES)
def test_random_layouts_with_a_barrier_after_every_contraction(name, seed, monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    fn, avals = EXAMPLES[name]
    check(fn, avals, 10 + seed, (2, 4))


def test_weights_that_are_transposed_and_cast_are_gathered_early(monkeypatch):
    """What is fetched is made of what is stored, by a chain of cheap operations, a window before its product."""
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w.T.astype(jnp.bfloat16))
        return x

    avals = [array(16, 16)] * 4, array(512, 16, dtype=jnp.bfloat16)
    arrays = jax.tree.map(lambda a: numbers(a, 0), avals)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    stored = dict.fromkeys(range(4), ((0,), ()))
    space = space_of(layers, *avals, sizes=(4,), given={**stored, 4: ((0,), ())}, hardware=hardware)
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    program = space.device_program(space.layout(diffshard.solve(space.problem, solver="exact").choice), mesh)
    chains = {tuple(v.primitive for v in fetch.chain) for fetch in program.schedule.fetches.values()}
    assert chains == {("transpose", "convert_element_type")}
    found, expected = jax.jit(program)(*jax.tree.leaves(arrays))[0], jax.jit(layers)(*arrays)
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=0.02)


def lookup(mode):
    return lambda table, ids: table.at[ids].get(mode=mode, fill_value=7.0)


def update(method, mode):
    return lambda table, ids, rows: getattr(table.at[ids], method)(rows, mode=mode)


def convolved(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def strided(x, w):
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def grouped_and_gradients(groups):
    def fn(w, x):
        return convolved(x, w, groups), jax.grad(lambda w, x: (convolved(x, w, groups) ** 2).sum(), (0, 1))(w, x)

    return fn


def ragged(contracted, sizes, *prefix):
    """A product of ragged rows, and its gradients; `prefix` are the dimensions before the rows."""
    sizes = jnp.broadcast_to(jnp.array(sizes, jnp.int32), (*prefix, len(sizes)))
    batch = tuple(range(len(prefix)))
    if contracted:
        dims, groups = (((len(prefix),), (len(prefix),)), (batch, batch)), ()
    else:
        dims, groups = (((len(prefix) + 1,), (len(prefix) + 1,)), (batch, batch)), (len(prefix),)
    numbers = lax.RaggedDotDimensionNumbers(dims, (len(prefix),), groups)
    return lambda x, y: lax.ragged_dot_general(x, y, sizes, numbers)


def with_gradients(fn):
    return lambda *x: (fn(*x), jax.grad(lambda *x: (fn(*x) ** 2).sum(), tuple(range(len(x))))(*x))


def row_written(cache, row, at):
    return lax.dynamic_update_slice(cache, row, (0, at[0], 0))


IDS, TABLE, ROWS = array(16, dtype=jnp.int32), array(8, 16), array(16, 16)
OPERATIONS = {
    **{
        f"random bits of {width}": (
            lambda x, width=width: jax.random.bits(jax.random.key(3), x.shape, f"uint{width}").astype(jnp.float32) + x,
            (array(8, 6, 16),),
        )
        for width in (8, 16, 32)
    },
    "random bits of many keys": (
        lambda x: jax.vmap(jax.vmap(lambda k, x: x + jax.random.bits(k, x.shape).astype(jnp.float32)))(
            jax.random.split(jax.random.key(3), (8, 4)), x
        ),
        (array(8, 4, 16),),
    ),
    "random bits of another generator": (
        lambda x: x + jax.random.bits(jax.random.key(3, impl="rbg"), x.shape).astype(jnp.float32), (array(8, 16),),
    ),
    "dropout": (lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, x.shape), x, 0.0), (array(16, 24),)),
    "softmax": (lambda x: jax.nn.softmax(x, axis=1), (array(8, 16),)),
    "norm": (lambda x: x * lax.rsqrt((x**2).mean(axis=-1, keepdims=True)), (array(8, 16),)),
    "attention": (
        lambda q, k, v: jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k)), v),
        (array(4, 8, 8, 4),) * 3,
    ),
    "lookup_clip": (lookup("clip"), (TABLE, IDS)),
    "lookup_fill": (lookup("fill"), (TABLE, IDS)),
    "lookup_in_bounds": (lambda table, ids: table[ids % 8], (TABLE, IDS)),
    "add_rows": (update("add", "drop"), (TABLE, IDS, ROWS)),
    "add_rows_clip": (update("add", "clip"), (TABLE, IDS, ROWS)),
    "max_rows": (update("max", "drop"), (TABLE, IDS, ROWS)),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.int32, x.shape, 1), (array(8, 16),)),
    "causal": (lambda x: jnp.where(jnp.tril(jnp.ones((16, 16), bool)), x, -1.0).max(axis=1), (array(16, 16),)),
    "any_all": (lambda x: (jnp.any(x > 0.5, axis=0), jnp.all(x > -1.0, axis=1)), (array(8, 16),)),
    "argmax": (lambda x: (jnp.argmax(x, axis=1), jnp.argmin(x, axis=0)), (array(8, 16),)),
    "sort": (lambda x: jnp.sort(x, axis=1), (array(8, 16),)),
    "top_k": (lambda x: lax.top_k(x, 3), (array(8, 16),)),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (array(8, 16),)),
    "reshape": (lambda x: jnp.sin(x.reshape(8, 4, 16)).reshape(32, 16) @ x.reshape(32, 16).T, (array(8, 64),)),
    "reshape without common sizes": (lambda x: x.reshape(9, 16, 2), (array(4, 9, 8),)),
    "slices": (lambda x: jnp.concatenate([x[:, 8:], x[:, :8]], axis=1) + jnp.pad(x[:, 4:], ((0, 0), (4, 0))),
               (array(8, 16),)),
    "split into one piece": (with_gradients(lambda x: 2 * jnp.sin(lax.split(x, (16,), 0)[0])), (array(16, 8),)),
    "split into uneven pieces": (lambda x: lax.split(x, (3, 0, 5), 1), (array(16, 8),)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 4, axis=1),
                      (array(8, 16), array(1, dtype=jnp.int32))),
    "row_written": (row_written, (array(8, 16, 4), array(8, 1, 4), array(1, dtype=jnp.int32))),
    "convolution": (convolved, (array(8, 6, 6, 8), array(3, 3, 8, 16))),
    "convolution_gradient": (jax.grad(lambda w, x: (convolved(x, w) ** 2).sum()), (array(3, 3, 8, 16),
                                                                                  array(8, 6, 6, 8))),
    "convolution with strides": (with_gradients(strided), (array(4, 8, 8, 4), array(3, 3, 4, 8))),
    "convolution of 8 groups of one": (grouped_and_gradients(8), (array(3, 3, 1, 8), array(8, 6, 6, 8))),
    "convolution of 4 groups": (grouped_and_gradients(4), (array(3, 3, 4, 32), array(8, 6, 6, 16))),
    "ragged product": (with_gradients(ragged(False, (5, 0, 6, 2))), (array(16, 8), array(4, 8, 16))),
    "ragged product of a batch": (ragged(False, (5, 3), 4), (array(4, 8, 8), array(4, 2, 8, 16))),
    "ragged contraction": (ragged(True, (5, 0, 6, 2)), (array(16, 8), array(16, 8))),
    "ragged contraction of a batch": (ragged(True, (5, 3), 4), (array(4, 8, 8), array(4, 8, 8))),
    "pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
                (array(8, 4, 4, 8),)),
    "product": (lambda x: jnp.prod(x, axis=0), (array(8, 16),)),
    "parity": (lambda x: lax.reduce_xor(x, (1,)), (array(8, 16, dtype=jnp.int32),)),
    "own reduction": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b - b, (1,)), (array(8, 16),)),
    "approximate top k": (lambda x: lax.approx_max_k(x, 3), (array(8, 16),)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), (array(8, 16),)),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + 9 * jnp.eye(4)), (array(8, 4, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 4)], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPERATIONS)
def test_random_layouts_of_operations(name, seed, sizes):
    fn, avals = OPERATIONS[name]
    check(fn, avals, seed, sizes)


@pytest.mark.parametrize("seed", range(3))
def test_uneven_dimensions_are_padded_and_masked(seed):
    """A vocabulary of 50,257 is 2 parts of 25,129: cross entropy over it sums and takes maxima over its padding."""

    def loss(weights, x, labels):
        logits = x @ weights
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probabilities, labels[:, None] % 399, axis=1).mean()

    check(jax.value_and_grad(loss), (array(8, 399), array(16, 8), array(16, dtype=jnp.int32)), seed, (8,))
