"""Example training steps: they trace to what they compute, and learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments.models import (
    convnet,
    decoder,
    dlrm,
    encoder_decoder,
    gpt,
    gpt_nnx,
    mlp,
    moe,
    resnet,
    text,
    tied_gpt,
    unet,
    vision_transformer,
)
from experiments.models.model import abstract_arguments, arguments

SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "key_value_heads": 1, "sequence": 16, "vocabulary": 31}
MODELS = {
    "mlp": lambda: mlp.make(layers=2, width=8, batch=8),
    "convnet": lambda: convnet.make(layers=1, image=8, batch=4),
    "gpt": lambda: gpt.make(batch=4, **SMALL),
    "gpt-scanned": lambda: gpt.make(batch=4, stack=gpt.scanned, **SMALL),
    "gpt-remat": lambda: gpt.make(batch=4, block=nn.remat(gpt.Block), **SMALL),
    "gpt-nnx": lambda: gpt_nnx.make(batch=4, layers=1, width=16, heads=2, sequence=16, vocabulary=31),
    "decoder": lambda: decoder.make(batch=4, hidden=32, **SMALL),
    "moe": lambda: moe.make(batch=4, stack=gpt.scanned, **SMALL),
    "moe-decoder": lambda: moe.make_decoder(batch=4, **SMALL),
    "encoder-decoder": lambda: encoder_decoder.make(batch=4),
    "unet": lambda: unet.make(batch=4),
    "vision-transformer": lambda: vision_transformer.make(batch=4),
    "tied-gpt": lambda: tied_gpt.make(batch=4, **{**SMALL, "key_value_heads": None}),
    "resnet": lambda: resnet.make(width=4, stages=2, image=8, batch=8),
    "dlrm": lambda: dlrm.make(rows=(32, 7), width=4, batch=8),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_keeps_the_states_types_and_lowers_the_loss(name: str):
    model = MODELS[name]()
    abstract = abstract_arguments(model)
    state, batch = arguments(model)
    typed = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, batch))
    assert typed == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)

    step: Any = jax.jit(model.step)
    losses = []
    for _ in range(8):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == typed[0]
    assert losses[-1] < losses[0]
    assert step._cache_size() == 1


def test_layers_unrolled_and_scanned_are_one_network():
    unrolled: Any
    scanned: Any
    sizes = gpt.Sizes(**SMALL | {"layers": 2})
    unrolled, scanned = gpt.GPT(sizes), gpt.GPT(sizes, stack=gpt.scanned)
    tokens = jnp.arange(32).reshape(2, 16) % 31
    stacked = jax.jit(scanned.init)(jax.random.key(0), tokens)["params"]
    layers = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked["layers"]) for i in range(2)}
    apart = {name: leaf for name, leaf in stacked.items() if name != "layers"} | layers
    logits = [jax.jit(n.apply)({"params": params}, tokens) for n, params in ((unrolled, apart), (scanned, stacked))]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", [gpt.GPT(gpt.Sizes(**SMALL)), decoder.Decoder(decoder.Sizes(**SMALL))])
def test_a_token_sees_only_what_came_before(network: Any):
    tokens = jnp.zeros((1, 16), jnp.int32)
    variables, logits = jax.jit(network.init)(jax.random.key(0), tokens), jax.jit(network.apply)
    changed = logits(variables, tokens.at[0, 9].set(5)) - logits(variables, tokens)
    moved = np.abs(np.asarray(changed)).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(moved, np.arange(16) >= 9)


def test_rotary_embedding_keeps_lengths_and_tells_distances_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 16, 1, 8))
    # The same vector at each position: products depend on how far apart the positions are.
    query, key = (jnp.broadcast_to(x[:, :1], x.shape) for x in (query, key))
    turned = decoder.rotary(query)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(query, axis=-1), rtol=1e-5)
    products = jnp.einsum("blhd,bshd->ls", turned, decoder.rotary(key))
    for distance in range(16):
        np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-4)
    assert float(jnp.ptp(products)) > 0.1


def test_top2_gating_fills_experts_in_order_and_drops_what_finds_no_room():
    # Three tokens of one group, all of which prefer expert 0, then 1; each expert takes two tokens of a group.
    probabilities = jnp.array([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]])
    combine, balance = moe.top2_gating(probabilities, capacity=2)
    expected = np.zeros((1, 3, 3, 2))
    expected[0, 0, 0, 0], expected[0, 0, 1, 0] = 2 / 3, 1 / 3
    expected[0, 1, 0, 1], expected[0, 1, 1, 1] = 2 / 3, 1 / 3
    np.testing.assert_allclose(combine, expected, atol=1e-6)
    # experts² times the mean over experts of (share of first choices) x (mean probability) = 9 * 0.6 / 3
    assert float(balance) == pytest.approx(1.8, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 30, "heads": 4, "key_value_heads": 4}, "`heads` must divide `width`"),
        ({"heads": 4, "key_value_heads": 3}, "`key_value_heads` must divide `heads`"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        gpt.Sizes(**sizes)


def test_windows_of_the_text_are_consecutive_bytes_of_it():
    tokens = text.load()
    assert text.decode(tokens).startswith("CHAPTER I. Down the Rabbit-Hole")
    assert text.decode(text.encode("Käse")) == "Käse"
    windows = np.asarray(text.sample(tokens, jax.random.key(0), 3, 20))
    assert windows.shape == (3, 21)
    whole = text.decode(tokens)
    assert all(text.decode(window) in whole for window in windows)
