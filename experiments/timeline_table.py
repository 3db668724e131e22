"""The table of `experiments.timeline`: rows in a file, one JSON document a line, and what they say together.

    python -m experiments.timeline_table [docs/measured/timeline_rows.jsonl]

prints, for each setting in a file, the found plan beside the best of all compiled baselines; and for the models on
which things were tuned and those that were held out, how many settings are where.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffshard.checks.timeline import COMPUTE
from diffshard.checks.verify import format_error, relative_error
from experiments.tables import print_table
from experiments.timeline_models import CASES

FOUND = "found"
# Waits below this are left out of the table, whose times have one digit of a millisecond.
SHORT_WAIT_S = 5e-5
ROWS = Path("docs/measured/timeline_rows.jsonl")
NEAR_STEP, NEAR_WAIT, LONGEST_WAITS = 0.05, 0.25, 5
"""Relative errors within which a predicted step and a predicted wait count as near, and how many waits of a row do."""


@dataclass(frozen=True)
class Row:
    """A plan with what its compiled program does.

    Attributes:
      model, mesh, batch: what was planned for: a name, a text such as "4x8", and rows of the batch.
      plan: `FOUND`, or the baseline's name.
      executor: how the program was made.
      predicted_s: of a step; NaN where no plan has the baseline's shardings and fits the memory.
      timeline_s: of the compiled program played back.
      busy_s: seconds by resource.
      waited_s: seconds that the compute stream waits, by kind and axes of the collective.
      sent_bytes: by a device in a step, predicted and compiled.
      peak_bytes: of a device, predicted and compiled; nothing where the compiler does not say.
      collectives: bytes by kind and axis, as predicted, by Shardy and by XLA.
      notes: of the timeline.
      search_s, compile_s: how long they took.
      played_s: of a step by the plan's own timeline, which is played without compiling; None where it has none.
      played_waits_s: seconds that arithmetic waits in that timeline, by kind and axes of the collective.
    """

    model: str
    mesh: str
    batch: int
    plan: str
    executor: str
    predicted_s: float
    timeline_s: float
    busy_s: Mapping[str, float]
    waited_s: Mapping[str, float]
    sent_bytes: Sequence[float]
    peak_bytes: Sequence[float]
    collectives: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    search_s: float
    compile_s: float
    played_s: float | None = None
    played_waits_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The key that tells this row from others."""
        return self.model, self.mesh, self.batch, self.plan


def append_row(row: Row, path: Path) -> None:
    """Adds a row to a file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file; a file that is not there has none."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def over_best_baseline(rows: Sequence[Row]) -> float:
    """Returns the found plan's time over the best baseline's; NaN without both."""
    found_s = [row.timeline_s for row in rows if row.plan == FOUND]
    return found_s[0] / best_baseline_s(rows) if found_s else float("nan")


def best_baseline_s(rows: Iterable[Row]) -> float:
    """Returns the shortest time of a baseline's plan; NaN without one."""
    return min((row.timeline_s for row in rows if row.plan != FOUND), default=float("nan"))


def ranking(rows: Sequence[Row]) -> float:
    """Returns Kendall's tau of predicted and simulated times; NaN below two plans with a prediction."""
    pairs = [(row.predicted_s, row.timeline_s) for row in rows if np.isfinite(row.predicted_s)]
    if len(pairs) < 2:
        return float("nan")
    predicted_order, timeline_order = (np.sign(np.subtract.outer(times, times)) for times in zip(*pairs, strict=True))
    return float(np.sum(predicted_order * timeline_order) / (len(pairs) * (len(pairs) - 1)))


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of those values that are numbers; NaN without one."""
    numbers = [value for value in values if np.isfinite(value)]
    return float(np.exp(np.mean(np.log(numbers)))) if numbers else float("nan")


COLUMNS = (
    "plan", "timeline ms", "over best", "predicted", "error", "played", "error", "computing", "waits, ms", "played",
    "sent GB: predicted", "compiled", "error", "peak GiB: predicted", "compiled", "error", "planning s",
)  # fmt: skip


def cells(row: Row, best_s: float = float("nan")) -> tuple[str, ...]:
    """Formats a row, given the best baseline's time."""
    played = ("", "")
    if row.played_s is not None:
        played = f"{1e3 * row.played_s:.1f}", format_error(relative_error(row.played_s, row.timeline_s), 0)
    return (
        row.plan,
        f"{1e3 * row.timeline_s:.1f}",
        f"{row.timeline_s / best_s:.2f}" if np.isfinite(best_s) else "",
        f"{1e3 * row.predicted_s:.1f}",
        format_error(relative_error(row.predicted_s, row.timeline_s), 0),
        *played,
        f"{1e3 * row.busy_s.get(COMPUTE, 0.0):.1f}",
        _in_words(row.waited_s),
        _in_words(row.played_waits_s),
        *_compared(row.sent_bytes, 1e9, "{:.2f}"),
        *_compared(row.peak_bytes, 2**30, "{:.1f}"),
        f"{row.search_s:.0f}",
    )


