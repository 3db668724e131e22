"""What a step waits for exchanges, and plans with all of them as codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diffshard
from diffshard.checks.timeline import Timeline
from experiments.exchange_waits import KINDS, all_coded, rates_with, space_for, waits_s


def test_waits_are_those_for_exchanges_on_all_axes():
    waited_s = {("all_to_all", "data"): 2.0, ("collective_permute", "model"): 0.5, ("all_gather", "data"): 4.0}
    timeline = Timeline(10.0, {}, {**waited_s, ("all_to_all", "model"): 1.0}, ())
    assert waits_s(timeline, KINDS) == pytest.approx(3.5)


def test_links_inside_of_hosts_and_between_them_have_shares_of_their_own():
    preset = diffshard.preset("h100", {"data": 4, "model": 8})
    hardware, rates = rates_with(preset, 0.25, 0.5)
    assert hardware.links["data"].s_per_byte == pytest.approx(4 * preset.links["data"].s_per_byte)
    assert hardware.links["model"].s_per_byte == pytest.approx(2 * preset.links["model"].s_per_byte)
    _, exact = rates_with(preset, 1.0, 1.0)
    assert rates.host.network_bytes_per_s == exact.host.network_bytes_per_s / 4
    assert rates.host.device_bytes_per_s == exact.host.device_bytes_per_s / 2


def test_all_exchanges_of_a_plan_become_codes():
    def step(weights, x):
        sent = jnp.einsum("gsm,gse->gem", x, jnp.tanh(x[..., :8]))
        return weights + jnp.mean(jnp.einsum("gem,emh->geh", sent, weights), axis=0)[:, None]

    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    parts = NamedSharding(mesh, PartitionSpec("data"))
    links = {"data": diffshard.Link(0.0, 1e-6)}
    hardware = dataclasses.replace(diffshard.preset("h100", dict(mesh.shape)), links=links)
    arguments = jnp.ones((8, 64, 64)) / 64, jax.random.normal(jax.random.key(0), (8, 8, 64))
    plan = diffshard.search(step, mesh, hardware=hardware, in_shardings=(parts, parts)).plan(*arguments)
    coded = all_coded(space_for(step, arguments, mesh, hardware), plan, "int8")
    assert [o.exchanged_in for o in coded.operations if o.exchanged_in] == ["int8"]
    exact, result = step(*arguments), coded.apply(step)(*arguments)
    np.testing.assert_allclose(result, exact, rtol=0.02, atol=0.02)
    assert np.abs(result - exact).max() > 1e-5
