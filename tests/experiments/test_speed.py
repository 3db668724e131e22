"""The speed experiment runs on a small setting; its times are for people."""

from dataclasses import replace

from diffshard.plans.base import Tensor
from experiments import speed
from tests.diffshard.plans.small_plan import small_plan
from tests.experiments.printed_tables import printed_rows


def test_prints_the_tables(capsys):
    speed.main(["--quick"])
    *planned, dispatch = printed_rows(capsys.readouterr().out)
    names = ["GPT 2 layers, unrolled", "GPT 2 layers, scanned", "decoder of 8B, 1 layers, unrolled, 80 GB"]
    assert [row[0] for row in planned] == names
    assert [row[4] for row in planned] == ["30", "15", ""]  # seconds that were asked for
    for _, vertices, seconds, cpu_s, _, gap, unlike_layers, peak_gib in planned:
        assert int(vertices.replace(",", "")) > 100
        assert min(map(float, (seconds, cpu_s, peak_gib))) > 0
        assert 0 <= float(gap.removesuffix("%")) < 5
        assert unlike_layers == "0"
    searched_us, plain_us, added = dispatch
    median_us, least_us, most_us = map(float, added.split(", "))
    assert min(float(searched_us), float(plain_us)) > 0
    assert least_us <= median_us <= most_us


def test_plans_with_a_certificate():
    result = speed.plan_gpt(1, "unrolled", width=32, heads=4, key_value_heads=4, sequence=16)
    assert result["operations"] > 100
    assert 0 <= result["gap"] < 0.05


def test_equal_layers_are_counted():
    assert speed.plan_gpt(3, "unrolled", width=32, heads=4, key_value_heads=4, sequence=16)["unlike_layers"] == 0
    state = "state.params['layer_{}']['up']"
    tensors = [Tensor(state.format(i), (4,), "float32", ((axis,),)) for i, axis in enumerate("xyx")]
    assert speed.unlike_layers(replace(small_plan(), arguments=tuple(tensors))) == 1
