"""The controls of the gradient, on small problems."""

import numpy as np
import pytest

from cost.evaluation import evaluate
from diffshard.solving.objectives.objective import PricedObjective
from experiments import gradient_controls
from experiments.objective_settings import expert_setting, group_setting, loss_setting, step_settings
from tests.experiments.printed_tables import printed_rows


def test_no_control_finds_better_tables_and_pipelines_than_the_gradient(capsys):
    for kind in ("tables", "pipelines"):
        gradient_controls.main(["--only", kind, "--seeds", "1", "--most-problems", "16"])
        (row,) = printed_rows(capsys.readouterr().out)
        assert all(float(ratio) >= 0.99 for ratio in row[5:10])
        assert float(row[2].removesuffix("%")) < 20


def test_on_a_step_that_links_bound_the_gradient_of_a_mixture_decides():
    setting = next(step_settings((4096,)))
    own = gradient_controls.with_gradient(setting, 8)
    one_hot = gradient_controls.with_weights_of(setting, gradient_controls.controls(0)["one-hot"][0], 8, 60.0)
    assert own.lower_bound <= own.price < 0.8 * one_hot.price


def test_without_a_tangent_workers_stay_in_the_groups_in_which_they_begin():
    setting = group_setting(0)
    own = gradient_controls.with_gradient(setting, 16)
    cut = gradient_controls.with_weights_of(setting, gradient_controls.controls(0)["cut"][0], 1, 60.0)
    priced = PricedObjective(setting.objective, setting.problem)
    begin = evaluate(setting.problem, setting.start).cost + priced.price(priced.amounts(setting.start))
    assert cut.price == pytest.approx(begin)
    assert own.lower_bound <= own.price < 0.99 * begin


@pytest.mark.parametrize("make", [expert_setting, loss_setting])
def test_experts_and_formats_begin_with_a_feasible_choice(make):
    setting = make(0)
    assert evaluate(setting.problem, setting.start).feasible
    assert gradient_controls.with_gradient(setting, 1).price < np.inf


def test_formats_cost_nothing_until_the_loss_rises_by_more_than_the_limit():
    setting = loss_setting(0, num_layers=2)
    priced = PricedObjective(setting.objective, setting.problem)
    assert priced.amounts(setting.start) == 0
    step_s = evaluate(setting.problem, setting.start).cost
    penalties_s = [priced.price(np.array([increase])) for increase in (0.0, 1.0, 3.0)]
    assert penalties_s == pytest.approx([0.0, 0.0, step_s])  # 0.5 / 2 * (3 - 1)^2
