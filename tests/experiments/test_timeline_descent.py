"""The ideal timeline is convex and below what programs take, and its tangents have its seconds at their own choice."""

import numpy as np
import pytest

from cost.base import num_strategies
from cost.evaluation import evaluate
from experiments.timeline_descent import IdealTimeline, Judged, abstract_mesh, judge, main, searched
from experiments.timeline_models import CASES


@pytest.fixture(scope="module")
def timeline() -> IdealTimeline:
    case = CASES["decoder"]
    model = case.make(batch=16, **case.small)
    return IdealTimeline(searched(model, abstract_mesh((2, 4)))[0].space)


def choices(timeline: IdealTimeline, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, num_strategies(timeline.space.problem)) for _ in range(count)]


def total(timeline: IdealTimeline, choice: np.ndarray, weights) -> float:
    """The weighted seconds of a choice: those of the tangent of the timeline, without the sum and preferences."""
    problem = timeline.tangent(weights, 1.0)
    preference = evaluate(timeline.space.preference_problem, choice.tolist()).cost
    return float(evaluate(problem, choice.tolist()).cost - preference)


def test_no_tangent_is_above_the_timeline_and_each_touches_it_at_its_own_choice(timeline):
    seconds, weights = zip(
        *(timeline.seconds(*timeline.amounts(choice)) for choice in choices(timeline, 6)), strict=True
    )
    for k, own in enumerate(weights):
        for j, choice in enumerate(choices(timeline, 6)):
            assert total(timeline, choice, own) <= seconds[j] * (1 + 1e-6)
        assert total(timeline, choices(timeline, 6)[k], own) == pytest.approx(seconds[k], rel=1e-6)


def test_a_mixture_of_choices_takes_no_longer_than_they_do_in_the_mean(timeline):
    (one_s, one), (other_s, other) = (timeline.amounts(choice) for choice in choices(timeline, 2))
    half = [(after, by, seconds / 2) for after, by, seconds in (*one, *other)]
    mixed_s, _ = timeline.seconds((one_s + other_s) / 2, [type(one[0])(*transfer) for transfer in half])
    ends = [timeline.seconds(*timeline.amounts(choice))[0] for choice in choices(timeline, 2)]
    assert mixed_s <= np.mean(ends) * (1 + 1e-9)


def test_the_ideal_schedule_takes_at_least_the_arithmetic_and_at_most_the_program(timeline):
    for choice in choices(timeline, 4):
        judged, _ = judge(timeline, choice)
        assert isinstance(judged, Judged)
        assert judged.compute_s <= judged.ideal_s * (1 + 1e-9)
        assert judged.ideal_s <= judged.played_s * (1 + 1e-9)


def test_the_command_prints_a_row_for_each_setting(capsys):
    assert main(["--sizes", "small", "--models", "decoder", "--meshes", "2x4"]) == 0
    assert "decoder 2x4" in capsys.readouterr().out
