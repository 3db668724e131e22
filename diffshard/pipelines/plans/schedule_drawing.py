"""When each stage of a pipeline does what: a row for each stage with its micro-batches, and thin rows for what is sent.

Where a row has nothing, the stage waits: that is the bubble. The times are simulated again from the plan's numbers.
"""

from collections.abc import Sequence

from cost.pipeline_schedules import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.schedule_boxes import Box, Exchange, boxes_of_many_steps, boxes_of_one_step
from diffshard.pipelines.plans.text import layer_range
from diffshard.plans.drawings import text_in
from diffshard.plans.formats import format_percent, format_s
from diffshard.plans.page_elements import escape

_COLOURS = {
    "forward": "var(--fill0)",
    "backward": "var(--fill1)",
    "end of step": "var(--fill3)",
    "weights arrive": "var(--fill2)",
    "sums are sent": "var(--fill4)",
    "sending on": "var(--first)",
    "sending back": "var(--second)",
    "many operations": "var(--other)",
}
_MOST_BOXES = 500  # in a row: more would be narrower than two pixels of a wide screen
_LEAST_WITH_EDGE = 0.3  # percent of the width from which on a box is parted from the next by a line
_PADDING = 0  # pixels beside a number: boxes are narrow, and few of them are side by side without an edge


def schedule_elements(plan: PipelinePlanData, exchange: Exchange | None = None, seconds: float = 0.0) -> str:
    """Returns a drawing of a plan's step, to scale, with a key of the colours.

    Where steps overlap, it is one of many steps, with parts of those before and after it.

    Args:
      plan: of the replica that is drawn.
      exchange: what the replica waits for; None for the main one.
      seconds: of the whole width, if that is more than the replica takes, so that replicas have one scale.
    """
    overlaps = plan.schedule == "2bw" and plan.overlap != "none"
    one_step = exchange or Exchange(0.0, 0.0), seconds
    drawing = boxes_of_many_steps(plan) if overlaps else boxes_of_one_step(plan, *one_step)
    rows: list[str] = []
    used: set[str] = set()

    def add_row(style: str, boxes: Sequence[Box]) -> None:
        used.update(box.kind for box in boxes)
        rows.append(f"<div class='{style}'>{''.join(_element(box, drawing.seconds) for box in boxes)}</div>")

    for i, stage in enumerate(plan.stages):
        devices = f"{len(stage.devices)} x {escape(stage.hardware)}"
        rows.append(
            f"<div class=title>stage {i} <span class=dim>layers {layer_range(stage)}, {devices}, waits "
            f"{format_percent(1.0 - drawing.busy[i])} of the time</span></div>"
        )
        boxes = sorted((*drawing.boxes[FORWARD, i], *drawing.boxes[BACKWARD, i]), key=lambda box: box.start_s)
        add_row("lane", [*_few(boxes), *drawing.boxes[None, i]])
        if i + 1 < len(plan.stages):
            for kind in (SEND_FORWARD, SEND_BACKWARD):
                add_row("lane thin", _few(drawing.boxes[kind, i]))
    ends = f"<div class=ends><span>0 s</span><span>{format_s(drawing.seconds)}</span></div>"
    key = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>' for kind in _COLOURS if kind in used
    )
    key += '<span><i style="background:var(--track)"></i>waiting</span>'
    key += "<span>pale: of the steps before and after</span>" if overlaps else ""
    return f"<div class=lanes>{''.join(rows)}</div>{ends}<div class=key>{key}</div>"


def _few(boxes: Sequence[Box]) -> list[Box]:
    """Joins boxes that follow each other where there are more than a screen can show."""
    if len(boxes) <= _MOST_BOXES:
        return list(boxes)
    size = -(-len(boxes) // _MOST_BOXES)
    runs = [boxes[i : i + size] for i in range(0, len(boxes), size)]
    return [Box("many operations", "", run[0].start_s, run[-1].end_s) for run in runs]


def _element(box: Box, step_s: float) -> str:
    left, width = (100 * seconds / (step_s or 1.0) for seconds in (box.start_s, box.end_s - box.start_s))
    of = f" of micro-batch {box.text}" if box.text.isdigit() else ""
    other = " of another step" if box.is_faded else ""
    title = f"{box.kind}{of}{other}: {format_s(box.end_s - box.start_s)} from {format_s(box.start_s)}"
    is_thin = box.kind.startswith("sending")
    edge = ";box-shadow:inset -1px 0 var(--card)" if width >= _LEAST_WITH_EDGE and not is_thin else ""
    text = "" if is_thin else text_in(width, box.text, _PADDING)
    faded = ";opacity:.4" if box.is_faded else ""
    style = f"left:{left:.3f}%;width:{width:.3f}%;background:{_COLOURS[box.kind]}{edge}{faded}"
    return f'<div style="{style}" title="{escape(title)}">{text}</div>'
