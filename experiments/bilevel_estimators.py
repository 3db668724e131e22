"""Do predictions rank strategies as training does? Mean slopes beside the measured increases of the loss.

An increase is measured one strategy at a time: all else is exact, training starts anew, and the loss after it is
compared with the exact training of the same seed, on validation and test text (nothing is selected here). The same of a
strategy that is only met, after exact training, shows what a prediction for forward strategies stands for. The
agreement of one half of the seeds with the other says how well anything could do.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments import bilevel_training as task
from experiments.bilevel_searches import Searches
from experiments.tables import print_table
from search_spaces.communication.space import CommunicationSpace


class Strategies(NamedTuple):
    """The lossy strategies of a space, one entry each.

    Attributes:
      group: `[n]` numbers of groups.
      strategy: `[n]` numbers of strategies.
      direction: `[n]` names.
    """

    group: np.ndarray
    strategy: np.ndarray
    direction: np.ndarray


def lossy(space: CommunicationSpace) -> Strategies:
    """Returns all lossy strategies, by group."""
    pairs = [(g, int(s)) for g, group in enumerate(space.groups) for s in np.flatnonzero(~group.exact)]
    groups, strategies = np.array(pairs).T
    return Strategies(
        groups, strategies, np.array([space.operations[space.groups[g].operations[0]].direction for g in groups])
    )


def measure_increases(training: task.Training, which: Strategies, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Measures nats above the exact training, `[seeds, n]`: of training with one strategy, and of meeting it after."""
    exact = tuple(training.space.exact_choice())
    pairs = zip(which.group.tolist(), which.strategy.tolist(), strict=True)
    choices = [(*exact[:group], strategy, *exact[group + 1 :]) for group, strategy in pairs]
    increases_trained, increases_met = np.zeros((2, seeds, len(choices)))
    for seed in range(seeds):
        exact_loss = np.mean(training.losses(seed, exact))
        increases_trained[seed] = [np.mean(training.losses(seed, choice)) - exact_loss for choice in choices]
        increases_met[seed] = [np.mean(losses) - exact_loss for losses in training.losses_after_exact(seed, choices)]
        print(f"seed {seed}: {len(choices)} strategies trained with", flush=True)
    return increases_trained, increases_met


def estimate_increases(searches: Searches, which: Strategies, seeds: int) -> np.ndarray:
    """Returns `[seeds, n]` mean slope of each strategy over the exact one's, in nats."""

    def slopes(seed: int) -> list[float]:
        means = [np.asarray(slope, float) for slope in searches.state_after("curvature", seed).slopes]
        over = [slope - slope[exact] for slope, exact in zip(means, searches.space.exact_choice(), strict=True)]
        return [float(over[g][s]) for g, s in zip(which.group, which.strategy, strict=True)]

    training = searches.training
    stem = f"slopes-{training.setting.name}-curvature-{training.steps}"
    return np.array(
        [task.with_record(training.records, f"{stem}-{seed}", lambda seed=seed: slopes(seed)) for seed in range(seeds)]
    )


def main(setting: task.Setting, *, seeds: int, records: Path | None = None) -> dict[str, np.ndarray]:
    """Prints both tables; returns what was measured, what met, and what was predicted, `[seeds, n]` by name."""
    training = task.Training(setting, records)
    searches = Searches(training, "slow")
    which = lossy(training.space)
    increases_trained, increases_met = measure_increases(training, which, seeds)
    increases = {"measured": increases_trained, "met": increases_met}
    increases["curvature"] = estimate_increases(searches, which, seeds)
    means = {name: values.mean(axis=0) for name, values in increases.items()}
    spread = increases["measured"].std(axis=0, ddof=1) if seeds > 1 else np.full(len(which.group), np.nan)
    print_table(
        f"{setting.name}: nats that one strategy adds, {setting.steps} steps, {seeds} seeds",
        ("operation", "strategy", "trained with", "met", "curvature"),
        [
            (
                training.space.groups[g].name, training.space.strategy_names(g)[s],
                f"{means['measured'][i]:+.4f} ± {spread[i]:.4f}", f"{means['met'][i]:+.4f}",
                f"{means['curvature'][i]:+.2e}",
            )
            for i, (g, s) in enumerate(zip(which.group.tolist(), which.strategy.tolist(), strict=True))
        ],
    )  # fmt: skip
    kinds = {name: which.direction == name for name in dict.fromkeys(which.direction.tolist())}
    kinds["all"] = np.ones(len(which.group), bool)
    rows = [
        (name, *(f"{_rank_correlation(means['measured'][mask], means[name][mask]):+.2f}" for mask in kinds.values()))
        for name in ("curvature", "met")
    ]
    if seeds > 1:
        halves = increases["measured"][::2].mean(axis=0), increases["measured"][1::2].mean(axis=0)
        rows.append(("half the seeds", *(f"{_rank_correlation(*(h[m] for h in halves)):+.2f}" for m in kinds.values())))
    columns = ("against measured", *(f"{name} ({mask.sum()})" for name, mask in kinds.items()))
    print_table("Rank correlation (Spearman) with the increase that training measures", columns, rows)
    return increases


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")  # one that says the same of all ranks nothing
    return float(np.corrcoef(stats.rankdata(a), stats.rankdata(b))[0, 1])
