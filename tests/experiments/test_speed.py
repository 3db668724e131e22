"""The speed experiment runs on a small setting; its times are for people."""

from experiments import speed


def test_prints_both_tables(capsys):
    speed.main(["--quick"])
    out = capsys.readouterr().out
    assert "GPT 2 layers, unrolled" in out
    assert "GPT 2 layers, scanned" in out
    assert "added" in out


def test_plans_with_a_certificate():
    result = speed.plan_gpt(1, "unrolled", width=32, heads=4, key_value_heads=4, sequence=16)
    assert result["operations"] > 100
    assert 0 <= result["gap"] < 0.05
