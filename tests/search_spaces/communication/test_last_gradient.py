"""The gradient of the last step: what it computes, against delayed gradients on one device, and what it costs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import diffshard
from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact, LastGradient, Schedule
from tests.search_spaces.communication.small_communication import (
    BATCH,
    HARDWARE,
    KEY,
    PARAMS,
    arguments,
    assert_close,
    plain_loss,
    run_step,
    small_space,
)

LAST = LastGradient(1.0)
OPTIMIZER = optax.sgd(0.2, momentum=0.9)


def _batches(count):
    return [jax.tree.map(lambda x, scale=1 + i: jnp.sin(scale * x), arguments()[1]) for i in range(count)]


def _choice(space, strategy=1):
    return [strategy if "gradient" in name else 0 for name in space.node_names]


def _space(*strategies):
    return small_space(strategies={"forward": (Exact(),), "backward": (Exact(),), "gradient": strategies})


def test_with_probability_one_it_is_delayed_training_on_one_device():
    """As an index and as weights, its step t + 1 makes the weights that step t of `delayed` makes."""

    @diffshard.pipelines.delayed
    def reference(state, batch):
        params, opt_state = state
        updates, opt_state = OPTIMIZER.update(jax.grad(plain_loss)(params, batch), opt_state)
        return (optax.apply_updates(params, updates), opt_state), 0.0

    space, batches = _space(Exact(), LAST), _batches(5)
    certain = [jnp.array([0.0, 1.0]) if s else 0 for s in _choice(space)]
    steps = [
        jax.jit(lambda p, b, r, selection=selection: space.loss_and_gradients(p, b, selection, r, KEY, 0)[1:])
        for selection in (_choice(space), certain)
    ]
    state = reference.with_versions((PARAMS, OPTIMIZER.init(PARAMS)), batches[0])[0][0]
    runs: Any = [(PARAMS, OPTIMIZER.init(PARAMS), space.init_residuals(PARAMS))] * 2
    run_reference = jax.jit(reference)
    for t, batch in enumerate(batches):
        for i, (params, opt_state, residuals) in enumerate(runs):
            gradients, residuals = steps[i](params, batch, residuals)
            updates, opt_state = OPTIMIZER.update(gradients, opt_state)
            runs[i] = optax.apply_updates(params, updates), opt_state, residuals
            assert_close(runs[i][0], diffshard.pipelines.current_version(state)[0], atol=1e-5)
        state, _ = run_reference(state, batch)
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, diffshard.pipelines.current_version(state)[0], PARAMS))
        assert moved > 0.05 * (t + 1), "the steps are too small to show a wrong one"


def test_what_a_step_sends_does_not_depend_on_what_it_computes():
    """So XLA may send it at any time of the step: nothing that the step computes goes into the gradients it returns."""
    space = _space(Exact(), LastGradient(1.0, Encode(INT8)))
    residuals = jax.tree.map(jnp.ones_like, space.init_residuals(PARAMS))
    params, batch = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (PARAMS, BATCH))
    step = jax.jit(lambda p, b, r: space.loss_and_gradients(p, b, _choice(space), r, KEY, 0))
    loss, gradients, _ = step(params, batch, residuals)
    assert jnp.isnan(loss)
    assert all(jnp.isfinite(x).all() and x.any() for x in jax.tree.leaves(gradients))


def test_another_strategy_sends_what_it_has_kept():
    """After a step of the last gradient the exact sum has both steps' gradients; before one, it has an error's."""
    space = _space(Exact(), LAST, ErrorFeedback(INT4), Schedule(LAST, Exact(), 1, 2))
    of_one = run_step(space, _choice(space, 0)).gradients
    for strategy in (1, 3):
        kept = run_step(space, _choice(space, strategy))
        assert not any(x.any() for x in jax.tree.leaves(kept.gradients))
        then = run_step(space, _choice(space, 3 if strategy == 3 else 0), kept.residuals, 1).gradients
        assert_close(then, jax.tree.map(lambda x: 2 * x, of_one), atol=1e-5)
    rounded = run_step(space, _choice(space, 2))
    rest = run_step(space, _choice(space, 1), rounded.residuals, 1)
    assert_close(jax.tree.map(jnp.add, rounded.gradients, rest.gradients), of_one, atol=1e-5)
    again = run_step(space, _choice(space, 1), rest.residuals, 2).gradients
    assert_close(again, of_one, atol=1e-5)


def test_every_second_step_it_sends_what_came_before_that_step():
    space = _space(Exact(), EveryK(2, LAST))
    of_one, result, sent = run_step(space, _choice(space, 0)).gradients, None, []
    for step in range(4):
        result = run_step(space, _choice(space), result and result.residuals, step)
        sent.append(result.gradients)
    for gradients, count in zip(sent, (0, 1, 0, 2), strict=True):
        assert_close(gradients, jax.tree.map(lambda x, count=count: count * x, of_one), atol=1e-5)


def test_its_price_is_what_remains_after_the_computing():
    """Groups share the computing by their bytes: 4096 of 5120 are of the matrices over data, in 10 + 4.096 µs."""

    def seconds(*strategies):
        space = _space(Exact(), *strategies)
        return dict(zip(space.node_names, space.problem.node_cost, strict=True))

    of_data, of_all = "matrices over data gradient", "matrices over data and model gradient"
    rows = seconds(Encode(INT8), LastGradient(1e-5), LastGradient(1e-5, Encode(INT8)))
    exact, codes, late, late_codes = rows[of_data]
    assert exact == pytest.approx(14.096e-6)
    assert late == pytest.approx(14.096e-6 - 0.8 * 1e-5)
    assert codes - late_codes == pytest.approx(0.8 * 1e-5)
    assert rows[of_all][0] - 0.2 * 1e-5 <= rows[of_all][2] < rows[of_all][0]
    rows = seconds(LastGradient(1.0), LastGradient(1.0, Encode(INT8)))
    assert rows[of_data][1] == rows[of_all][1] == 0
    num_coded = 2 * 1024 + 512 + 1024  # all rows there and back, then the sum of this device's and those of all
    coding_s = num_coded * (4 + 1) / HARDWARE.memory_bytes_per_s
    assert rows[of_data][2] == pytest.approx(coding_s), "encoding is computing, and is not hidden"


def test_seconds_that_hide_nothing_are_refused():
    for compute_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`compute_s` must be positive and finite, in seconds, not"):
            LastGradient(compute_s)
    with pytest.raises(ValueError, match="which keep residuals; these are for gradients only"):
        small_space(strategies={"forward": (Exact(), LAST)})
