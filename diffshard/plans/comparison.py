"""Plans of one function, each with its predictions and with what XLA compiled it to: as data, as a table, as a page."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost.real_numbers import Amount, Count
from diffshard.plans.page_elements import COLOURS, COMPUTE, Paged, cards, document, escape, plain_bar, table
from diffshard.plans.printing import format_bytes, format_devices, format_s, format_table, short_name, wrapped
from diffshard.plans.timeline import Lane, lane_elements

_COLUMNS = (
    ("", "", "step", "", "sent", "", "peak", ""),
    ("plan", "executor", "predicted", "timeline", "predicted", "compiled", "predicted", "compiled"),
)
# Each column says what it is, because on a narrow screen it stands alone.
_COLUMN_TITLES = (
    "plan", "executor", "step: predicted", "step: timeline", "sent: predicted", "sent: compiled", "peak: predicted",
    "peak: compiled",
)  # fmt: skip
_QUANTITIES = range(2, len(_COLUMN_TITLES))
_UNKNOWN = "-"


@dataclass(frozen=True)
class ComparedPlan:
    """A plan's predictions beside what XLA compiled it to; a field is None where the compiler gave nothing.

    Attributes:
      name: of the plan.
      executor: how it was compiled: "constraints", "program" or "propagation".
      predicted_s: seconds of one step by the cost model.
      timeline_s: seconds of one step by the timeline of the compiled program.
      computing_s: seconds in which kernels run; the rest of `timeline_s` waits for communication.
      predicted_sent_bytes, compiled_sent_bytes: what one device sends in a step.
      predicted_peak_bytes, compiled_peak_bytes: peak memory of one device.
      fits: whether `compiled_peak_bytes` is within the plan's memory limit; true where it is not known.
      notes: what a reader should know, such as why it was not compiled.
      lanes: when the timeline does what; empty where there is no timeline.
    """

    name: str
    executor: str
    predicted_s: Amount
    timeline_s: Amount | None
    computing_s: Amount | None
    predicted_sent_bytes: Amount
    compiled_sent_bytes: Amount | None
    predicted_peak_bytes: Amount
    compiled_peak_bytes: Amount | None
    fits: bool = True
    notes: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()


@dataclass(frozen=True)
class Comparison(Paged):
    """Plans of one function beside the programs that XLA makes of them; `print` shows a table.

    Attributes:
      function: the function's name.
      mesh_axes: devices along each mesh axis, in order.
      target: the name of what was compiled for.
      rows: one for each plan and executor.
      notes: what holds for the whole table, such as plans that were left out.
    """

    function: str
    mesh_axes: Mapping[str, Count]
    target: str
    rows: tuple[ComparedPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ComparedPlan | None:
        """The row with the shortest timeline among those that fit the memory; None where no timeline is known."""
        timed = [row for row in self.rows if row.timeline_s is not None and row.fits]
        return min(timed, key=lambda row: row.timeline_s or 0.0, default=None)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes of the rows, each with its plan's name, and those of the table."""
        own = [f"{row.name}, {row.executor}: {note}" for row in self.rows for note in row.notes]
        return (*own, *self.notes)

    def __str__(self) -> str:
        cells = (*_COLUMNS, *(_cells(row, self.best) for row in self.rows))
        lines = [*wrapped(_title(self)), "", *format_table(cells, "  ", right=_QUANTITIES, wrap=(0,))]
        notes = [line for note in self.all_notes for line in wrapped(note, "  ", "    ")]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def html(self) -> str:
        """Returns the comparison as a self-contained page for a browser."""
        return document(_title(self), [f"<h1>{escape(_title(self))}</h1>", *page_elements(self)])


def page_elements(comparison: Comparison) -> list[str]:
    """Returns a comparison as elements of a page: its best plan, a bar for each timeline, the table, the notes."""
    best = comparison.best
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.all_notes)
    return [
        _cards(best) if best else "",
        _bars(comparison),
        _lanes(comparison),
        "<h3>Predicted and compiled</h3>",
        table(_COLUMN_TITLES, (_cells(row, best) for row in comparison.rows), right=_QUANTITIES),
        f"<ul>{notes}</ul>" if notes else "",
    ]


def _title(comparison: Comparison) -> str:
    devices = format_devices(comparison.mesh_axes)
    return f"{short_name(comparison.function)} on {devices}, compiled for {comparison.target}"


def _cells(row: ComparedPlan, best: ComparedPlan | None) -> tuple[str, ...]:
    return (
        f"{row.name} (best)" if row is best else row.name,
        row.executor,
        _shown(row.predicted_s, format_s),
        _shown(row.timeline_s, format_s),
        _shown(row.predicted_sent_bytes, format_bytes),
        _shown(row.compiled_sent_bytes, format_bytes),
        _shown(row.predicted_peak_bytes, format_bytes),
        _shown(row.compiled_peak_bytes, format_bytes),
    )


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None or math.isnan(value) else text(value)


def _cards(best: ComparedPlan) -> str:
    pairs = [(_shown(best.timeline_s, format_s), f"timeline of the best, {best.name} by {best.executor}")]
    pairs.append((_shown(best.predicted_s, format_s), "predicted for it"))
    pairs.append((_shown(best.compiled_peak_bytes, format_bytes), "its compiled peak memory of a device"))
    return cards(*pairs)


def _bars(comparison: Comparison) -> str:
    """Draws each timeline to one scale: how long kernels run, and how long they wait."""
    timed = [row for row in comparison.rows if row.timeline_s is not None]
    whole = max((row.timeline_s or 0.0 for row in timed), default=0.0)
    bars = []
    for row in sorted(timed, key=lambda row: row.timeline_s or 0.0):
        step_s, computing_s = row.timeline_s or 0.0, row.computing_s or 0.0
        name = f"{escape(row.name)}, {escape(row.executor)}"
        bars.append(f"<div style='margin:10px 0 3px'>{name} <span class=dim>{format_s(step_s)}</span></div>")
        waiting_s = max(step_s - computing_s, 0.0)
        pieces = [("computing", computing_s, format_s(computing_s), COMPUTE)]
        pieces.append(("waiting for communication", waiting_s, format_s(waiting_s), COLOURS[0]))
        bars.append(plain_bar(pieces, whole))
    if not bars:
        return ""
    key = (
        f'<div class=key><span><i style="background:{COMPUTE}"></i>computing</span>'
        f'<span><i style="background:{COLOURS[0]}"></i>waiting for communication</span></div>'
    )
    return f"<h3>Timelines</h3>{''.join(bars)}{key}"


def _lanes(comparison: Comparison) -> str:
    """Draws what runs when: in the best program, and in each other one behind a line that opens."""
    best = comparison.best
    if best is None:
        return ""
    drawings = [
        f"<h3>What runs when in the best, {_whose(best)}</h3>{lane_elements(best.lanes, best.timeline_s or 0.0)}"
    ]
    for row in comparison.rows:
        if row is not best and row.lanes:
            drawing = lane_elements(row.lanes, row.timeline_s or 0.0)
            drawings.append(f"<details><summary>What runs when in {_whose(row)}</summary>{drawing}</details>")
    return "".join(drawings) if best.lanes else ""


def _whose(row: ComparedPlan) -> str:
    return f"{escape(row.name)} by {escape(row.executor)}, {format_s(row.timeline_s or 0.0)}"
