"""Training steps whose layers are scanned: a small decoder with stacked weights."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

KEY = jax.random.key(0)
LAYERS, WIDTH, WORDS = 5, 16, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


def weights(dtype=jnp.float32):
    keys = jax.random.split(KEY, 4)
    layers = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / 6,
        "scale": jnp.ones((LAYERS, WIDTH)),
    }
    tree = {"embedding": jax.random.normal(keys[2], (WORDS, WIDTH)), "layers": layers}
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def layer(h, xs, dtype):
    w, key = xs
    h = h.astype(dtype)
    normed = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * w["scale"]
    out = jax.nn.gelu(normed @ w["up"]) @ w["down"]
    out = jnp.where(jax.random.bernoulli(key, 0.8, out.shape), out, 0.0)
    return (h + out).astype(dtype), None


def train_step(state, batch, *, remat=False, dtype=jnp.float32):
    params, opt_state, key = state
    tokens, labels = batch

    def loss_fn(params):
        layers = jax.tree.map(lambda w: w.astype(dtype), params["layers"])
        h = params["embedding"][tokens]
        body = partial(layer, dtype=dtype)
        keys = jax.random.split(key, LAYERS)
        h, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, h.astype(dtype), (layers, keys))
        logits = h.astype(jnp.float32) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, jax.random.fold_in(key, 7)), loss


def arguments():
    params = weights()
    tokens = jax.random.randint(KEY, (16, 6), 0, WORDS)
    return (params, OPTIMIZER.init(params), KEY), (tokens, (tokens + 1) % WORDS)
