"""The table of `experiments.timeline`: rows in a file, one JSON document a line, and what they say together."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from diffshard.checks.spans import COMPUTE
from diffshard.checks.verify import format_error, relative_error
from experiments.tables import print_table

FOUND = "found"
# Waits below this are left out of the table, whose times have one digit of a millisecond.
SHORT_WAIT_S = 5e-5


@dataclass(frozen=True)
class Row:
    """A plan with what its compiled program does.

    Attributes:
      model, mesh, batch: what was planned for: a name, a text such as "4x8", and rows of the batch.
      plan: `FOUND`, or the expert's name.
      executor: how the program was made.
      predicted_s: of a step; NaN where no plan has the expert's shardings and fits the memory.
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
        """What tells this row from others."""
        return self.model, self.mesh, self.batch, self.plan


def append_row(row: Row, path: Path) -> None:
    """Adds a row to a file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file; a file that is not there has none."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def over_best_expert(rows: Sequence[Row]) -> float:
    """Returns the found plan's time over the best expert's; NaN without both."""
    found_s = [row.timeline_s for row in rows if row.plan == FOUND]
    return found_s[0] / best_expert_s(rows) if found_s else float("nan")


def best_expert_s(rows: Iterable[Row]) -> float:
    """Returns the shortest time of an expert's plan; NaN without one."""
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
    """Formats a row, given the best expert's time."""
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


def print_rows(rows: Sequence[Row], heading: str) -> None:
    """Prints a table for each model and mesh, then the found plans over the best experts'."""
    settings = [(key, list(group)) for key, group in groupby(rows, lambda row: row.key[:3])]
    for (model, mesh, batch), group in settings:
        best_s = best_expert_s(group)
        print_table(f"{model}, {mesh}, batch {batch}, {heading}", COLUMNS, (cells(row, best_s) for row in group))
    for (model, mesh, _), group in settings:
        print(
            f"{model} {mesh}: found / best expert {over_best_expert(group):.3f}, "
            f"Kendall's tau of the prediction {ranking(group):.2f}"
        )
    mean = geometric_mean(over_best_expert(group) for _, group in settings)
    print(f"geometric mean of found / best expert over {len(settings)} settings: {mean:.3f}")
