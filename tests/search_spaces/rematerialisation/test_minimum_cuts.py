"""Choices cost what the formula says, summed over all values and steps, and those offered are its lower hull."""

import itertools

import numpy as np
import pytest

from search_spaces.rematerialisation.choices import Choices

NUM_STEPS = 7


def random_choices(seed):
    """Steps that each make one or two values of earlier ones; some values cannot be kept, or are no step's."""
    rng, choices = np.random.default_rng(seed), Choices()
    values = [0, 1]
    for key in range(10, 10 + NUM_STEPS):
        choices.operands[key] = sorted(rng.choice(values, min(len(values), 2), replace=False).tolist())
        choices.steps[key] = float(rng.integers(0, 9))
        for _ in range(int(rng.integers(1, 3))):
            values.append(len(values))
            choices.maker[values[-1]] = key
    for value in values:
        choices.bytes[value] = np.inf if value > 4 and rng.random() < 0.1 else float(rng.integers(1, 9))
    choices.needed = set(rng.choice(values[2:], 5, replace=False).tolist())
    return choices


def all_costs(choices):
    """Returns seconds and bytes of every choice by the formula, of those that can be: R and N with R_e <= N_u."""
    keys, found = sorted(choices.steps), []
    for again in itertools.product((False, True), repeat=len(keys)):
        runs = dict(zip(keys, again, strict=True))
        needed = choices.needed | {u for key in keys if runs[key] for u in choices.operands[key]}
        kept = {v for v in needed if not runs.get(choices.maker.get(v), False)}
        seconds = sum(choices.steps[key] for key in keys if runs[key])
        if all(np.isfinite(choices.bytes[v]) for v in kept):
            found.append((seconds, sum(choices.bytes[v] for v in kept)))
    return np.array(found)


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_choice_at_each_price_is_that_of_all(seed):
    choices = random_choices(seed)
    seconds, num_bytes = all_costs(choices).T
    for price in (0.0, 0.2, 0.9, 3.7, np.inf):
        found = choices.cheapest(price)
        if price == np.inf:
            assert found.kept_bytes == num_bytes.min()
            assert found.seconds == seconds[num_bytes == num_bytes.min()].min()
        else:
            cost = (seconds + price * num_bytes).min()
            assert found.seconds + price * found.kept_bytes == pytest.approx(cost, rel=1e-6)
        for v in found.kept:
            assert np.isfinite(choices.bytes[v])
    # Steps without seconds keep their results, too.
    at_most = {v for v in choices.needed if np.isfinite(choices.bytes[v]) or v not in choices.maker}
    assert at_most <= choices.cheapest(0.0).kept


@pytest.mark.parametrize("seed", range(12))
def test_candidates_are_the_corners_of_the_lower_hull(seed):
    choices = random_choices(seed)
    seconds, num_bytes = all_costs(choices).T
    found = [(c.seconds, c.kept_bytes) for c in choices.candidates()]
    assert len(set(found)) == len(found)
    assert [b for _, b in found] == sorted((b for _, b in found), reverse=True)
    for price in np.geomspace(0.01, 100, 400):
        least = min(s + price * b for s, b in found)
        assert least == pytest.approx((seconds + price * num_bytes).min(), rel=1e-6)
    assert len(choices.candidates(most=2)) == min(len(found), 2)


def test_what_is_not_needed_does_not_run_and_what_runs_inside_its_reader_costs_nothing():
    """A chain 0 -> a -> 1 -> b -> 2 -> c -> 3, of which the backward pass reads 2."""
    choices = Choices()
    choices.steps, choices.maker = {10: 1.0, 11: 2.0, 12: 4.0}, {1: 10, 2: 11, 3: 12}
    choices.operands, choices.needed = {10: [0], 11: [1], 12: [2]}, {2}
    choices.bytes = {0: 1.0, 1: 10.0, 2: 100.0, 3: 1000.0}
    nothing, middle, everything = (choices.candidate(frozenset(keys)) for keys in ((), (11,), (10, 11, 12)))
    assert nothing == (frozenset(), frozenset({2}), 0.0, 100.0, (), 0.0)
    assert middle == (frozenset({11}), frozenset({1}), 2.0, 10.0, (), 0.0)
    assert everything == (frozenset({10, 11}), frozenset({0}), 3.0, 1.0, (), 0.0)
    choices.inside_readers = {11}
    assert choices.candidate(frozenset({11})) == (frozenset(), frozenset({1}), 0.0, 10.0, (), 0.0)
    assert choices.candidate(frozenset({10, 11})).seconds == 3.0  # it reads what runs again
