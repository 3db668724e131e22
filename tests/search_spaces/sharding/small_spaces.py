"""Functions with every kind of program in them, as graphs and spaces on small meshes."""

import jax
import jax.numpy as jnp

from cost.base import Hardware, Link
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.tracing import build_graph, feedback_of


def array(*shape, dtype=jnp.float32):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(fn, *args):
    """The graph of a function traced for abstract arguments, which are called 0, 1, ... by flat position."""
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    return build_graph(jaxpr, feedback_of(out, args), [str(i) for i in range(len(jax.tree.leaves(args)))])


def hardware_of(names, *, latency_s=1e-6, flops_per_s=1e12, memory_bytes_per_s=1e12):
    """Hardware whose every axis has a link of its own, twice as fast as the one before."""
    links = {name: Link(latency_s, 1e-9 / 2**i) for i, name in enumerate(names)}
    return Hardware("small", flops_per_s, memory_bytes_per_s, float("inf"), links)


def space_of(fn, *args, sizes=(2, 2), given=None, donated=(), hardware=None, memory_limit_bytes=float("inf")):
    """The sharding space of a function on a mesh with axes x, y, z, w."""
    graph = graph_of(fn, *args)
    names = tuple("xyzw"[: len(sizes)])
    flags = tuple(i in donated for i in range(len(graph.inputs)))
    hardware = hardware_of(names) if hardware is None else hardware
    return ShardingSpace(graph, names, sizes, hardware, given or {}, flags, memory_limit_bytes)


def mlp_step(state, batch):
    """A training step of two dense layers by gradient descent with momentum."""
    x, y = batch

    def loss(params):
        return ((jax.nn.relu(x @ params[0]) @ params[1] - y) ** 2).mean()

    params, momentum = state
    gradients = jax.grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss(params)


def mlp_arguments(batch=8, width=4, hidden=16):
    """State and batch of `mlp_step`."""
    params = [array(width, hidden), array(hidden, width)]
    return (params, params), (array(batch, width), array(batch, width))


def scan_of_layers(weights, x):
    """A scan whose trips read a slice, carry an array, and leave a row."""

    def body(carry, w):
        carry = jnp.tanh(carry @ w)
        return carry, carry.sum(axis=0)

    return jax.lax.scan(body, x, weights)


def scan_backward(weights, x):
    """A scan and the scan of its backward pass."""
    return jax.grad(lambda w: (scan_of_layers(w, x)[0] ** 2).sum())(weights)


def loop_until(x, w):
    """A while loop of unknown length, with a captured array in its body."""
    return jax.lax.while_loop(lambda c: c.sum() < 100.0, lambda c: c @ w + 1.0, x)


def branches(flag, x, w):
    """Two branches that compute differently and leave the same shape."""
    return jax.lax.cond(flag, lambda v: v @ w, lambda v: v * 2.0, x).sum(axis=0)


def remat(x, w):
    """A layer whose activations are computed again."""
    layer = jax.checkpoint(lambda h: jax.nn.gelu(h @ w) @ w.T)
    return jax.grad(lambda h: (layer(layer(h)) ** 2).sum())(x)


EXAMPLES = {
    "mlp_step": (mlp_step, mlp_arguments()),
    "scan_of_layers": (scan_of_layers, (array(3, 8, 8), array(4, 8))),
    "scan_backward": (scan_backward, (array(3, 8, 8), array(4, 8))),
    "loop_until": (loop_until, (array(4, 8), array(8, 8))),
    "branches": (branches, (array(dtype=bool), array(4, 8), array(8, 8))),
    "remat": (remat, (array(4, 8), array(8, 8))),
}
