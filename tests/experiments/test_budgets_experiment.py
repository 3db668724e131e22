"""The experiment of devices that change, on the small model."""

from experiments import budgets


def test_short_phases_are_planned_together_with_fewer_seconds_of_moves(capsys):
    assert budgets.main(["--models", "mlp", "--steps", "1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mlp | 1 | "))
    saved = row.split(" | ")[6]
    assert float(saved.removesuffix("%")) > 1
