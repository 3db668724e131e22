"""When a plan's program is predicted to compute and to wait, as the plan says and draws it.

A timeline is drawn as lanes: one for the compute stream, one for each class of links.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cost.real_numbers import Amount, Index
from diffshard.plans.page_elements import COLOURS, escape, text_in
from diffshard.plans.printing import format_count, format_percent, format_s

_PASSES = {"forward": "var(--fill0)", "backward": "var(--fill1)", "update": "var(--fill3)"}
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute", "copy", "other")
_COLOURS = _PASSES | {kind: COLOURS[i] for i, kind in enumerate(_KINDS)} | {"trips": "var(--other)"}
_LEAST_WITH_EDGE = 0.6  # percent of the width from which on a bar is parted from the next by a line


@dataclass(frozen=True)
class LaneBar:
    """A time in which a resource is busy with one thing, but for pauses too short to be seen.

    Attributes:
      label: a layer of the function, or a kind of collective with its mesh axes.
      kind: "forward", "backward" or "update" for kernels; the kind of a collective; "copy" for copies to the host and
        back; "trips" for many trips of a loop together; "other" for everything else.
    """

    label: str
    kind: str
    start_s: Amount
    end_s: Amount
    count: Index


@dataclass(frozen=True)
class Lane:
    """The work of one resource in a step.

    Attributes:
      resource: the compute stream or a class of links.
      busy_s: seconds in which it is busy.
      bars: when, in order of time.
    """

    resource: str
    busy_s: Amount
    bars: tuple[LaneBar, ...]


def lane_elements(lanes: Sequence[Lane], step_s: float) -> str:
    """Returns a drawing of lanes below each other, to the scale of the step, with a key of the colours.

    Args:
      step_s: seconds of its step, the width of the drawing.
    """
    rows = []
    for lane in lanes:
        share = f"{lane.busy_s / (step_s or 1.0):.0%} of the step"
        title = f"{escape(lane.resource)} <span class=dim>busy {format_s(lane.busy_s)}, {share}</span>"
        bars = "".join(_bar(bar, step_s) for bar in lane.bars)
        rows.append(f"<div class=title>{title}</div><div class=lane>{bars}</div>")
    kinds = dict.fromkeys(bar.kind for lane in lanes for bar in lane.bars)
    key = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>' for kind in _COLOURS if kind in kinds
    )
    ends = f"<div class=ends><span>0 s</span><span>{format_s(step_s)}</span></div>"
    return f"<div class=lanes>{''.join(rows)}</div>{ends}<div class=key>{key}</div>"


def _bar(bar: LaneBar, step_s: float) -> str:
    left, width = (100 * seconds / (step_s or 1.0) for seconds in (bar.start_s, bar.end_s - bar.start_s))
    noun = "trip" if bar.kind == "trips" else "kernel" if bar.kind in _PASSES else "transfer"
    duration = format_s(bar.end_s - bar.start_s)
    title = f"{bar.label}, {bar.kind}: {format_count(bar.count, noun)}, {duration} from {format_s(bar.start_s)}"
    edge = ";box-shadow:inset -1px 0 var(--card)" if width >= _LEAST_WITH_EDGE else ""
    text = text_in(width, bar.label.split("/")[-1])
    style = f"left:{left:.2f}%;width:{width:.2f}%;background:{_COLOURS.get(bar.kind, _COLOURS['other'])}{edge}"
    return f'<div style="{style}" title="{escape(title)}">{text}</div>'


MOST_SHOWN = 5
"""Waits that a text lists, the longest first."""

_SAME = 0.05
"""The relative difference from the predicted step above which a page explains it; less is nearly equal digits."""


@dataclass(frozen=True)
class PredictedWait:
    """A time in which arithmetic waits for a collective.

    Attributes:
      kind: of the collective.
      axes: the mesh axes over which it goes.
      seconds: in one step.
      made_by: index into `PlanData.operations` of the operation, or argument, whose result it moves.
      read_by: index of the operation that waits for it; None at a barrier between two windows and at the step's end.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: Amount
    made_by: Index
    read_by: Index | None = None


@dataclass(frozen=True)
class PredictedTimeline:
    """A step of a plan as an explicit program, played on one stream for arithmetic and one for each kind of link.

    Attributes:
      seconds: until all streams have ended.
      lower_bound_s: no plan in the search space has a shorter timeline, because none computes for less.
      busy_s: seconds of work on each stream.
      waits: what arithmetic waits for, the longest first; those below a thousandth of `seconds` are left out.
      lanes: when each stream does what.
    """

    seconds: Amount
    lower_bound_s: Amount
    busy_s: Mapping[str, Amount]
    waits: tuple[PredictedWait, ...]
    lanes: tuple[Lane, ...] = ()

    @property
    def computing_s(self) -> float:
        """Seconds of arithmetic; the rest of `seconds` waits for links."""
        return self.lanes[0].busy_s if self.lanes else 0.0

    @property
    def gap(self) -> float:
        """How much shorter another plan's timeline can be at most, relative to this one."""
        return (self.seconds - self.lower_bound_s) / self.seconds if self.seconds else 0.0


def timeline_words(timeline: PredictedTimeline) -> str:
    """Returns a timeline in a sentence, as `40.1 ms as a program: computing 35.0 ms, waiting 5.1 ms for links; ...`."""
    waiting_s = timeline.seconds - timeline.computing_s
    return (
        f"{format_s(timeline.seconds)} as a program: computing {format_s(timeline.computing_s)}, waiting "
        f"{format_s(waiting_s)} for links; no plan computes for less than {format_s(timeline.lower_bound_s)}, gap "
        f"{format_percent(timeline.gap)}"
    )


def wait_rows(timeline: PredictedTimeline, name_of: Callable[[int], str]) -> list[tuple[str, str, str, str, str]]:
    """Returns rows of the longest waits: kind, axes, seconds, what is moved, what waits for it.

    Args:
      timeline: of a plan.
      name_of: gives the name of an operation of the plan by its index.
    """
    return [
        (
            w.kind,
            "+".join(w.axes),
            format_s(w.seconds),
            f"of {name_of(w.made_by)}",
            "before the next window" if w.read_by is None else f"before {name_of(w.read_by)}",
        )
        for w in timeline.waits[:MOST_SHOWN]
    ]


def timeline_elements(timeline: PredictedTimeline, step_s: float, exposed_share: float) -> str:
    """Returns a timeline as elements of a page: the sentence, why it is not the predicted step, and what runs when."""
    words = f"<div class=dim>{escape(timeline_words(timeline))}</div>"
    if abs(timeline.seconds - step_s) > _SAME * step_s:
        words += (
            f"<div class=dim>The predicted step, {escape(format_s(step_s))}, is what the search makes small: it waits "
            f"for {format_percent(exposed_share)} of the collectives that can overlap with arithmetic, as models of "
            "many layers do. The program waits for those beside which there is too little arithmetic.</div>"
        )
    return f"<h3>What runs when</h3>{words}{lane_elements(timeline.lanes, timeline.seconds)}"
