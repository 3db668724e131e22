"""Attention over a split sequence: as unsplit attention with a mask, on a mesh as simulated, priced by its window."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cost.evaluation import evaluate
from cost.validation import validate
from search_spaces.communication.two_layers import windowed_attention
from tests.search_spaces.communication.small_communication import MESH, mesh, seconds, sent_bytes, small_space

KEY = jax.random.key(0)
ROWS, LENGTH, WIDTH, HEADS = 4, 12, 8, 2
BLOCK = LENGTH // MESH["model"]
WINDOWS = (3, 2, 1, 7)  # the last one is more than there are blocks
LABELS = ("whole", "3 blocks", "2 blocks", "1 block", "7 blocks")
NUM_VISIBLE = (4, 3, 2, 1, 4)
SPLIT = P("data", "model")


def _attended(params, x):
    query, key, value = jnp.einsum("blm,cmhd->cblhd", x, params["qkv"])
    return windowed_attention("attention", query, key, value, "model", windows=WINDOWS)


def _loss(params, batch):
    return jnp.square(_attended(params, batch[0]) - batch[1]).mean()


def _plain(params, x, num_blocks):
    """Unsplit attention, each token to its own block and those before it."""
    query, key, value = jnp.einsum("blm,cmhd->cblhd", x, params["qkv"])
    block = np.arange(LENGTH) // BLOCK
    visible = np.tril(np.ones((LENGTH, LENGTH), bool)) & (block[:, None] - block < num_blocks)
    scores = jnp.einsum("blhd,bshd->bhls", query, key) / np.sqrt(WIDTH // HEADS)
    return jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), value)


def _arguments():
    keys = jax.random.split(KEY, 3)
    params = {"qkv": jax.random.normal(keys[0], (3, WIDTH, HEADS, WIDTH // HEADS)) * WIDTH**-0.5}
    target = jax.random.normal(keys[2], (ROWS, LENGTH, HEADS, WIDTH // HEADS))
    return params, (jax.random.normal(keys[1], (ROWS, LENGTH, WIDTH)), target)


PARAMS, BATCH = _arguments()
SPACE = small_space(_loss, PARAMS, BATCH, {"qkv": P()}, SPLIT)
WINDOW = next(g for g, group in enumerate(SPACE.groups) if not group.strategies)


def _choice(window, lossy=0):
    return [window if g == WINDOW else lossy for g in range(len(SPACE.groups))]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_each_window_has_the_gradients_of_unsplit_attention(on_mesh):
    space = SPACE.on_mesh(mesh()) if on_mesh else SPACE
    run = jax.jit(lambda c, p: space.loss_and_gradients(p, BATCH, _choice(c), space.init_residuals(p), KEY)[:2])
    expected = jax.jit(jax.value_and_grad(lambda p, n: jnp.square(_plain(p, BATCH[0], n) - BATCH[1]).mean()))
    losses = []
    for number, num_visible in enumerate(NUM_VISIBLE):
        results = run(jnp.int32(number), PARAMS)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results, expected(PARAMS, num_visible)
        )
        losses.append(float(results[0]))
    assert np.abs(np.diff(losses)).min() > 1e-4
    assert losses[0] == pytest.approx(losses[-1], rel=1e-6)


def test_without_windows_the_whole_is_no_choice():
    query, key, value = jnp.einsum("blm,cmhd->cblhd", BATCH[0], PARAMS["qkv"])
    run = jax.shard_map(
        lambda query, key, value: windowed_attention("attention", query, key, value, "model", windows=()),
        mesh=mesh(),
        in_specs=(SPLIT,) * 3,
        out_specs=SPLIT,
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(run)(query, key, value), _plain(PARAMS, BATCH[0], 4), atol=1e-6)


def test_a_mixture_of_windows_with_lossy_sites_on_a_mesh():
    weights = [jnp.array([0.3, 0.3, 0.2, 0.1, 0.1]) if g == WINDOW else jnp.eye(len(group.names))[1]
               for g, group in enumerate(SPACE.groups)]  # fmt: skip
    simulated, real = (
        jax.jit(jax.value_and_grad(lambda w, space=space: space.loss(PARAMS, BATCH, w, KEY)))(weights)
        for space in (SPACE, SPACE.on_mesh(mesh()))
    )
    assert float(simulated[0]) == pytest.approx(float(real[0]), rel=1e-5)
    np.testing.assert_allclose(simulated[1][WINDOW], real[1][WINDOW], rtol=1e-3)
    assert len(set(np.asarray(simulated[1][WINDOW]).round(6).tolist())) >= 4


def test_each_window_sends_its_own_blocks():
    assert SPACE.strategy_names(WINDOW) == LABELS
    problem = SPACE.problem
    validate(problem)
    for choice in itertools.product(range(len(NUM_VISIBLE)), (0, 1)):
        assert seconds(SPACE, _choice(*choice)) == pytest.approx(evaluate(problem, _choice(*choice)).cost)
    sent = np.array([sent_bytes(SPACE, _choice(number)) for number in range(len(NUM_VISIBLE))])
    block = 4 * 2 * (ROWS // 2) * BLOCK * WIDTH  # float32 keys and values of one device, there and back
    assert sent - sent[3] == pytest.approx(2 * block * (np.array(NUM_VISIBLE) - 1))
    assert sent_bytes(SPACE, _choice(0, 1)) < 0.5 * sent[0]


def test_narrower_windows_raise_the_loss():
    results = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    loss_increases = np.asarray(results[WINDOW])
    assert loss_increases[0] == 0
    assert 0 < loss_increases[1] < loss_increases[3]
    assert loss_increases[4] < 1e-9
    assert all(np.asarray(row).any() for row in results)  # permutes are measured where they run


@pytest.mark.parametrize(
    ("shape", "windows", "message"),
    [
        ((2, 4, 3), (1,), r"must have one shape \[B, L, H, D\], got \(2, 4, 3\)"),
        ((2, 4, 2, 3), (2, 0), r"`windows` must be positive and distinct whole numbers of blocks, as .*; got \(2, 0\)"),
        ((2, 4, 2, 3), (1.5,), "`windows` must be positive and distinct whole numbers"),
        ((2, 4, 2, 3), (2, 2), "`windows` must be positive and distinct"),
    ],
)
def test_attention_that_makes_no_sense_is_refused(shape, windows, message):
    x = jnp.ones(shape)
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(
            lambda x: windowed_attention("attention", x, x, x, "model", windows=windows), axis_env=list(MESH.items())
        )(x)
