"""What layers take at least, beside stages of them that are solved to the end."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost.base import Hardware, Link
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.layer_chain import layer_chain
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_search import search_stage
from diffshard.pipelines.step_search import LayerBounds
from search_spaces.pipelines.stage_programs import staged_step

M, LAYERS, WIDTH = 4, 4, 64


def train_step(weights, batch):
    """A step of gradient descent on scanned layers between an embedding and a head."""

    def layer(x, w):
        scaled = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["scale"]
        return x + jax.nn.gelu(scaled @ w["up"]) @ w["down"], None

    def loss_fn(weights):
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch[0] @ weights["embedding"], weights["layers"])
        return ((x @ weights["head"] - batch[1]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def chain():
    layers = {
        "up": array(LAYERS, WIDTH, 2 * WIDTH),
        "down": array(LAYERS, 2 * WIDTH, WIDTH),
        "scale": array(LAYERS, WIDTH),
    }
    weights = {"embedding": array(32, WIDTH), "layers": layers, "head": array(WIDTH, 32)}
    arguments = weights, (array(64, 32), array(64, 32))
    step = uncut_step(train_step, M, BatchArguments((1,), ()), arguments, {})
    return step, layer_chain(step, 16)


LINKS = {"x": Link(1e-7, 1e-10)}
HARDWARE = [
    Hardware("waits for all collectives", 1e12, 1e11, np.inf, LINKS),
    Hardware("hides collectives", 1e12, 1e11, np.inf, LINKS, exposed_share=0.2),
]


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_no_stage_is_faster_than_its_layers_together_and_the_bound_is_near(chain, hardware):
    """Also not a stage that begins with a layer in the middle, or one that keeps several micro-batches."""
    step, layers = chain
    mesh = AbstractMesh((4,), ("x",))
    each_s, end_s = LayerBounds(step, layers).seconds(mesh, hardware)
    ratios = []
    for start, end, in_flight in ((0, len(layers), 1), (1, 3, 3), (2, 3, 1), (3, len(layers), 2)):
        cut = cut_step(step, layers.cuts_before((start, end)))
        function = StageFunction(staged_step(cut.parts, cut.cuts), int(start > 0), in_flight)
        layout = search_stage(function, mesh, hardware, np.inf, is_donated=True, solver="gradient", time_limit_s=None)
        least_s = M * each_s[start:end].sum()
        assert least_s <= layout.seconds - layout.end_s
        assert least_s + end_s[start:end].sum() <= layout.seconds
        ratios.append(least_s / (layout.seconds - layout.end_s))
    # Between scanned layers collectives hold a stage of several, which the bound of one layer does not know.
    assert np.mean(ratios) > (0.75 if hardware.exposed_share == 1 else 0.65)


def no_solver(problem, *, time_limit_s, key):
    """Fails."""
    raise AssertionError("a stage was solved")
    yield


def test_an_equal_stage_takes_over_what_is_known_without_a_search(chain):
    """Also one that keeps another number of micro-batches; one with other layers is solved."""
    step, layers = chain
    without_latency = Hardware("without latency", 1e12, 1e11, np.inf, {"x": Link(0.0, 1e-10)})

    def found(start, end, in_flight, solver: Any = no_solver, known=None):
        cut = cut_step(step, layers.cuts_before((start, end)))
        function = StageFunction(staged_step(cut.parts, cut.cuts), 1, in_flight)
        mesh = AbstractMesh((4,), ("x",))
        options = {"is_donated": True, "solver": solver, "time_limit_s": None, "known": known}
        return search_stage(function, mesh, without_latency, np.inf, **options)

    trips = [layer for layer, cut in enumerate(layers.cuts, 1) if cut.trip]
    known = found(trips[0], trips[1], 3, "gradient")
    for in_flight in (2, 3, 4):
        other = found(trips[1], trips[2], in_flight, known=known)
        assert other.seconds == pytest.approx(known.seconds, rel=1e-4)
        assert set(other.specs.values()) == set(known.specs.values())
    with pytest.raises(AssertionError, match="a stage was solved"):
        found(trips[0], trips[2], 3, known=known)
