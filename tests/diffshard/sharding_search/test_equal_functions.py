"""Every kind of program that a training step is made of runs under its plan as it runs on one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, assert_equal, mesh_2x2, weights


def scanned(w, x):
    def body(c, wi):
        c = jnp.tanh(c @ wi)
        return c, c.sum(axis=0)

    return jax.lax.scan(body, x, w)


def scanned_backward(w, x):
    return jax.value_and_grad(lambda w: (scanned(w, x)[0] ** 2).mean())(w)


def nested_scan(w, x):
    def outer(c, wi):
        return jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ wi), c), None

    return jax.lax.scan(outer, x, w, reverse=True)[0]


def remat(w, x):
    layer = jax.checkpoint(lambda h, wi: jax.nn.gelu(h @ wi) @ wi.T)
    return jax.grad(lambda w: (layer(layer(x, w[0]), w[1]) ** 2).mean())(w)


def remat_in_scan(w, x):
    @jax.checkpoint
    def body(c, wi):
        return jnp.sin(c @ wi), None

    return jax.value_and_grad(lambda w: jax.lax.scan(body, x, w)[0].var())(w)


def while_loop(w, x):
    def proceed(c):
        return jnp.logical_and(c[0] < 5, jnp.abs(c[1]).max() > 0.1)

    return jax.lax.while_loop(proceed, lambda c: (c[0] + 1, 0.5 * c[1] @ w[0]), (0, x))


def branches(w, x):
    y = jax.lax.cond(x.sum() > 0, lambda a: a @ w[0], lambda a: a * 2.0, x)
    return jax.lax.switch(jnp.int32(2), [lambda a: a, lambda a: a @ w[1], lambda a: (a.T @ a).sum() + a], y)


def custom_derivative(w, x):
    @jax.custom_vjp
    def f(a):
        return jnp.exp(a)

    f.defvjp(lambda a: (jnp.exp(a), a), lambda a, g: (g * 0.5 * jnp.exp(a),))
    return jax.grad(lambda w: jax.nn.relu(f(x @ w[0]) - 1.0).sum())(w), f(x)


def indexing(w, x):
    table = w.reshape(-1, w.shape[-1])
    ids = (jnp.abs(x[:, 0]) * 10).astype(jnp.int32) % table.shape[0]
    return jax.value_and_grad(lambda t: (t[ids] * x).sum())(table), jnp.sort(x, axis=0), jax.lax.top_k(x, 3)


def randomness(w, x):
    key = jax.random.key(3)
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(mask, x, 0) @ w[0] + jax.random.normal(jax.random.split(key)[1], x.shape)


def decompositions(w, x):
    a = x.T @ x + jnp.eye(x.shape[1])
    return jnp.linalg.cholesky(a), jnp.linalg.eigvalsh(a), jnp.fft.rfft(x), jnp.cumsum(x, axis=0)


def reshapes(w, x):
    y = x.reshape(4, 4, 4, 2).transpose(2, 0, 3, 1)[:, ::2].reshape(8, -1)
    return jnp.concatenate([y, y[:, ::-1]], axis=1), jnp.pad(x, ((1, 2), (0, 0))), jnp.split(x, 2, axis=1)


def already_result(w, x):
    return w, x, 3.0, x.sum(), x


FUNCTIONS = [
    scanned, scanned_backward, nested_scan, remat, remat_in_scan, while_loop, branches, custom_derivative, indexing,
    randomness, decompositions, reshapes, already_result,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore::diffshard.plans.WholeWorkWarning")  # matrices are decomposed whole
def test_runs_as_on_one_device(fn):
    w, x = weights(3, 8, 8), weights(16, 8)
    step = diffshard.search(fn, mesh_2x2(), hardware=SLOW)
    assert_equal(step(w, x), jax.jit(fn)(w, x))


def test_shard_map_is_left_as_it_is():
    mesh = mesh_2x2()

    def fn(x):
        local = jax.shard_map(
            lambda a: jax.lax.psum(a * a, "x"), mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
        )
        return local(x) @ jnp.ones((8, 4))

    x = weights(16, 8)
    assert_equal(diffshard.search(fn, mesh, hardware=SLOW)(x), jax.jit(fn)(x))
