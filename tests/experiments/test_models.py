"""Example training steps: they trace to what they compute, and learn."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import diffshard
from experiments.equal_results import slow_arithmetic
from experiments.host_devices import host_mesh
from experiments.models import (
    contrastive,
    convnet,
    decoder,
    diffusion_transformer,
    dlrm,
    encoder_decoder,
    gpt,
    gpt_nnx,
    masked_encoder,
    mlp,
    moe,
    parallel_decoder,
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
    "diffusion-transformer": lambda: diffusion_transformer.make(batch=8),
    "contrastive": lambda: contrastive.make(batch=8),
    "tied-gpt": lambda: tied_gpt.make(batch=4, **{**SMALL, "key_value_heads": None}),
    "resnet": lambda: resnet.make(width=4, stages=2, image=8, batch=8),
    "masked-encoder": lambda: masked_encoder.make(batch=8),
    "parallel-decoder": lambda: parallel_decoder.make(batch=4, hidden=32, **SMALL),
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


@pytest.mark.parametrize("make", [diffusion_transformer.make, contrastive.make, masked_encoder.make])
def test_the_gradient_reaches_every_parameter(make: Any):
    model = make(batch=8)
    state, batch = arguments(model)
    step: Any = jax.jit(model.step)
    # The diffusion transformer starts with weights of zero, which let gradients through one after the other.
    for _ in range(3):
        state, _ = step(state, batch)
    state, loss = step(state, batch)
    assert np.isfinite(loss)
    for path, moment in jax.tree.leaves_with_path(state.opt_state[0].mu):
        assert np.isfinite(moment).all(), jax.tree_util.keystr(path)
        assert np.any(moment), jax.tree_util.keystr(path)


@pytest.mark.parametrize("make", [diffusion_transformer.make, contrastive.make, masked_encoder.make])
def test_a_plan_computes_what_one_device_does(make: Any, monkeypatch: pytest.MonkeyPatch):
    # In bfloat16 an error could not be told from rounding.
    monkeypatch.setattr(jnp, "bfloat16", jnp.float32)
    model, mesh = make(), host_mesh((2, 4))
    state, batch = arguments(model)
    step: Any = jax.jit(model.step)
    for _ in range(4):  # until all gradients are other than zero
        state, _ = step(state, batch)
    expected, expected_loss = step(state, batch)

    search = diffshard.search(model.step, mesh, hardware=slow_arithmetic(mesh), time_limit_s=1, executor="program")
    plan = search.plan(*abstract_arguments(model))
    assert any(any(tensor.spec) for tensor in plan.arguments)
    found, loss = search(*plan.shard(state, batch))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    moments = [jax.tree.leaves(jax.device_get(state.opt_state[0].mu)) for state in (expected, found)]
    for one, planned in zip(*moments, strict=True):
        assert np.linalg.norm(planned - one) <= 1e-4 * np.linalg.norm(one)


def test_noise_is_predicted_in_the_place_of_its_patch():
    network: Any = diffusion_transformer.DiffusionTransformer(0, 8, 2, 8, 2, 3)
    latent, others = jnp.zeros((1, 6, 8, 4)), (jnp.full(1, 0.5), jnp.ones(1, jnp.int32))
    params, noise = jax.jit(network.init)(jax.random.key(0), latent, *others), jax.jit(network.apply)
    # The last layer starts at zero.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    changed = noise(params, latent.at[0, 2, 5, 1].set(3.0), *others) - noise(params, latent, *others)
    expected = np.zeros((6, 8), bool)
    expected[2:4, 4:6] = True
    np.testing.assert_array_equal(np.abs(np.asarray(changed[0])).max(axis=-1) > 0, expected)


def test_the_contrastive_loss_is_that_of_rows_and_of_columns():
    similarities = jnp.array([[2.0, 0.0], [1.0, 0.0]])
    rows = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    columns = (math.log(1 + math.exp(-1)) + math.log(2)) / 2
    assert float(contrastive.symmetric_loss(similarities)) == pytest.approx((rows + columns) / 2, rel=1e-6)


def test_patches_that_do_not_cut_an_image_evenly_are_refused():
    with pytest.raises(ValueError, match=r"`patch` must divide height and width, \(16, 16\); got 5."):
        abstract_arguments(contrastive.make(image=16, patch=5))


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
