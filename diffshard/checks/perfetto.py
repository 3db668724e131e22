"""Timelines as traces that ui.perfetto.dev and chrome://tracing open.

Source: Chrome's Trace Event Format, complete events ("X") with times in microseconds.
"""

import json
from os import PathLike

from diffshard.checks.spans import COMPUTE, unroll
from diffshard.checks.timeline import Timeline
from diffshard.files import write_whole


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
