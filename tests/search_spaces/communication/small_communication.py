"""A small network written as every device computes it, beside the same on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cost.base import Hardware, Link
from search_spaces.communication.base import INT8
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact

MESH = {"data": 2, "model": 4}
HARDWARE = Hardware("small", 1e12, 1e11, 1e10, {"data": Link(1e-5, 1e-9), "model": Link(1e-6, 1e-10)})
STRATEGIES = {
    "forward": (Exact(), Encode(INT8)),
    "backward": (Exact(), Encode(INT8)),
    "gradient": (Exact(), Encode(INT8), ErrorFeedback(INT8), EveryK(2)),
}
ROWS_SPLIT = P("data")
SPECS = {"layers": {"up": P(None, None, "model"), "down": P(None, "model")}, "head": P()}
WIDTH, HIDDEN, ROWS = 16, 64, 16


def loss_fn(params, batch):
    """The loss of a device that has a part of the hidden units and of the rows."""
    x, target = batch

    def layer(x, w):
        with jax.named_scope("mlp"):
            return x + lax.psum(jax.nn.gelu(x @ w["up"]) @ w["down"], "model"), None

    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.square(x @ params["head"] - target).mean()


def plain_loss(params, batch):
    """The same on one device."""
    x, target = batch
    for up, down in zip(params["layers"]["up"], params["layers"]["down"], strict=True):
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.square(x @ params["head"] - target).mean()


def arguments():
    """Parameters and a batch."""
    keys = jax.random.split(jax.random.key(0), 5)
    layers = {
        "up": 0.3 * jax.random.normal(keys[0], (2, WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(keys[1], (2, HIDDEN, WIDTH)),
    }
    params = {"layers": layers, "head": 0.3 * jax.random.normal(keys[2], (WIDTH, WIDTH))}
    return params, (jax.random.normal(keys[3], (ROWS, WIDTH)), jax.random.normal(keys[4], (ROWS, WIDTH)))


def small_space(fn=loss_fn, params=None, batch=None, specs=SPECS, batch_specs: Any = ROWS_SPLIT, **options):
    """The space of a loss on the small mesh."""
    options = {"strategies": STRATEGIES, "hardware": HARDWARE, **options}
    params, batch = PARAMS if params is None else params, BATCH if batch is None else batch
    return CommunicationSpace(fn, MESH, params, batch, specs, batch_specs, **options)


def _one_site(params, batch):
    h, target = batch
    return jnp.square(jnp.tanh(lax.psum(h @ params["w"], "model")) - target).mean()


def one_site_space(rows):
    """A space with one sum over hidden units, of a number of tokens, the same for both parts of the data axis."""
    params = {"w": arguments()[0]["layers"]["down"][0]}
    batch = (jax.random.normal(jax.random.key(7), (rows, 64)), arguments()[1][1][:rows])
    return small_space(_one_site, params, batch, {"w": P("model")}, (P(None, "model"), P())), params, batch


def sent_bytes(space, choice):
    """The bytes that each device sends in one step."""
    return sum(part.traffic.sent_bytes for part in space.explain(choice))


def seconds(space, choice):
    """The seconds of all parts of a choice."""
    return sum(part.seconds for part in space.explain(choice))


def mesh():
    """Eight host devices."""
    return jax.make_mesh((2, 4), tuple(MESH), axis_types=(AxisType.Auto,) * 2)


KEY = jax.random.key(7)
PARAMS, BATCH = arguments()
SPACE = small_space()


def run_step(space, choice, state=None, step=0):
    """Loss, gradients and residuals of a step of the small network."""
    run = jax.jit(lambda p, b, s, k, t: space.loss_and_gradients(p, b, choice, s, k, t))
    return run(PARAMS, BATCH, space.init_residuals(PARAMS) if state is None else state, KEY, step)


def assert_close(a, b, atol):
    """Compares two pytrees array by array."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)
