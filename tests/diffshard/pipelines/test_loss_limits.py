"""A search chooses between exact and delayed gradients by what short trainings say of the loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.pipelines.loss_limits import MeasuredDelay, measured_delays
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_delayed_gradients import by_hand, mlp, mlp_loss, step_of, versions_of

NUM_STEPS = 5
PREDICTED = (0.0, 1.0)


def runs_of(optimizer, num_runs=2):
    state = mlp(), optimizer.init(mlp())
    keys = jax.random.split(jax.random.key(3), num_runs * NUM_STEPS).reshape(num_runs, NUM_STEPS)
    return [[(state, (jax.random.normal(k, (8, 8)), jax.random.uniform(k, (8, 8)))) for k in run] for run in keys]


def limit_of(optimizer, increase=1.0):
    return diffshard.pipelines.LossLimit(increase, runs_of(optimizer), loss="result[1][0]")


def late_losses_by_hand(optimizer, predicted_steps):
    @jax.jit
    def params_after(batches):
        if predicted_steps is not None:
            return by_hand(mlp_loss, optimizer, mlp(), batches, predicted_steps)[0]
        params, state = mlp(), optimizer.init(mlp())
        for batch in batches:
            updates, state = optimizer.update(jax.grad(mlp_loss)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        return params

    of_runs = [[batch for _, batch in run] for run in runs_of(optimizer)]
    return np.array([mlp_loss(params_after(batches[:-1]), batches[-1]) for batches in of_runs])  # a fifth is one step


def test_increases_are_those_of_late_losses_at_the_current_weights():
    optimizer = optax.sgd(0.2, momentum=0.9)
    found = measured_delays(step_of(mlp_loss, optimizer), limit_of(optimizer, 1e-3), PREDICTED)
    exact = late_losses_by_hand(optimizer, None)
    for delay, steps in zip(found, PREDICTED, strict=True):
        differences = late_losses_by_hand(optimizer, steps) - exact
        np.testing.assert_allclose(delay.increase, differences.mean(), atol=1e-5)
        assert delay.error is not None
        np.testing.assert_allclose(delay.error, differences.std(ddof=1) / 2**0.5, atol=1e-5)
        assert delay.is_allowed == (delay.increase <= 1e-3)


def pipelined(optimizer, limit, **options):
    pipeline = diffshard.Pipeline(
        **{"microbatches": 4, "max_stages": 2, "residuals": ("keep",)} | options, loss_limit=limit
    )
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    return diffshard.search(step_of(mlp_loss, optimizer), cluster, pipeline=pipeline)


@pytest.mark.parametrize(("increase", "is_delayed"), [(10.0, True), (1e-9, False)], ids=["wide", "narrow"])
def test_the_fastest_pipeline_within_the_limit_runs_and_its_plan_says_what_was_measured(increase, is_delayed):
    optimizer = optax.sgd(0.3, momentum=0.9)
    limit = limit_of(optimizer, increase)
    schedules = ("2bw",) if is_delayed else ("1f1b", "2bw")
    step = pipelined(optimizer, limit, schedules=schedules, predicted_steps=PREDICTED)
    state, batch = limit.validation_runs[0][0]
    plan = step.plan(state, batch)
    assert (plan.schedule == "2bw") == is_delayed
    assert "no prediction: " in " ".join(plan.notes)
    assert "weights predicted 1 steps ahead: " in " ".join(plan.notes)
    one_device = step_of(mlp_loss, optimizer)
    one_device = diffshard.pipelines.delayed(one_device) if is_delayed else one_device
    found: Any = state
    expected: Any = state
    for _ in range(3):
        found, result = step(found, batch)
        expected, expected_result = one_device(expected, batch)
        check_close(jax.tree.map(jnp.asarray, result), expected_result)
    assert bool(versions_of(found)) == is_delayed
    batches = [batch] * 3
    *_, (last, _) = step.steps(state, batches)
    check_close(jax.tree.map(jnp.asarray, last), expected)
    assert "1 plan>" in repr(step)


def test_what_cannot_be_measured_or_chosen_is_refused():
    optimizer, refused = optax.sgd(0.3, momentum=0.9), partial(pytest.raises, ValueError)
    with refused(match="each delay raises the loss by more than `LossLimit.max_loss_increase`: no prediction: "):
        limit = limit_of(optimizer, 1e-9)
        pipelined(optimizer, limit, schedules=("2bw",)).plan(*limit.validation_runs[0][0])
    with refused(match="`LossLimit.loss` must name the loss among the results"):
        limit = diffshard.pipelines.LossLimit(1.0, runs_of(optimizer))
        pipelined(optimizer, limit, schedules=("2bw",)).plan(*limit.validation_runs[0][0])
    with refused(match=r"`LossLimit.max_loss_increase` must be a positive number, not -1"):
        diffshard.pipelines.LossLimit(-1, runs_of(optimizer))
    with pytest.raises(TypeError, match=r"`LossLimit.loss` must be the path of a result, .*, not 3"):
        diffshard.pipelines.LossLimit(1.0, runs_of(optimizer), loss=3)  # pyright: ignore[reportArgumentType]
    with refused(match=r"`LossLimit.validation_runs` must be trainings of one call or more each"):
        diffshard.pipelines.LossLimit(1, [[]])
    with refused(match="`Pipeline.predicted_steps` and `loss_limit` are for the schedule '2bw'"):
        diffshard.Pipeline(loss_limit=limit_of(optimizer))
    with refused(match="with one number of `predicted_steps`"):
        diffshard.Pipeline(schedules=("2bw",), predicted_steps=PREDICTED)
    with refused(match="`Pipeline.predicted_steps` must name each number once"):
        diffshard.Pipeline(schedules=("2bw",), predicted_steps=(1, 1.0), loss_limit=limit_of(optimizer))
    with refused(match="`Pipeline.loss_limit` cannot be given together with static arguments"):
        cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
        pipeline = diffshard.Pipeline(schedules=("2bw",), loss_limit=limit_of(optimizer))
        diffshard.search(lambda s, b, n: (s, b), cluster, pipeline=pipeline, static_argnums=2)


def test_the_delayed_schedule_leaves_the_stages_of_interleaved_ones_behind():
    pipeline = diffshard.Pipeline(
        schedules=("interleaved", "2bw"),
        stages_per_device=3,
        predicted_steps=PREDICTED,
        loss_limit=limit_of(optax.sgd(0.1), 1.0),
    )
    exact, delayed = pipeline.within_limit([MeasuredDelay(1.0, 0.0, None, is_allowed=True)])
    assert (exact.schedules, exact.stages_per_device) == (("interleaved",), 3)
    assert (delayed.schedules, delayed.predicted_steps, delayed.stages_per_device) == (("2bw",), 1.0, 2)
