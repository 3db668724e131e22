"""When each stage of a pipeline does what: a row for each stage with its micro-batches, and thin rows for what is sent.

Where a row has nothing, the stage waits: that is the bubble. The times are simulated again from the plan's numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from cost.pipeline_times import Simulation
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.text import layer_range
from diffshard.pipelines.plans.timing import simulated
from diffshard.plans.drawings import text_in
from diffshard.plans.formats import format_percent, format_s
from diffshard.plans.page_elements import escape

_COLOURS = {
    "forward": "var(--fill0)",
    "backward": "var(--fill1)",
    "end of step": "var(--fill3)",
    "sending on": "var(--first)",
    "sending back": "var(--second)",
    "many operations": "var(--other)",
}
_KINDS = {FORWARD: "forward", BACKWARD: "backward", SEND_FORWARD: "sending on", SEND_BACKWARD: "sending back"}
_MOST_BOXES = 500  # in a row: more would be narrower than two pixels of a wide screen
_LEAST_WITH_EDGE = 0.3  # percent of the width from which on a box is parted from the next by a line
_PADDING = 0  # pixels beside a number: boxes are narrow, and few of them are side by side without an edge


class _Box(NamedTuple):
    kind: str
    text: str
    start_s: float
    end_s: float


def schedule_elements(plan: PipelinePlanData) -> str:
    """Returns a drawing of a plan's step, to scale, with a key of the colours."""
    simulation, rows = simulated(plan).simulation, []
    drawn_s = simulation.step_s + max(stage.end_s for stage in plan.stages)  # of one step, also where steps overlap
    for i, stage in enumerate(plan.stages):
        waits = 1.0 - simulation.busy_s[i] / simulation.step_s if simulation.step_s else 0.0
        devices = f"{len(stage.devices)} x {escape(stage.hardware)}"
        rows.append(
            f"<div class=title>stage {i} <span class=dim>layers {layer_range(stage)}, {devices}, waits "
            f"{format_percent(waits)} of the time</span></div>"
        )
        boxes = [*_boxes(simulation, FORWARD, i), *_boxes(simulation, BACKWARD, i)]
        boxes = _few(sorted(boxes, key=lambda box: box.start_s))
        if stage.end_s > 0:
            boxes.append(_Box("end of step", "end", simulation.step_s, simulation.step_s + stage.end_s))
        rows.append(_row("lane", boxes, drawn_s))
        if i + 1 < len(plan.stages):
            rows += [_row("lane thin", _few(_boxes(simulation, k, i)), drawn_s) for k in (SEND_FORWARD, SEND_BACKWARD)]
    ends = f"<div class=ends><span>0 s</span><span>{format_s(drawn_s)}</span></div>"
    used = _used_kinds(plan, simulation)
    key = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>' for kind in _COLOURS if kind in used
    )
    key += '<span><i style="background:var(--track)"></i>waiting</span>'
    return f"<div class=lanes>{''.join(rows)}</div>{ends}<div class=key>{key}</div>"


def _boxes(simulation: Simulation, kind: int, stage: int) -> list[_Box]:
    graph = simulation.graph
    found = np.flatnonzero((graph.kind == kind) & (graph.stage == stage))
    return [
        _Box(_KINDS[kind], str(graph.microbatch[n]), float(simulation.start_s[n]), float(simulation.end_s[n]))
        for n in found
    ]


def _few(boxes: Sequence[_Box]) -> list[_Box]:
    """Joins boxes that follow each other where there are more than a screen can show."""
    if len(boxes) <= _MOST_BOXES:
        return list(boxes)
    size = -(-len(boxes) // _MOST_BOXES)
    runs = [boxes[i : i + size] for i in range(0, len(boxes), size)]
    return [_Box("many operations", "", run[0].start_s, run[-1].end_s) for run in runs]


def _used_kinds(plan: PipelinePlanData, simulation: Simulation) -> set[str]:
    is_long = 2 * plan.num_microbatches > _MOST_BOXES
    kinds = {"many operations"} if is_long else {_KINDS[int(kind)] for kind in np.unique(simulation.graph.kind)}
    if is_long and len(plan.stages) > 1 and plan.num_microbatches <= _MOST_BOXES:
        kinds |= {"sending on", "sending back"}
    return kinds | ({"end of step"} if any(stage.end_s > 0 for stage in plan.stages) else set())


def _row(style: str, boxes: Sequence[_Box], step_s: float) -> str:
    return f"<div class='{style}'>{''.join(_element(box, step_s) for box in boxes)}</div>"


def _element(box: _Box, step_s: float) -> str:
    left, width = (100 * seconds / (step_s or 1.0) for seconds in (box.start_s, box.end_s - box.start_s))
    of = f" of micro-batch {box.text}" if box.text.isdigit() else ""
    title = f"{box.kind}{of}: {format_s(box.end_s - box.start_s)} from {format_s(box.start_s)}"
    is_thin = box.kind.startswith("sending")
    edge = ";box-shadow:inset -1px 0 var(--card)" if width >= _LEAST_WITH_EDGE and not is_thin else ""
    text = "" if is_thin else text_in(width, box.text, _PADDING)
    style = f"left:{left:.3f}%;width:{width:.3f}%;background:{_COLOURS[box.kind]}{edge}"
    return f'<div style="{style}" title="{escape(title)}">{text}</div>'
