"""Successive halving: who goes on, what it costs, what the table says."""

import math

import pytest

from diffshard.successive_halving import each, halving


def _runner(rates):
    """Candidate (i, steps so far), whose score after n steps is rate_i to the n."""

    def train_one(candidate, num_steps):
        i, done = candidate
        return (i, done + num_steps), rates[i] ** (done + num_steps)

    return each(train_one)


def test_the_better_half_goes_on_and_the_budget_is_counted():
    rates = [0.9, 0.5, 0.8, 0.7, 0.99]
    found = halving([(i, 0) for i in range(5)], _runner(rates), rungs=(1, 2, 3), names=list("abcde"))
    assert found.winner == (1, 6)
    assert found.position == 1
    assert [row.name for row in found.table] == ["b", "d", "c", "a", "e"]  # b, d, c saw rung 2; b and d rung 3
    assert [row.steps for row in found.table] == [6, 6, 3, 1, 1]
    assert found.trained[2] == (2, 3)
    assert found.table[0].scores == (0.5, 0.5**3, 0.5**6)
    assert found.steps == 6 + 6 + 3 + 1 + 1


def test_who_is_late_but_not_last_can_win():
    """Scores of the last rung decide, not of the first."""

    def train_one(i, num_steps):
        return i, {1: [1.0, 2.0, 3.0], 2: [2.0, 1.0, 0.0]}[num_steps][i]

    assert halving([0, 1, 2], each(train_one), rungs=(1, 2), keep=0.6).winner == 1


def test_nan_loses_and_tuples_compare_in_order():
    scores = [(0.0, math.nan), (0.0, 5.0), (1.0, 0.0)]
    found = halving([0, 1, 2], each(lambda i, _: (i, scores[i])), rungs=(1,))
    assert [row.name for row in found.table] == ["1", "0", "2"]
    assert halving([0, 1], each(lambda i, _: (i, [math.nan, 9.0][i])), rungs=(1, 1)).winner == 1


@pytest.mark.parametrize(
    ("candidates", "options", "message"),
    [
        ([], {"rungs": (1,)}, "at least one candidate"),
        ([1], {"rungs": ()}, "`rungs` must be a sequence of positive whole numbers of steps"),
        ([1], {"rungs": (1, 0)}, "`rungs` must be a sequence of positive whole numbers of steps"),
        ([1], {"rungs": (1.5,)}, "`rungs` must be a sequence of positive whole numbers of steps"),
        ([1], {"rungs": 3}, "`rungs` must be a sequence .* got 3"),
        ([1], {"rungs": (1,), "keep": "half"}, "`keep` must be a share between 0 and 1, got 'half'"),
        ([1], {"rungs": (1,), "keep": 1.0}, "`keep` must be a share between 0 and 1"),
        ([1], {"rungs": (1,), "names": ["a", "b"]}, "one for each of the 1 candidates, got 2"),
    ],
)
def test_what_is_wrong_is_said(candidates, options, message: str):
    with pytest.raises(ValueError, match=message):
        halving(candidates, each(lambda c, _: (c, 0.0)), **options)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (each(lambda c, _: (c, math.nan)), "only scores that are NaN for all 2 candidates"),
        (each(lambda c, _: (c, (math.nan, 1.0))), "only scores that are NaN"),
        (each(lambda c, _: None), "must return a pair, candidate and score; got NoneType"),  # pyright: ignore[reportArgumentType]
        (lambda cs, _: None, "must return a pair, candidates and scores; got NoneType"),
        (lambda cs, _: (cs, [1.0]), "each of 2 candidates; got 2 and 1"),
    ],
)
def test_training_that_gives_no_scores_is_said(train, message: str):
    with pytest.raises(ValueError, match=message):
        halving([1, 2], train, rungs=(1,))
