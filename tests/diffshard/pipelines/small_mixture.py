"""A small training step with mixtures of experts: two experts for each token, a capacity, a loss that balances them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, WORDS, EXPERTS, CAPACITY = 2, 8, 12, 4, 4


def experts_of_tokens(scores):
    """Returns how experts weigh tokens in their places, `[B, T, E, C]`, and the loss that balances the experts."""
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores), 2)
    is_chosen = jax.nn.one_hot(chosen, EXPERTS)
    by_expert = is_chosen.sum(-2)
    place = jnp.cumsum(by_expert, 1) - by_expert  # of an example's tokens, in order; those beyond the capacity are lost
    slots = jax.nn.one_hot(place.astype(jnp.int32), CAPACITY) * by_expert[..., None]
    gates = (is_chosen * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
    balance = (by_expert.mean(1) * jax.nn.softmax(scores).mean(1)).sum(-1).mean() * EXPERTS
    return gates[..., None] * slots, balance


def train_step(params, batch):
    tokens, labels = batch

    def loss_fn(params):
        h, balance = params["embedding"][tokens], 0.0
        for layer in params["layers"]:
            weights, of_layer = experts_of_tokens(h @ layer["gate"])
            inside = jax.nn.gelu(jnp.einsum("btec,btm,emh->bech", (weights > 0).astype(h.dtype), h, layer["up"]))
            h = h + jnp.einsum("btec,bech,ehm->btm", weights, inside, layer["down"])
            balance += of_layer
        loss = optax.softmax_cross_entropy_with_integer_labels(h @ params["output"], labels).mean()
        return loss + 0.01 * balance, balance

    (loss, balance), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), (loss, balance)


def arguments():
    values = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(values.normal(size=shape, scale=0.5), jnp.float32)

    layers = [
        {
            "gate": normal(WIDTH, EXPERTS),
            "up": normal(EXPERTS, WIDTH, 2 * WIDTH),
            "down": normal(EXPERTS, 2 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    params = {"embedding": normal(WORDS, WIDTH), "layers": layers, "output": normal(WIDTH, WORDS)}
    tokens = jnp.asarray(values.integers(0, WORDS, (8, 6)))
    return params, (tokens, (tokens + 1) % WORDS)
