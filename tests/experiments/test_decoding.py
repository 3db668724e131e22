"""The decode step: it decodes, and what its small collectives take is predicted as they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decoding


def test_decoding_token_by_token_is_attention_over_all_of_them():
    shapes = decoding.arguments_of(2, 256, 3, 8)
    keys = iter(jax.random.split(jax.random.key(0), 20))
    params = jax.tree.map(lambda s: 0.05 * jax.random.normal(next(keys), s.shape), shapes[0])
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape), shapes[1])
    tokens = jax.random.randint(next(keys), (5, 3), 0, 32000)
    following = tokens[0]
    for position, token in enumerate(tokens):
        cache, following = jax.jit(decoding.decode)(params, cache, token, jnp.int32(position))

    x = params["embedding"][tokens]  # [L, B, M]
    for index in range(2):
        w = jax.tree.map(lambda array, index=index: array[index], params["layers"])
        query, key, value = (jnp.einsum("lbm,mhd->blhd", x, w[name]) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + jnp.einsum("blhd,hdm->lbm", mixed, w["out"])
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    np.testing.assert_array_equal(following, jnp.argmax(x[-1] @ params["embedding"].T, axis=-1))


def test_the_sum_and_the_timeline_agree(capsys):
    plan = decoding.main(["--no-compile", "--layers", "4"])
    assert "predicted timeline" in capsys.readouterr().out
    assert plan.timeline is not None
    assert any(c.count == 4 for c in plan.collectives)  # in every layer
    assert plan.step_s == pytest.approx(plan.timeline.seconds, rel=0.1)  # what is outside of the loop is shared
