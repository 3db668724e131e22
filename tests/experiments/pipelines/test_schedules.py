"""The tables of schedules: simulated ones wait as closed formulas say, and searched ones keep less than the memory."""

import pytest

from experiments.pipelines.gpt_step import GptSize
from experiments.pipelines.schedules import main, simulated_rows, split_rows
from tests.experiments.printed_tables import printed_rows


@pytest.mark.parametrize(("num_devices", "count"), [(2, 4), (4, 8), (8, 32)])
def test_equal_stages_without_transfers_wait_as_the_formulas_say(num_devices, count):
    rows = simulated_rows(num_devices, count, 0.0)
    assert len(rows) == 6
    kept = [float(row[-1]) for row in rows]
    assert kept[::4] == kept[5:] * 2 == [num_devices] * 2  # 1F1B, ZB-H1 and ZB-V
    assert kept[2:4] == [num_devices + (num_devices - 1) / each for each in (2, 4)]  # Megatron-LM's formula
    for *_, step_s, waits, expected, _ in rows:
        assert abs(float(waits.rstrip("%")) - float(expected.rstrip("%"))) <= 0.1 + 1e-9  # both are rounded
        assert abs(float(step_s) - 3 * count * (1 + float(waits.rstrip("%")) / 100)) < 0.01 * count


@pytest.mark.parametrize("is_remat", [False, True])
def test_halves_of_backward_programs_have_the_products_of_the_whole(is_remat):
    rows = split_rows(GptSize(2, 16, 2, words=32, length=8), is_remat)
    for _, _, backward, first, weights, residuals, between, still_read in rows:
        assert float(first) + float(weights) == pytest.approx(float(backward), abs=0.011)  # rounded
        assert float(still_read) <= float(residuals)
        assert (float(between) > 0) == (float(first) > 0)
    assert float(rows[1][3]) > 0  # the second stage sends a gradient


def test_a_small_gpt_is_searched_with_each_schedule(capsys):
    words = "--layers 3 --width 64 --length 16 --hosts 1xt4 --batch 8 --microbatches 4 --most-devices 2"
    main([*words.split(), "--schedules", "1f1b", "zb-v"])
    found = printed_rows(capsys.readouterr().out)[-2:]
    assert [row[0] for row in found] == ["1f1b", "zb-v"]
    for _, stages, devices, step_s, _, _, peak, residuals, bound_s, _ in found:
        assert int(stages) >= int(devices.split()[0])
        assert float(bound_s) <= float(step_s)
        assert float(residuals) <= float(peak)
