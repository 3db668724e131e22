"""When a compiled step does what, as lanes: one for the compute stream, one for each class of links."""

from collections.abc import Sequence
from dataclasses import dataclass

from cost.number_ranges import Amount, Index
from diffshard.plans.drawings import text_in
from diffshard.plans.formats import format_count, format_s
from diffshard.plans.page_elements import COLOURS, escape

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
    """What one resource does in a step.

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
