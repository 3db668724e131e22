"""A training that runs as a pipeline goes on from its checkpoint, on other devices and as another pipeline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from tests.diffshard.pipelines.scanned_models import arguments, train_step
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_pipelined_function import PIPELINE, leave


def init():
    return arguments()[0]


def batch_of(number):
    return jax.tree.map(lambda x: np.roll(x, number, 0), arguments()[1])


def resumed(directory, devices=4, fn=train_step, init=init, pipeline=PIPELINE, **options):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:devices], hardware="h100")
    return diffshard.resume(directory, fn, cluster, init, batch_of(0), pipeline=pipeline, progress="none", **options)


def train(directory, until, devices):
    losses = []
    with resumed(directory, devices) as training:
        state = training.restore()
        for number in range(training.num_steps, until):
            state, loss = training.step(state, batch_of(number))
            losses.append(jax.device_get(loss))
            training.save(number + 1, state)
        plan = training.plan
    return losses, plan


def test_a_pipeline_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    step, state, expected = jax.jit(train_step), init(), []
    for number in range(4):
        state, loss = step(state, batch_of(number))
        expected.append(jax.device_get(loss))
    leave(monkeypatch, 1, 3)
    losses, plan = train(tmp_path, 2, 4)
    assert len(plan.stages) >= 3
    again = resumed(tmp_path)
    assert again.plan == plan  # nothing is searched
    check_close(again.restore(), jax.jit(train_step)(jax.jit(train_step)(init(), batch_of(0))[0], batch_of(1))[0])
    again.close()
    monkeypatch.undo()
    more, other = train(tmp_path, 4, 1)
    assert len(other.stages) == 1
    check_close([*losses, *more], expected)


def test_a_pipeline_with_delayed_gradients_begins_with_all_versions_of_its_weights(tmp_path):
    pipeline = replace(PIPELINE, schedules=("2bw",), predicted_steps=1.0, microbatches=4, max_stages=1)
    with pytest.raises(ValueError, match="`init` must make the weights in all versions that the schedule '2bw' reads"):
        resumed(tmp_path, 1, pipeline=pipeline)
    delayed = diffshard.pipelines.delayed(train_step, predicted_steps=1.0)
    with resumed(tmp_path, 1, init=lambda: delayed.with_versions(*arguments())[0][0], pipeline=pipeline) as training:
        state, _ = training.step(training.restore(), batch_of(0))
    assert jax.tree.structure(state) == jax.tree.structure(training.restore())


def test_a_step_that_does_not_return_its_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`fn` must return the new state, but no result .* takes the place of `state"):
        resumed(tmp_path, 1, fn=lambda state, batch: (train_step(state, batch)[0][0], jnp.float32(0)))
    cluster = diffshard.Cluster.from_devices(jax.devices()[:1], hardware="h100")
    with pytest.raises(TypeError, match="`mesh` can be a Cluster together with `pipeline` only"):
        diffshard.resume(tmp_path, train_step, cluster, init, batch_of(0))
