"""Does the loss's gradient help to choose? Choices of many methods, each trained from the start over paired seeds.

Methods: one precision everywhere; the bilevel search's proposal under each estimator; the same with the slopes of the
curvature shuffled over lossy strategies, and cut, so that A follows the cost alone; a random choice that is no slower
than the curvature's; and what `prove` trains: the winner, the best choice by kind of site, the best that is exact at
first, and on slow links the winner where the slopes are shuffled. A search is one training. Searches see the data's
search part, `prove` the validation part and a seed of its own; verdicts come from the test part.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import diffshard
from cost.evaluation import Evaluator, evaluate
from diffshard.bilevel_search.base import BilevelState, Estimator, TrainingProgress
from diffshard.bilevel_search.search import estimator_names, resolve
from diffshard.solving.solve import solve
from experiments import bilevel_training as task
from experiments.tables import print_table
from search_spaces.base import Batch, Choice, LossySpace, Params, RelaxedChoice
from search_spaces.communication.space import CommunicationSpace

MARGIN = 0.005
"""Nats that a choice may cost and still counts as not inferior; also the bound that searches are given."""
CHOICE_OPTIMIZER = optax.adam(0.1)
_PROOF_SEED = 100  # of no row
_CONTROLLED = "slow"  # the link at which `prove` is also run with shuffled slopes
_MOVES = 500  # until a walk is taken for random


class Run(NamedTuple):
    """What a method returns for one seed: a choice, and the share of training that is exact before it."""

    choice: Choice
    exact_share: float = 0.0


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


def cut(
    space: LossySpace, params: Params, batch: Batch, relaxed: RelaxedChoice, key: jax.Array, progress: TrainingProgress
) -> jax.Array:
    """Estimates no increase, which has no slope: A follows the cost alone."""
    del space, params, batch, relaxed, key, progress
    return jnp.zeros(())


def shuffled(name: str, where: CommunicationSpace, seed: int) -> Estimator:
    """Returns an estimator whose slopes over the exact strategy's are exchanged at random among lossy strategies."""
    inner = resolve(name)
    is_exact = [np.asarray(group.exact) for group in where.groups]
    lossy = np.flatnonzero(~np.concatenate(is_exact))
    order = lossy[np.random.default_rng(seed).permutation(len(lossy))]
    ends = np.cumsum([len(row) for row in is_exact])[:-1]

    def increase(
        space: LossySpace,
        params: Params,
        batch: Batch,
        relaxed: RelaxedChoice,
        key: jax.Array,
        progress: TrainingProgress,
    ) -> jax.Array:
        value, slopes = jax.value_and_grad(lambda p: inner.increase(space, params, batch, p, key, progress))(
            list(relaxed)
        )
        over = jnp.concatenate([slope - slope[int(row.argmax())] for slope, row in zip(slopes, is_exact, strict=True)])
        exchanged = jnp.split(over.at[lossy].set(over[order]), ends)
        moves = [weights - jax.lax.stop_gradient(weights) for weights in relaxed]
        linear = sum((m @ jax.lax.stop_gradient(s) for m, s in zip(moves, exchanged, strict=True)), jnp.zeros(()))
        return jax.lax.stop_gradient(value) + linear

    return inner._replace(increase=increase)


