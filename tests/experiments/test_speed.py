"""The speed experiment runs on a small setting; its times are for people."""

from dataclasses import replace

from diffshard.plans.base import Tensor
from experiments import speed
from tests.diffshard.plans.small_plan import small_plan


def test_prints_the_tables(capsys):
    speed.main(["--quick"])
    out = capsys.readouterr().out
    assert "GPT 2 layers, unrolled" in out
    assert "GPT 2 layers, scanned" in out
    assert "decoder of 8B, 1 layers, unrolled, 80 GB" in out
    assert "added" in out


def test_plans_with_a_certificate():
    result = speed.plan_gpt(1, "unrolled", width=32, heads=4, key_value_heads=4, sequence=16)
    assert result["operations"] > 100
    assert 0 <= result["gap"] < 0.05


def test_equal_layers_are_counted():
    assert speed.plan_gpt(3, "unrolled", width=32, heads=4, key_value_heads=4, sequence=16)["unlike_layers"] == 0
    state = "state.params['layer_{}']['up']"
    tensors = [Tensor(state.format(i), (4,), "float32", ((axis,),)) for i, axis in enumerate("xyx")]
    assert speed.unlike_layers(replace(small_plan(), arguments=tuple(tensors))) == 1
