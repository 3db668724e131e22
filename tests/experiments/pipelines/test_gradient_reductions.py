"""The table of both ways to reduce gradients: what it counts in XLA's programs is what a step has to reduce."""

import jax
import jax.numpy as jnp
import pytest

import diffshard
from experiments.pipelines import gradient_reductions


def step(weight, x):
    loss, gradient = jax.value_and_grad(lambda weight: (jnp.tanh(x @ weight) ** 2).mean())(weight)
    return weight - gradient, loss


@pytest.mark.parametrize(("way", "summed_mib", "end_mib"), [("each_microbatch", 4, 0), ("once", 0, 1)])
def test_bytes_of_a_step_are_those_of_its_gradients(way, summed_mib, end_mib):
    """A gradient of 1 MiB is summed in each of four micro-batches, or once."""
    hosts, between = tuple((device,) for device in jax.devices()[:2]), diffshard.Link(10e-6, 1 / 1e10)
    cluster = diffshard.Cluster([diffshard.Hosts(2, 1, "t4")], between=between, devices=(hosts,))
    pipeline = diffshard.Pipeline(microbatches=4, max_stages=1, schedules=("1f1b",), gradient_reductions=(way,))
    function = diffshard.search(step, cluster, pipeline=pipeline)
    arguments = jnp.zeros((512, 512)), jnp.zeros((8192, 512))
    found = gradient_reductions.compiled(function, arguments)
    assert found.summed_bytes == pytest.approx(summed_mib * 2**20, rel=0.01)
    assert found.end_bytes >= end_mib * 2**20
    assert found.step_s > 0
    assert found.peak_bytes > 2**20
