"""Prices of stages of a GPT: against numbers worked by hand, and how they add up."""

import numpy as np
import pytest

from cost.collectives import collective_s
from cost.presets import preset
from diffshard.pipelines.stage_dynamic_program import Submesh
from experiments.pipelines.gpt_costs import MODELS, Gpt, stage_tables, submeshes_of

SMALL = Gpt(num_blocks=4, width=1024, num_heads=16, vocabulary=8192)


def submesh(replicas, split):
    return Submesh(0, replicas * split, (replicas, split))


def test_the_sizes_that_the_models_are_named_after():
    for name, model in MODELS.items():
        tables = stage_tables(model, [submesh(1, 1)], 1)
        num_weights = tables.state_bytes[0, -1, 0] / 16
        tied = num_weights - model.vocabulary * model.width  # the papers count one table of tokens
        assert tied == pytest.approx(float(name[:-1]) * 1e9, rel=0.06)


def test_a_block_takes_its_products_and_its_memory_traffic():
    """One sample of 1024 tokens, width 1024: 24·1024^3 + 4·1024^3 FLOP; 20 + 16 and 13·16 bytes for each 1024^2."""
    hardware = preset("v100", {"data": 1, "model": 1})
    tables = stage_tables(SMALL, [submesh(1, 1)], 1)
    products_s = 28 * 1024**3 / hardware.reached_flops_per_s("float16")
    traffic_s = (36 + 13 * 16) * 1024**2 / hardware.reached_memory_bytes_per_s
    assert tables.forward_s[1, 2, 0] == pytest.approx(products_s + traffic_s)
    assert tables.backward_s[1, 2, 0] == pytest.approx(3 * (products_s + traffic_s)), (
        "computed again, then twice as much"
    )


def test_devices_that_split_a_layer_sum_twice_each_way_and_when_they_compute_again():
    link = preset("v100", {"data": 1, "model": 4}).links["model"]
    sum_s = float(collective_s("all_reduce", 2 * 1024**2, 4, link))
    one, four = (stage_tables(SMALL, [submesh(1, split)], 1) for split in (1, 4))
    whole_s = 20 * 1024**2 / preset("v100", {"data": 1}).reached_memory_bytes_per_s
    split_s = (one.forward_s[1, 2, 0] - whole_s) / 4
    assert four.forward_s[1, 2, 0] == pytest.approx(split_s + whole_s + 2 * sum_s)
    assert four.backward_s[1, 2, 0] == pytest.approx(3 * (split_s + whole_s) + 4 * sum_s)


def test_replicas_share_a_microbatch_and_sum_gradients_once():
    one, two = stage_tables(SMALL, [submesh(1, 1)], 2), stage_tables(SMALL, [submesh(1, 1), submesh(2, 1)], 4)
    np.testing.assert_allclose(two.forward_s[..., 1], one.forward_s[..., 0])
    weights = one.state_bytes[1, 5, 0] / 16
    link = preset("v100", {"data": 2, "model": 1}).links["data"]
    extra_s = float(collective_s("all_reduce", 2 * weights, 2, link))
    assert two.step_s[1, 5, 1] == pytest.approx(extra_s + two.step_s[1, 5, 0] / 2)
    assert two.state_bytes[1, 5, 1] == pytest.approx(weights * (4 + 12 / 2))


def test_stages_are_sums_of_layers_and_need_the_memory_of_the_largest():
    tables = stage_tables(SMALL, [submesh(1, 2)], 2)
    for name in ("forward_s", "backward_s", "state_bytes", "residual_bytes"):
        table = getattr(tables, name)[..., 0]
        assert table[0, 6] == pytest.approx(table[0, 2] + table[2, 5] + table[5, 6])
    assert tables.transient_bytes[0, 6, 0] == max(tables.transient_bytes[i, i + 1, 0] for i in range(6))


def test_a_microbatch_that_the_replicas_cannot_share_is_no_choice():
    assert np.isinf(stage_tables(SMALL, [submesh(4, 1)], 2).forward_s).all()


def test_submeshes_are_powers_of_two_that_split_layers_inside_a_host():
    assert [mesh.shape for mesh in submeshes_of(4)] == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert max(mesh.shape[1] for mesh in submeshes_of(64)) == 8