class Searches:
    """Bilevel searches in the space of one link speed, each with training from the start.

    They are named for their estimator, "curvature" say, "curvature shuffled" or "cut".
    """

    def __init__(self, training: task.Training, link: str):
        self.training, self.link = training, link
        self.space = task.space(training.setting, link, training.task)
        self._made: dict[str, diffshard.BilevelSearch] = {}

    def proposals(self, name: str, seeds: int) -> list[Run]:
        """Returns the proposal for each seed, from the records where it is there."""

        def propose(seed: int) -> Choice:
            return self.search(name).finish(self.searched(name, seed))[0].choice

        stem = f"search-{self.training.setting.name}-{self.link}-{name.replace(' ', '-')}-{self.training.steps}"
        records = self.training.records
        return [
            Run(tuple(task.recorded(records, f"{stem}-{seed}", lambda seed=seed: propose(seed))))
            for seed in range(seeds)
        ]

    def search(self, name: str) -> diffshard.BilevelSearch:
        """Returns a search of the cheapest choice within the margin; made and compiled once."""
        if name not in self._made:
            named = name.removesuffix(" shuffled")
            estimator = cut if name == "cut" else named if name == named else shuffled(named, self.space, seed=0)
            self._made[name] = diffshard.bilevel(
                None,
                space=self.space,
                weights_optimizer=self.training.optimizer,
                choice_optimizer=CHOICE_OPTIMIZER,
                max_loss_increase=MARGIN,
                estimator=estimator,
            )
        return self._made[name]

    def searched(self, name: str, seed: int) -> BilevelState:
        """Returns the state after all steps of a seed."""
        search = self.search(name)
        train, validation = (task.listed(self.training.batches(seed, name)) for name in ("train", "search"))
        state = search.init(jax.random.key(seed), self.training.params(seed), train[0])
        for train_batch, val_batch in zip(train, validation, strict=True):
            state, _ = search.update(state, train_batch, val_batch)
        return state

    def proven(self, name: str) -> dict[str, tuple[Run, int]]:
        """Returns what `prove` finds after a search with a seed of its own: runs by method, and steps taken."""
        training = self.training

        def prove() -> dict[str, tuple[Run, int]]:
            rungs = (training.steps // 4, training.steps // 4, training.steps // 2)
            data = diffshard.CandidatesData(
                training.params(_PROOF_SEED),
                task.listed(training.batches(_PROOF_SEED)),
                task.listed(training.task.evaluated("validation")),
                jax.random.key(_PROOF_SEED),
                rungs=rungs,
                num_repeats=training.setting.repeats,
            )
            proof = self.search(name).prove(self.searched(name, _PROOF_SEED), data)
            print(proof, flush=True)
            by_type = [t for t in proof.table if self._is_by_kind(t.choice) and not t.exact_share]
            late = [trained for trained in proof.table if trained.exact_share]
            first = {"winner": [proof.winner], "best by kind": by_type, "best exact first": late}
            return {
                method: (Run(trained[0].choice, trained[0].exact_share), proof.steps + training.steps)
                for method, trained in first.items()
                if trained
            }

        stem = f"proof-{training.setting.name}-{self.link}-{name.replace(' ', '-')}-{training.steps}"
        proven = task.recorded(training.records, stem, prove)
        return {method: (Run(tuple(run[0]), run[1]), steps) for method, (run, steps) in proven.items()}

    def _is_by_kind(self, choice: Choice) -> bool:
        """Tells whether all groups that choose from the same names take the same one."""
        taken: dict[tuple[str, ...], int] = {}
        return all(taken.setdefault(self.space.strategy_names(g), s) == s for g, s in enumerate(choice))

    def seconds(self, run: Run) -> float:
        """Returns mean communication of a step over the whole training."""
        exact, chosen = (
            evaluate(self.space.problem, choice).cost for choice in (self.space.exact_choice(), run.choice)
        )
        return run.exact_share * exact + (1 - run.exact_share) * chosen


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
        moved = evaluator(choice).cost
        if moved > most_s * (1 + 1e-9):
            choice[group] = before
        elif moved >= 0.9 * most_s and move >= _MOVES:
            return tuple(choice)
        else:
            slowest = max(slowest, (moved, tuple(choice)))
    return slowest[1]


def results_at(link: str, training: task.Training, seeds: int, estimators: Sequence[str]) -> list[MethodResult]:
    """Runs all methods at one link speed; prints each as it is done."""
    searches, search_steps = Searches(training, link), training.steps
    rows: list[MethodResult] = []

    def add(method: str, runs: Sequence[Run], steps: int) -> None:
        rows.append(_row(searches, method, runs, steps))
        print(" | ".join(_cells(rows[-1], searches.space)), flush=True)

    for name in training.setting.uniform:
        add(f"uniform {name}", [Run(task.uniform(searches.space, name))] * seeds, 0)
    add("A, loss gradient cut", searches.proposals("cut", 1) * seeds, search_steps)  # no seed changes the cost
    for name in estimators:
        proposed = searches.proposals(name, seeds)
        add(f"A, {name}", proposed, search_steps)
        if name == "curvature":
            drawn = [Run(random_within(searches.space, searches.seconds(run), s)) for s, run in enumerate(proposed)]
            add("random, same time", drawn, 0)
            shuffled_runs = searches.proposals(f"{name} shuffled", seeds)
            add(f"A, {name} shuffled", shuffled_runs, search_steps)
    for method, (run, steps) in searches.proven("curvature").items():
        add(f"prove: {method}", [run] * seeds, steps)
    if link == _CONTROLLED:  # how far does training candidates come without what the loss's slopes say of them?
        run, steps = searches.proven("curvature shuffled")["winner"]
        add("prove, slopes shuffled: winner", [run] * seeds, steps)
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
    estimators: Sequence[str] = estimator_names(),
) -> list[MethodResult]:
    """Prints a table for each link speed; returns their rows."""
    training = task.Training(setting, records)
    rows: list[MethodResult] = []
    for link in links:
        results = results_at(link, training, seeds, estimators)
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
        task.described(space, first.choice) + late + differ,
    )  # fmt: skip


def _spread(differences: np.ndarray) -> str:
    deviation = differences.std(ddof=1) if len(differences) > 1 else float("nan")
    return f"{differences.mean():+.4f} ± {deviation:.4f}"
