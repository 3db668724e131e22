"""Small training steps, differentiated by `jax.grad`, with forward and backward passes of every form."""

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.sharding.graph import Graph
from search_spaces.sharding.tracing import build_graph

LAYERS, ROWS, WIDTH, HIDDEN = 3, 16, 8, 32


def layer(x, weights):
    hidden = jax.nn.gelu(x @ weights["up"])
    return x + jax.nn.softmax(hidden) @ weights["down"]


def loss_of_layers(params, x):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], params))
    return jnp.mean(x**2)


def loss_of_scan(params, x):
    x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, params)
    return jnp.mean(x**2)


def loss_with_mask_and_checkpoint(params, x):
    """Layers share a mask that is no parameter, and use random bits; the second one is in a user's `jax.checkpoint`."""
    mask = jnp.tril(jnp.ones((ROWS, ROWS)))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    for i in range(LAYERS):
        weights = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        kept = jax.random.bernoulli(keys[i], 0.8, x.shape)
        x = (jax.checkpoint(layer) if i == 1 else layer)(jnp.where(kept, jnp.tanh(mask @ x), 0.0), weights)
    return jnp.mean(x**2)


def loss_of_nested_scans(params, x):
    """Each layer is a scan over parts of its rows."""

    def parts(x, weights):
        _, y = lax.scan(lambda c, part: (c, layer(part, weights)), 0.0, x.reshape(4, -1, WIDTH))
        return y.reshape(x.shape), x.sum()

    x, sums = lax.scan(parts, x, params)
    return jnp.mean(x**2) + jnp.sum(sums**2)


def step(loss):
    def of_loss(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return of_loss


def step_in_microbatches(loss):
    def of_loss(params, x):
        def trip(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        return lax.scan(trip, jax.tree.map(jnp.zeros_like, params), x.reshape(2, -1, WIDTH))[0]

    return of_loss


STEPS = {
    "layers": step(loss_of_layers),
    "scan": step(loss_of_scan),
    "mask and checkpoint": step(loss_with_mask_and_checkpoint),
    "nested scans": step(loss_of_nested_scans),
    "layers in microbatches": step_in_microbatches(loss_of_layers),
    "scan in microbatches": step_in_microbatches(loss_of_scan),
}


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 3,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 5,
    }
    return params, jax.random.normal(keys[2], (ROWS, WIDTH))


def graph_of(fn, args) -> Graph:
    """Returns the graph of a function of pytrees, as one of flat arrays."""
    leaves, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.tree.leaves(fn(*jax.tree.unflatten(tree, arrays))))(*leaves)
    return build_graph(jaxpr, [None] * len(jaxpr.out_avals), [f"argument {i}" for i in range(len(leaves))])
