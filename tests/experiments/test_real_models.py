"""Whole real models: their sizes and arithmetic, experts against a loop over tokens, and the table on tiny ones."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import real_models
from experiments.models import expert_decoder
from experiments.models.expert_decoder import ExpertSizes, LatentAttention, places
from experiments.published.decoder import Sizes
from experiments.real_models import MODELS, RealModel, flops_per_token, num_params

DENSE = Sizes(2, 64, 4, 2, 128, 256, 32, gated=True)
LATENT = ExpertSizes(
    3, 64, 4, 4, 96, 256, 32, gated=True, experts=8, chosen=2, expert_hidden=32, shared=True, dense_layers=1,
    latent=LatentAttention(48, 32, 8, 16),
)  # fmt: skip
GROUPED = ExpertSizes(2, 64, 4, 2, 0, 256, 32, gated=True, experts=4, chosen=2, expert_hidden=32)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama 3 8B", 8.03, None), ("Llama 3 70B", 70.6, None), ("Llama 3 405B", 405.9, None),
        ("GPT-3 175B", 174.6, None), ("Mixtral 8x7B", 46.7, 12.9), ("DeepSeek-V3", 671.0, 37.0),
    ],
)  # fmt: skip
def test_models_have_as_many_parameters_as_published(name, billions, active):
    total, used = num_params(MODELS[name].sizes)
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    if active is not None:  # published with the embedding, which takes no product
        assert used / 1e9 == pytest.approx(active, rel=0.03)


def test_arithmetic_of_a_token_by_hand():
    # A layer: queries and outputs 64 x 64, keys and values 64 x 32 each, three matrices 64 x 128; the head 64 x 256.
    products = 2 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 256)
    attention = 2 * (32 / 2) * 4 * 2 * (16 + 16)  # layers, mean keys, heads, two products of 16 features
    assert flops_per_token(DENSE) == 3 * (products + attention)


def test_tokens_have_places_by_the_order_in_which_they_come():
    chosen = jnp.array([[0, 2], [0, 1], [0, 2], [2, 1]])
    tokens, slots = places(chosen, 4, 2)
    # The third token finds no room at expert 0, and the fourth none at expert 2; nobody chose expert 3.
    assert tokens.tolist() == [[0, 1], [1, 3], [0, 2], [4, 4]]
    assert slots.tolist() == [[0, 4], [1, 2], [8, 5], [8, 3]]


@pytest.mark.parametrize("sizes", [GROUPED, LATENT])
def test_experts_are_those_of_a_loop_over_tokens(sizes):
    keys = iter(jax.random.split(jax.random.key(0), 10))
    params = jax.tree.map(
        lambda s: 0.3 * jax.random.normal(jax.random.key(1), s.shape[1:]),
        expert_decoder.abstract_params(sizes)["layers"],
    )
    x = jax.random.normal(next(keys), (2, sizes.sequence, sizes.width))
    mixed = expert_decoder._mixture(x, params, sizes)
    scores = np.asarray(jax.nn.sigmoid(x @ params["router"]))
    for row in range(2):
        room = [sizes.capacity] * sizes.experts
        for token in range(sizes.sequence):
            best = np.argsort(-scores[row, token])[: sizes.chosen]
            expected = 0.0
            for expert in best:
                room[expert] -= 1
                if room[expert] >= 0:
                    gate, up = jnp.moveaxis(jnp.einsum("m,mgf->gf", x[row, token], params["expert_up"][expert]), 0, 0)
                    made = (jax.nn.silu(gate) * up) @ params["expert_down"][expert]
                    expected = expected + scores[row, token, expert] / scores[row, token, best].sum() * made
            np.testing.assert_allclose(mixed[row, token], expected, atol=1e-3 * float(jnp.abs(mixed).max()))


def test_all_weights_are_used():
    sizes = dataclasses.replace(LATENT, layers=2, sequence=16)
    shapes = expert_decoder.abstract_params(sizes)
    params = jax.tree.map(lambda s: 0.1 * jax.random.normal(jax.random.key(0), s.shape), shapes)
    tokens = jnp.zeros((2, sizes.sequence + 1), jnp.int32)
    loss = expert_decoder.loss_function(sizes, "full", "xla")
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, tokens)
    assert float(value) > 0
    used = {
        path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(gradients) if float(jnp.abs(leaf).max()) > 0
    }
    assert used == {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes)}


def test_the_table_on_tiny_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real_models, "REMATS", ("full",))
    models = {
        "dense": RealModel(DENSE, 2, (8,), {8: 10.0}, "another framework"),
        "experts": RealModel(GROUPED, 2, (16,), {}),
        "too large": RealModel(dataclasses.replace(DENSE, hidden=2**26, layers=8), 1, (8,), {}),
    }
    records = tmp_path / "rows.jsonl"
    real_models.main(["--no-compile", "--records", str(records)], models)
    said = capsys.readouterr().out
    assert "another framework" in said
    assert "none fits" in said
    assert "too large | 8 |" in said
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["dense", "experts", "too large"]
    for row, model in zip(rows[:2], models.values(), strict=False):
        sequences = row["batch"]
        assert sequences == model.sequences_per_device * row["devices"]
        assert row["tokens_per_s"] == pytest.approx(sequences * 32 / row["step_s"] / row["devices"])
        assert row["model_share"] == pytest.approx(row["tokens_per_s"] * flops_per_token(model.sizes) / 989e12)
        assert math.isnan(row["compile_s"])
    assert "needs at least" in rows[2]["note"]
    real_models.main(["--no-compile", "--records", str(records)], models)
    assert len(records.read_text().splitlines()) == 3  # taken up, not made again