def _compared(values: Sequence[float], unit: float, form: str) -> tuple[str, str, str]:
    if not values:
        return "", "", ""
    predicted, compiled = values
    error = format_error(relative_error(predicted, compiled), 0)
    return form.format(predicted / unit), form.format(compiled / unit), error


def _in_words(waits_s: Mapping[str, float]) -> str:
    """Returns milliseconds that arithmetic waits for each kind of collective, the longest first."""
    total: dict[str, float] = {}
    for reason, seconds in waits_s.items():
        kind = reason.split(" ")[0]
        total[kind] = total.get(kind, 0.0) + seconds
    longest_first = sorted(total.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {1e3 * s:.1f}" for kind, s in longest_first if s >= SHORT_WAIT_S)


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows of each model, mesh and batch, in the order in which these appear."""
    settings: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        settings.setdefault(row.key[:3], []).append(row)
    return list(settings.values())


def print_rows(rows: Sequence[Row], heading: str) -> None:
    """Prints a table for each model and mesh, then the found plans over the best baselines'."""
    settings = by_setting(rows)
    for group in settings:
        model, mesh, batch = group[0].key[:3]
        best_s = best_baseline_s(group)
        print_table(f"{model}, {mesh}, batch {batch}, {heading}", COLUMNS, (cells(row, best_s) for row in group))
    for group in settings:
        model, mesh, _ = group[0].key[:3]
        print(
            f"{model} {mesh}: found / best baseline {over_best_baseline(group):.3f}, "
            f"Kendall's tau of the prediction {ranking(group):.2f}"
        )
    mean = geometric_mean(map(over_best_baseline, settings))
    print(f"geometric mean of found / best baseline over {len(settings)} settings: {mean:.3f}")


def near_waits(row: Row) -> tuple[int, int]:
    """Returns how many of a row's longest compiled waits are near those of the plan's timeline, and how many there are.

    Waits are those of one kind of collective over the same axes.
    """
    longest = sorted(row.waited_s.items(), key=lambda wait: -wait[1])[:LONGEST_WAITS]
    errors = [abs(row.played_waits_s.get(reason, 0.0) - s) / s for reason, s in longest if s >= SHORT_WAIT_S]
    return sum(error <= NEAR_WAIT for error in errors), len(errors)


def summary(settings: Sequence[Sequence[Row]]) -> tuple[str, ...]:
    """Returns in words what settings with a found row say together, without a name; see `SUMMARY_COLUMNS`."""
    ratios = np.array([over_best_baseline(rows) for rows in settings])
    found = [row for rows in settings for row in rows if row.plan == FOUND]
    played = [row for row in found if row.played_s is not None]
    steps = [(row.predicted_s, row.timeline_s) for row in found]
    played_steps = [(row.played_s, row.timeline_s) for row in played if row.played_s is not None]
    near, longest = np.sum([near_waits(row) for row in played] or [(0, 0)], axis=0)
    near_steps = [
        f"{sum(abs(own - s) <= NEAR_STEP * s for own, s in pairs)} of {len(pairs)}" for pairs in (steps, played_steps)
    ]
    above = f"{np.sum(ratios > 1)} of {np.sum(np.isfinite(ratios))}"
    return f"{geometric_mean(ratios):.3f}", above, f"{np.nanmax(ratios):.3f}", *near_steps, f"{near} of {longest}"


SUMMARY_COLUMNS = (
    "settings", "found / best baseline", "above 1", "largest", "sum within 5%", "played within 5%", "waits within 25%"
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables of a file of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROWS, help="of rows, as `experiments.timeline` adds them")
    parser.add_argument("--baselines", nargs="+", help="the plans by hand that count, such as fsdp; without it all do")
    options = parser.parse_args(argv)
    known = read_rows(options.file)
    settings = by_setting(row for row in known if not options.baselines or row.plan in (FOUND, *options.baselines))
    if not settings:
        parser.error("the file has no rows.")
    rows = []
    for group in settings:
        by_hand = [row for row in group if row.plan != FOUND]
        best = min(by_hand, key=lambda row: row.timeline_s, default=None)
        found = [f"{1e3 * row.timeline_s:.1f}" for row in group if row.plan == FOUND]
        baseline = (best.plan, f"{1e3 * best.timeline_s:.1f}") if best else ("", "")
        rows.append((f"{group[0].model}, {group[0].mesh}", *(found or [""]), *baseline,
                     f"{over_best_baseline(group):.3f}", len(by_hand)))  # fmt: skip
    columns = ("setting", "found, ms", "best baseline", "ms", "found / best", "baselines")
    print_table("Found plans beside the best baselines", columns, rows)
    held_out = [rows for rows in settings if CASES[rows[0].model].is_held_out]
    tuned = [rows for rows in settings if rows not in held_out]
    parts = (("tuned", tuned), ("held out", held_out), ("all", settings))
    print_table(
        "Found plans, and predictions of their compiled programs",
        SUMMARY_COLUMNS,
        [(f"{name}, {len(part)}", *summary(part)) for name, part in parts if part],
    )


if __name__ == "__main__":
    main()
