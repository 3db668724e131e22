"""Timelines as lanes that are small enough to save with a plan, and as traces for a browser.

A timeline has thousands of kernels. Lanes are coarse enough to see: neighbours of one layer and pass, or of one kind of
collective, are joined where the pause between them is shorter than what a drawing shows. Traces have every kernel;
ui.perfetto.dev and chrome://tracing open them.

Source: Chrome's Trace Event Format, complete events ("X") with times in microseconds.
"""

import json
from collections.abc import Iterable
from os import PathLike

from diffshard.checks.timeline import COMPUTE, Span, Timeline, unroll
from diffshard.files import write_whole
from diffshard.plans.layers import pass_of_scope
from diffshard.plans.timeline import Lane, LaneBar

RESOLUTION = 1 / 1000
"""The shortest pause that is kept, as a share of the step: about a pixel of a page."""
MAX_BARS = 200
"""The most bars of a lane: with more, the resolution of the lane is made coarser."""
_DIGITS = 9  # of seconds: a nanosecond is a thousandth of a kernel's launch
_OF_THE_COMPILER = ("call_exported", "shard_map")  # parts of operations' names that are no modules


def lanes_of(timeline: Timeline) -> tuple[Lane, ...]:
    """Returns the lanes of a timeline, the compute stream's first."""
    by_resource: dict[str, list[LaneBar]] = {COMPUTE: []}
    for span in unroll(timeline.spans):
        bars = by_resource.setdefault(span.resource, [])
        label, kind = _label(span, bars)
        count = 1 if span.repeats is None else span.repeats.times
        bars.append(LaneBar(label, kind, span.start_s, span.end_s, count))
    lanes = []
    for resource, bars in sorted(by_resource.items(), key=lambda item: (item[0] != COMPUTE, item[0])):
        shortest_s = RESOLUTION * timeline.step_s
        few = _join(bars, shortest_s)
        while len(few) > MAX_BARS:
            shortest_s *= 2
            few = _join(few, shortest_s)
        lanes.append(Lane(resource, timeline.busy_s.get(resource, 0.0), tuple(map(_round_times, few))))
    return tuple(lanes)


def _label(span: Span, before: list[LaneBar]) -> tuple[str, str]:
    """Returns the label and kind of a span; a kernel without a name has those of the bar before it."""
    if span.transfer:
        return span.transfer, span.transfer.split(" ")[0]
    if span.repeats is not None:
        return span.name, "trips"
    parts = span.source.split("/")[:-1]  # the last part is the primitive
    parts = [part for part in parts if not part.startswith(("jit(", "pjit(")) and part not in _OF_THE_COMPILER]
    if not span.source and before and before[-1].kind != "trips":
        return before[-1].label, before[-1].kind
    return pass_of_scope("/".join(parts))


def _join(bars: Iterable[LaneBar], shortest_s: float) -> list[LaneBar]:
    """Joins neighbours without a pause between them that have one label, or of which one is too short to be seen."""
    result: list[LaneBar] = []
    for bar in bars:
        last = result[-1] if result else None
        if last is None or bar.start_s - last.end_s >= shortest_s:
            result.append(bar)
            continue
        lengths_s = last.end_s - last.start_s, bar.end_s - bar.start_s
        is_alike = (last.label, last.kind) == (bar.label, bar.kind)
        if not is_alike and min(lengths_s) >= shortest_s:
            result.append(bar)
            continue
        longer = last if lengths_s[0] >= lengths_s[1] else bar
        end_s = max(last.end_s, bar.end_s)
        result[-1] = LaneBar(longer.label, longer.kind, last.start_s, end_s, last.count + bar.count)
    return result


def _round_times(bar: LaneBar) -> LaneBar:
    return LaneBar(bar.label, bar.kind, round(bar.start_s, _DIGITS), round(bar.end_s, _DIGITS), bar.count)


def write_perfetto(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Writes a trace, one row for each resource, with every trip of a loop.

    Raises:
      OSError: the file cannot be written; what was there is as it was.
    """
    rows = {resource: row for row, resource in enumerate(dict.fromkeys([COMPUTE, *sorted(timeline.busy_s)]))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": resource}}
        for resource, row in rows.items()
    ]
    for span in unroll(timeline.spans):
        times = {"ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s)}
        place = {"ph": "X", "pid": 0, "tid": rows[span.resource]}
        events.append({"name": span.name, **place, **times, "args": {"op_name": span.source}})
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
