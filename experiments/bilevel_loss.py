"""Does the loss's gradient help to choose? Choices of many methods, each trained from the start over paired seeds.

Methods: one precision everywhere; the bilevel search's proposal under each estimator; the same with the slopes of the
curvature shuffled over lossy strategies, and cut, so that A follows the cost alone; a random choice that is no slower
than the curvature's; and what `validate` trains: the winner, the best choice by kind of operation, the best that is
exact at first, and on slow links the winner where the slopes are shuffled. A search is one training. Searches see the
data's search part, `validate` the validation part and a seed of its own; verdicts come from the test part.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from cost.evaluation import Evaluator, evaluate
from diffshard.solving.solve import solve
from experiments import bilevel_training as task
from experiments.bilevel_searches import MARGIN, Run, Searches
from experiments.tables import print_table
from search_spaces.base import Choice
from search_spaces.communication.space import CommunicationSpace

_CONTROLLED = "slow"  # the link at which `validate` is also run with shuffled slopes
_MOVES = 500  # until a walk is taken for random


class MethodResult(NamedTuple):
    """A method at a link speed.

    Attributes:
      link: of `BYTES_PER_S`.
      method: for people.
      runs: for each seed.
      milliseconds: mean communication in a step, encoding included.
      validation: `[seeds]` loss less the exact training's of the same seed, in nats.
      test: `[seeds]` the same on the test part.
      search_steps: of training that choosing took, for one seed.
    """

    link: str
    method: str
    runs: tuple[Run, ...]
    milliseconds: float
    validation: np.ndarray
    test: np.ndarray
    search_steps: int


def random_within(space: CommunicationSpace, most_s: float, seed: int) -> Choice:
    """Returns a random choice that takes at most so long, and 90% of it at least where the walk meets one.

    A walk from the cheapest choice that exchanges one group's strategy at a time and stays within the time, so that it
    is at every such choice equally often.

    Raises:
      ValueError: even the cheapest choice takes longer.
    """
    rng, problem = np.random.default_rng(seed), space.problem
    evaluator, choice = Evaluator(problem), [int(s) for s in solve(problem).choice]
    seconds = evaluator(choice).cost
    if seconds > most_s * (1 + 1e-9):
        raise ValueError(f"`most_s` is {most_s:.3g} s, but the cheapest choice takes {seconds:.3g} s; allow more.")
    slowest = seconds, tuple(choice)
    for move in range(2 * _MOVES):
        group = int(rng.integers(len(choice)))
        before, choice[group] = choice[group], int(rng.integers(len(problem.node_cost[group])))
        cost_after = evaluator(choice).cost
        if cost_after > most_s * (1 + 1e-9):
            choice[group] = before
        elif cost_after >= 0.9 * most_s and move >= _MOVES:
            return tuple(choice)
        else:
            slowest = max(slowest, (cost_after, tuple(choice)))
    return slowest[1]


def results_at(link: str, training: task.Training, seeds: int) -> list[MethodResult]:
    """Runs all methods at one link speed; prints each as it is done."""
    searches, search_steps = Searches(training, link), training.steps
    rows: list[MethodResult] = []

    def add(method: str, runs: Sequence[Run], steps: int) -> None:
        rows.append(_row(searches, method, runs, steps))
        print(" | ".join(_cells(rows[-1], searches.space)), flush=True)

    for name in training.setting.uniform:
        add(f"uniform {name}", [Run(task.uniform(searches.space, name))] * seeds, 0)
    add("A, loss gradient cut", searches.proposals("cut", 1) * seeds, search_steps)  # no seed changes the cost
    proposals = searches.proposals("curvature", seeds)
    add("A, curvature", proposals, search_steps)
    random_runs = [Run(random_within(searches.space, searches.seconds(run), s)) for s, run in enumerate(proposals)]
    add("random, same time", random_runs, 0)
    add("A, curvature shuffled", searches.proposals("curvature shuffled", seeds), search_steps)
    for method, (run, steps) in searches.validate("curvature").items():
        add(f"runs: {method}", [run] * seeds, steps)
    if link == _CONTROLLED:  # how far does training candidates come without what the loss's slopes say of them?
        run, steps = searches.validate("curvature shuffled")["winner"]
        add("runs, slopes shuffled: winner", [run] * seeds, steps)
    return rows


def verdict(differences: np.ndarray) -> str:
    """Tells whether the mean is at most `MARGIN`, by a one-sided t interval of 95% over seeds, either way or open."""
    count = len(differences)
    if not differences.any():
        return "yes"
    if count < 2:
        return "open"
    half = stats.t.ppf(0.95, count - 1) * differences.std(ddof=1) / count**0.5
    mean = differences.mean()
    return "yes" if mean + half <= MARGIN else "no" if mean - half > MARGIN else "open"


def main(
    setting: task.Setting,
    links: Sequence[str],
    *,
    seeds: int,
    records: Path | None = None,
) -> list[MethodResult]:
    """Prints a table for each link speed; returns their rows."""
    training = task.Training(setting, records)
    rows: list[MethodResult] = []
    for link in links:
        results = results_at(link, training, seeds)
        exact = [training.losses(seed, results[0].runs[seed].choice).test for seed in range(seeds)]
        title = (
            f"{setting.name}, {link} links ({task.BYTES_PER_S[link] / 1e9:g} GB/s): {setting.steps} steps, {seeds} "
            f"seeds; exact test loss {np.mean(exact):.3f} ± {np.std(exact):.3f} nats; differences to it with "
            f"standard deviation"
        )
        space = task.space(setting, link, training.task)
        columns = ("method", "ms", "of exact", "validation", "test", f"≤ {MARGIN}?", "search steps", "first choice")
        print_table(title, columns, [_cells(row, space)[1:] for row in results])
        rows += results
    return rows


def _row(searches: Searches, method: str, runs: Sequence[Run], steps: int) -> MethodResult:
    training, exact = searches.training, tuple(searches.space.exact_choice())
    losses = np.array([training.losses(seed, *run) for seed, run in enumerate(runs)])
    differences = losses - np.array([training.losses(seed, exact) for seed in range(len(runs))])
    milliseconds = 1e3 * float(np.mean([searches.seconds(run) for run in runs]))
    return MethodResult(searches.link, method, tuple(runs), milliseconds, differences[:, 0], differences[:, 1], steps)


def _cells(row: MethodResult, space: CommunicationSpace) -> tuple[str, ...]:
    exact = 1e3 * evaluate(space.problem, space.exact_choice()).cost
    first = row.runs[0]
    late = f", from {first.exact_share:.0%} on" if first.exact_share else ""
    distinct = len(set(row.runs))
    differ = f" ({distinct} differ)" if distinct > 1 else ""
    return (
        row.link, row.method, f"{row.milliseconds:.3f}", f"{row.milliseconds / exact:.0%}", _spread(row.validation),
        _spread(row.test), verdict(row.test), str(row.search_steps),
        task.describe(space, first.choice) + late + differ,
    )  # fmt: skip


def _spread(differences: np.ndarray) -> str:
    deviation = differences.std(ddof=1) if len(differences) > 1 else float("nan")
    return f"{differences.mean():+.4f} ± {deviation:.4f}"
