"""A training moves to a plan that should pay, keeps it if its steps are faster, and never moves to and fro."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from diffshard.elastic.replanning import FIRST_PATIENCE, Prices, Replanner
from tests.diffshard.elastic.test_rates import SPECS, plan_with

FIRST, GOOD, OTHER = SPECS
PRICES = Prices(compile_s=0.1, move_s=0.01)
WINDOW = 5


def replanner_that_finds(*names: str) -> Replanner:
    """Returns decisions for a search that finds these plans in turn, and then the last one again and again."""
    found = iter(names)
    last = [names[-1]]

    def search(hardware: Any, start: Any) -> Any:
        last[0] = next(found, last[0])
        return plan_with(last[0])

    return Replanner(plan_with(FIRST), search, window_steps=WINDOW)


def record(replanner: Replanner, step_s: float, num_windows: int = 1) -> list[bool]:
    """Gives windows of steps to the replanner; returns for each window whether there was something to decide."""
    return [sum(replanner.record(step_s, 0) for _ in range(WINDOW)) > 0 for _ in range(num_windows)]


def train(replanner: Replanner, seconds: Sequence[float], num_steps: int, noise: float = 0.0) -> list[int]:
    """Trains with plans whose steps take these seconds, by their numbers; returns the plan of each step."""
    random, ran = np.random.default_rng(0), []
    for number in range(num_steps):
        ran.append(replanner.current)
        left = num_steps - number - 1
        step_s = seconds[replanner.current] * np.exp(random.normal(0.0, noise))
        if not replanner.record(step_s, number + 1):
            continue
        back = replanner.way_back(number + 1, left, PRICES)
        if back is not None:
            replanner.move_to(back)
        proposal = replanner.proposal(number + 1, left, PRICES)
        if proposal is not None:
            replanner.try_plan(proposal, number + 1, "")
    return ran


def with_a_proposal_to_try() -> tuple[Replanner, float, int]:
    """Returns decisions that wait for another measurement before a trial, seconds of a step, and the plan to try."""
    replanner, step_s = replanner_that_finds(GOOD), plan_with(FIRST).step_s
    record(replanner, step_s)
    number = replanner.proposal(WINDOW, 10**4, PRICES)
    assert number == 1
    replanner.measure_again()
    return replanner, step_s, number


def num_moves(ran: Sequence[int]) -> int:
    return int(np.count_nonzero(np.diff(ran)))


def test_a_plan_that_should_save_more_than_it_costs_is_tried_and_kept():
    predicted_s = plan_with(FIRST).step_s
    ran = train(replanner_that_finds(GOOD), [predicted_s, 0.7 * predicted_s], 2000, noise=0.02)
    assert ran[WINDOW - 1] == 0
    assert set(ran[WINDOW:]) == {1}


def test_nothing_is_tried_when_few_steps_are_left():
    replanner = replanner_that_finds(GOOD)
    assert record(replanner, plan_with(FIRST).step_s) == [True]
    assert replanner.proposal(WINDOW, 10, PRICES) is None
    assert replanner.history[-1].action == "stays"
    assert "10 steps" in replanner.history[-1].reason


def test_a_higher_price_needs_more_steps_to_pay():
    replanner = replanner_that_finds(GOOD)
    record(replanner, plan_with(FIRST).step_s)
    replanner.proposal(WINDOW, 1, PRICES)

    def least_steps(prices: Prices) -> int:
        outlooks = ((n, replanner.outlook(1, n, prices)) for n in range(1, 10**6, 50))
        return next(n for n, outlook in outlooks if outlook.saved_s > outlook.price_s)

    assert least_steps(PRICES) < least_steps(PRICES._replace(compile_s=1.0)) < least_steps(Prices(1.0, 1.0))


def test_a_plan_whose_steps_are_slower_than_predicted_is_left_once_and_never_tried_again():
    predicted_s = plan_with(FIRST).step_s
    replanner = replanner_that_finds(GOOD)
    ran = train(replanner, [predicted_s, 1.5 * predicted_s], 3000, noise=0.02)
    assert ran[0] == ran[-1] == 0
    assert num_moves(ran) == 2
    assert [event.action for event in replanner.history].count("goes back") == 1


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_plans_that_are_equally_fast_are_not_taken_in_turns(noise):
    predicted_s = plan_with(FIRST).step_s
    replanner = replanner_that_finds(GOOD, OTHER, FIRST, GOOD, OTHER)
    ran = train(replanner, [predicted_s] * 3, 3000, noise=noise)
    assert num_moves(ran) <= 4  # each of the others once, and back


def test_the_fastest_of_all_tried_plans_is_gone_back_to():
    predicted_s = plan_with(FIRST).step_s
    ran = train(replanner_that_finds(GOOD, OTHER), [predicted_s, 0.6 * predicted_s, predicted_s], 10_000)
    assert ran[-1] == 1


def test_a_window_that_departs_alone_changes_nothing():
    replanner, step_s = replanner_that_finds(GOOD), plan_with(FIRST).step_s
    record(replanner, step_s)
    assert record(replanner, 2 * step_s, FIRST_PATIENCE - 1) == [False] * (FIRST_PATIENCE - 1)
    assert record(replanner, step_s, 3) == [False] * 3


def test_a_lasting_change_opens_the_rates_again_and_the_next_one_needs_twice_the_windows():
    replanner, step_s = replanner_that_finds(GOOD), plan_with(FIRST).step_s
    record(replanner, step_s)
    assert record(replanner, 2 * step_s, FIRST_PATIENCE) == [False] * (FIRST_PATIENCE - 1) + [True]
    assert replanner.history[-1].action == "environment changed"
    assert record(replanner, step_s, 2 * FIRST_PATIENCE) == [False] * (2 * FIRST_PATIENCE - 1) + [True]


def test_a_plan_is_measured_again_before_another_one_is_tried():
    replanner, step_s, number = with_a_proposal_to_try()
    assert record(replanner, 1.1 * step_s, 2) == [True, False]
    replanner.try_plan(number, 2 * WINDOW, "")
    record(replanner, 1.05 * step_s)
    assert replanner.way_back(3 * WINDOW, 10**4, PRICES) is None


def test_a_machine_that_has_changed_before_a_trial_is_noticed_and_the_trial_is_compared_in_its_environment():
    replanner, step_s, number = with_a_proposal_to_try()
    assert record(replanner, 3 * step_s, FIRST_PATIENCE) == [False] * (FIRST_PATIENCE - 1) + [True]
    assert replanner.history[-1].action == "environment changed"
    replanner.try_plan(number, 2 * WINDOW, "")
    record(replanner, 2 * step_s)
    assert replanner.way_back(3 * WINDOW, 10**4, PRICES) is None


def test_a_plan_that_was_measured_to_be_slower_is_not_gone_back_to_although_it_may_be_faster():
    predicted_s = plan_with(FIRST).step_s
    ran = train(replanner_that_finds(GOOD), [predicted_s, 0.97 * predicted_s], 3000, noise=0.1)
    assert num_moves(ran) == 1


def test_a_plan_that_was_tried_while_the_machine_changed_is_not_blamed_for_it():
    step_s = plan_with(FIRST).step_s
    blamed, excused = replanner_that_finds(GOOD), replanner_that_finds(GOOD)
    for replanner in (blamed, excused):
        record(replanner, step_s)
        replanner.try_plan(replanner.proposal(WINDOW, 10**4, PRICES) or 0, WINDOW, "")
        record(replanner, 5 * step_s)
        replanner.move_to(replanner.way_back(2 * WINDOW, 10**4, PRICES) or 0)
        assert replanner.current == 0
    record(blamed, step_s)
    for replanner in (blamed, excused):
        assert record(replanner, 5 * step_s, FIRST_PATIENCE)[-1]
    assert excused.outlook(1, 100, PRICES).saved_s > 2 * blamed.outlook(1, 100, PRICES).saved_s


def test_a_neighbour_for_whom_another_plan_is_better_leads_to_a_move():
    predicted_s = plan_with(FIRST).step_s
    replanner = replanner_that_finds(FIRST, FIRST, FIRST, FIRST, GOOD)
    assert set(train(replanner, [predicted_s], 100)) == {0}
    slower = train(replanner, [3 * predicted_s, 2 * predicted_s], 3000)
    assert slower[-1] == 1
    assert num_moves(slower) == 1


def test_a_plan_that_was_slow_before_the_environment_changed_is_not_tried_for_few_steps():
    predicted_s = plan_with(FIRST).step_s
    replanner = replanner_that_finds(GOOD)
    train(replanner, [predicted_s, 2 * predicted_s], 1000)
    assert replanner.current == 0
    train(replanner, [1.5 * predicted_s, 3 * predicted_s], 100)
    assert replanner.current == 0
    fresh = replanner_that_finds(GOOD)
    record(fresh, 1.5 * predicted_s)
    fresh.proposal(WINDOW, 1, PRICES)
    assert replanner.outlook(1, 100, PRICES).saved_s < fresh.outlook(1, 100, PRICES).saved_s


def test_the_corrected_hardware_is_slower_where_steps_are():
    replanner = replanner_that_finds(GOOD)
    record(replanner, 3 * plan_with(FIRST).step_s)
    before, after = plan_with(FIRST).hardware, replanner.hardware
    assert after.peak_flops_per_s("float32") < 0.8 * before.peak_flops_per_s("float32")
    assert after.link("model").s_per_byte > before.link("model").s_per_byte


def test_a_refused_plan_is_not_proposed_again():
    replanner = replanner_that_finds(GOOD)
    record(replanner, plan_with(FIRST).step_s)
    assert replanner.proposal(WINDOW, 10_000, PRICES) == 1
    replanner.refuse(1, WINDOW, "its program does not fit")
    assert replanner.proposal(WINDOW, 10_000, PRICES) is None
