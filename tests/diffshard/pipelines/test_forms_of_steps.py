"""Steps of many forms in two stages give the results of one device, also a second time on the first results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cost.pipeline_schedules import graph_of
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.staged_array import StagedArray
from search_spaces.pipelines.stage_programs import staged_step
from tests.diffshard.pipelines.small_pipeline import meshes

KEY = jax.random.key(0)
LAYERS, WIDTH = 2, 8
WEIGHTS = jax.random.normal(KEY, (LAYERS, WIDTH, WIDTH)) / 3
BATCH = jax.random.normal(jax.random.key(1), (8, WIDTH))
TABLE = np.arange(4)


def layer(h, w):
    return h + jnp.tanh(h @ w)


def scan_in_a_scan(h, w):
    return lax.scan(lambda h, scale: (layer(h * scale, w), None), h, jnp.array([1.0, 0.5]))[0]


def checkpoint_of_a_scan(h, w):
    return jax.checkpoint(scan_in_a_scan)(h, w)


@jax.checkpoint
def checkpoint_of_a_cond(h, w):
    return lax.cond(w.sum() > 0, lambda: layer(h, w), lambda: h * 0.5 + h @ w)


def loss_of(block, weights, batch):
    h, _ = lax.scan(lambda h, w: (block(h, w), None), batch, weights)
    return (h**2).mean()


def check_two_stages(step, args):
    """Compares two steps in two stages, the second on the state of the first, with those of one device."""
    whole = uncut_step(step, 2, BatchArguments((1,), ()), args, {})
    candidates = whole.candidates()
    cut = cut_step(whole, [candidates[len(candidates) // 2].cut])
    staged = staged_step(cut.parts, cut.cuts)
    execution = StagedExecution(staged, meshes((1, 1)), graph_of("1f1b", 2, 2), lambda stage, key: None)
    expected = found = args
    for _ in range(2):
        expected = jax.jit(step)(expected[0], args[1])
        found = cut.result(execution(cut.flat_arguments(jax.tree.leaves((found[0], args[1])))))
        execution.wait()
        told = jax.tree.map(np.asarray, found, is_leaf=lambda leaf: isinstance(leaf, StagedArray))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), told, expected)
    return execution


@pytest.mark.parametrize("block", [scan_in_a_scan, checkpoint_of_a_scan, checkpoint_of_a_cond])
def test_loops_and_branches_may_be_inside_of_others(block):
    def step(weights, batch):
        loss, gradient = jax.value_and_grad(lambda weights: loss_of(block, weights, batch))(weights)
        return weights - 0.1 * gradient, loss

    check_two_stages(step, (WEIGHTS, BATCH))


def by_equations(weights, batch):
    h = batch
    for w in weights:
        h = layer(h, w)
    return (h**2).mean(), h


def updated(weights, gradients):
    return [w - 0.1 * gradient for w, gradient in zip(weights, gradients, strict=True)]


@pytest.mark.parametrize("name", ["loss", "gradient", "constant"])
def test_state_may_be_written_and_never_read(name):
    def step(state, batch):
        weights, _ = state
        (loss, _), gradients = jax.value_and_grad(by_equations, has_aux=True)(weights, batch)
        written = {"loss": loss, "gradient": gradients[-1], "constant": jnp.zeros(3)}[name]
        return (updated(weights, gradients), written), loss

    last = {"loss": jnp.float32(0), "gradient": WEIGHTS[0], "constant": jnp.ones(3)}[name]
    execution = check_two_stages(step, ((list(WEIGHTS), last), BATCH))
    staged = execution.calls.staged
    assert staged.homes[LAYERS] == staged.makers[staged.outputs[LAYERS]].stage
    assert staged.homes[LAYERS] == 1 or name != "loss"


def test_a_result_may_be_an_array_that_the_step_closes_over():
    table = jnp.arange(5.0)

    def step(weights, batch):
        (loss, _), gradients = jax.value_and_grad(by_equations, has_aux=True)(weights, batch)
        return updated(weights, gradients), (loss, table, TABLE, 2.0)

    check_two_stages(step, (list(WEIGHTS), BATCH))
