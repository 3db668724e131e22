"""The experiment on delayed gradients prints its tables, and chooses the delay by the loss that is allowed."""

import numpy as np

from experiments.pipelines import delayed_gradients
from experiments.pipelines.delayed_gradients import ALLOWED_INCREASE


def test_the_delay_is_chosen_where_the_mean_loss_rises_by_no_more_than_is_allowed():
    def chosen(*losses):
        return delayed_gradients._loss_row("sgd", 0.1, np.array(losses))[-2:]

    assert chosen((1.0, 1.0 + 0.9 * ALLOWED_INCREASE)) == ["delayed", f"{1.0 + 0.9 * ALLOWED_INCREASE:.4f}"]
    assert chosen((1.0, 1.0), (1.0, 1.0 + 2.1 * ALLOWED_INCREASE)) == ["exact", "1.0000"]
    assert chosen((1.0, np.nan)) == ["exact", "1.0000"]
    assert chosen((np.inf, 1.0)) == ["neither", ""]


def test_tables_are_printed(capsys):
    delayed_gradients.main(["--steps", "2", "--seeds", "1", "--rates", "sgd:0.1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 8 + 1
    assert [float(cell) for cell in rows[0].split("│")[5:9]] == [34.0, 34.0, 25.0, 25.0]
    exact, late = (float(cell) for cell in rows[-1].split("│")[3:5])
    assert 3 < exact != late > 3
