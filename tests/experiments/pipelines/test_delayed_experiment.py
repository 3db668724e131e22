"""The experiment on delayed gradients prints its tables, and chooses the delay by the loss that is allowed."""

import numpy as np

from experiments.pipelines import delayed_gradients
from experiments.pipelines.delayed_gradients import ALLOWED_INCREASE


def test_the_cheapest_delay_is_chosen_whose_mean_loss_rises_by_no_more_than_is_allowed():
    def chosen(*increases):
        losses = 1.0 + ALLOWED_INCREASE * np.array([(0.0, *row) for row in increases])
        return delayed_gradients._loss_row("sgd", 0.1, losses)[-1]

    assert chosen((0.9, 0.5, 0.0, 0.0)) == "delayed"
    assert chosen((0.0, 0.9, 0.0, 0.0), (2.1, 0.9, 0.0, 0.0)) == "predicted 0.5"
    assert chosen((np.nan, 1.1, 0.9, 0.0)) == "predicted 1"
    assert chosen((np.nan, 1.1, np.inf, 0.0)) == "exact"
    assert delayed_gradients._loss_row("sgd", 0.1, np.array([[np.inf, 1.0, 1.0, 1.0, 1.0]]))[2] == "diverged"


def test_tables_are_printed(capsys):
    delayed_gradients.main(["--steps", "3", "--seeds", "1", "--rates", "sgd:0.1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 8 + 1
    assert [float(cell) for cell in rows[0].split("│")[5:9]] == [34.0, 34.0, 25.0, 25.0]
    cells = rows[-1].split("│")[3:9]
    increases = [float(cell.split("±")[0]) for cell in cells[1:5]]
    assert float(cells[0]) > 3
    assert len(set(increases)) == len(increases), "every way trains in its own way"
