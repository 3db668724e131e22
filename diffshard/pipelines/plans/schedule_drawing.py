"""When each stage of a pipeline does what: a row for each stage with its micro-batches, and thin rows for what is sent.

Where a row has nothing, the stage waits: that is the bubble. The times are simulated again from the plan's numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD, STAGE_KINDS, WEIGHTS
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.consistency import simulated, simulated_steps
from diffshard.pipelines.plans.text import layer_range
from diffshard.plans.page_elements import escape, text_in
from diffshard.plans.printing import format_percent, format_s

KINDS: dict[int | None, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    WEIGHTS: "gradients of weights",
    SEND_FORWARD: "sending on",
    SEND_BACKWARD: "sending back",
}


class Box(NamedTuple):
    """A time in which a stage or a link does one thing.

    Attributes:
      kind: such as "forward".
      text: what is written on it: the number of the micro-batch.
      start_s, end_s: from the left end of the drawing.
      is_faded: whether it is of another step than the one that is drawn.
    """

    kind: str
    text: str
    start_s: float
    end_s: float
    is_faded: bool = False


class Exchange(NamedTuple):
    """The seconds that a replica besides the main one waits.

    Attributes:
      weights_s: until it has the weights.
      sums_s: for bringing its sums to the main replica.
    """

    weights_s: float
    sums_s: float


class Drawing(NamedTuple):
    """The contents of a drawing.

    Attributes:
      boxes: by kind of operation and stage; of the ends of steps by `None` and stage.
      busy: `[S]`, the share of its time in which a stage computes.
      seconds: of the whole width.
    """

    boxes: dict[tuple[int | None, int], list[Box]]
    busy: Sequence[float]
    seconds: float


def boxes_of_one_step(plan: PipelinePlanData, exchange: Exchange, seconds: float) -> Drawing:
    """Returns the operations and the waits of a replica's stages in a step.

    Args:
      seconds: of the whole width, if that is more than the replica takes.
    """
    simulation = simulated(plan).simulation
    first_s, last_s = exchange.weights_s, exchange.weights_s + simulation.step_s
    device = simulation.graph.device.tolist()
    ends_s: list[float] = []  # of the stages of a device one after the other
    for i, stage in enumerate(plan.stages):
        earlier_s = [s for s, other in zip(ends_s, device, strict=False) if other == device[i]]
        ends_s.append(stage.end_s + max(earlier_s, default=0.0))
    longest_end_s = max(ends_s)
    drawn_s = max(last_s + exchange.sums_s + longest_end_s, seconds)
    until_s = drawn_s - longest_end_s
    boxes: dict[tuple[int | None, int], list[Box]] = {}
    for i, stage in enumerate(plan.stages):
        for kind in KINDS:
            of_kind = np.flatnonzero((simulation.graph.kind == kind) & (simulation.graph.stage == i))
            boxes[kind, i] = [
                Box(
                    KINDS[kind],
                    f"{simulation.graph.microbatch[n]}{_mark(device, i)}",
                    first_s + float(simulation.start_s[n]),
                    first_s + float(simulation.end_s[n]),
                )
                for n in of_kind
            ]
        others = [
            Box("weights arrive", "", 0.0, first_s),
            Box("sums are sent", "", last_s, last_s + exchange.sums_s),
            Box("end of step", "end", until_s + ends_s[i] - stage.end_s, until_s + ends_s[i]),
        ]
        boxes[None, i] = [box for box in others if box.end_s > box.start_s]
    busy = [float(s) / until_s if until_s else 1.0 for s in simulation.busy_s]
    return Drawing(boxes, busy, drawn_s)


def _mark(device: Sequence[int], stage: int) -> str:
    """Returns the mark of a stage's micro-batches: none for the first stage of a device, then ' and ''."""
    return "'" * list(device[:stage]).count(device[stage])


def boxes_of_many_steps(plan: PipelinePlanData) -> Drawing:
    """Returns the operations of stages between the first and the last of a step, those of other steps included."""
    steps, count = simulated_steps(plan), plan.num_microbatches
    graph, number = steps.graph, steps.graph.microbatch // count
    ends_s = np.array([stage.end_s for stage in plan.stages])
    end_s = np.where(steps.is_before_end, steps.end_s + ends_s[graph.stage], steps.end_s)
    ended = number - (1 if plan.overlap == "late_ends" else 0)  # the step that ends after an operation
    of_step = number == steps.step
    first_s = float(steps.start_s[of_step].min())
    last_s = float(np.append(steps.end_s[of_step], end_s[steps.is_before_end & (ended == steps.step)]).max())

    def box(kind: str, text: str, step: int, start_s: float, end_s: float) -> Box:
        return Box(kind, text, max(start_s, first_s) - first_s, min(end_s, last_s) - first_s, step != steps.step)

    boxes: dict[tuple[int | None, int], list[Box]] = {}
    is_seen = (steps.start_s < last_s) & (end_s > first_s)
    for i in range(len(plan.stages)):
        for kind, name in KINDS.items():
            of_kind = np.flatnonzero(is_seen & (graph.kind == kind) & (graph.stage == i))
            found = (
                box(name, str(graph.microbatch[n] % count), number[n], steps.start_s[n], steps.end_s[n])
                for n in of_kind
            )
            boxes[kind, i] = [one for one in found if one.end_s > one.start_s]
        of_end = np.flatnonzero(is_seen & steps.is_before_end & (graph.stage == i))
        found = (box("end of step", "end", ended[n], steps.end_s[n], end_s[n]) for n in of_end)
        boxes[None, i] = [one for one in found if one.end_s > one.start_s]
    busy = [
        (count * (s.forward_s + s.backward_s) + s.end_s) / steps.step_s if steps.step_s else 1.0 for s in plan.stages
    ]
    return Drawing(boxes, busy, last_s - first_s)


_COLOURS = {
    "forward": "var(--fill0)",
    "backward": "var(--fill1)",
    "gradients of weights": "var(--fill5)",
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

    together: dict[tuple[int, ...], list[int]] = {}
    for i, stage in enumerate(plan.stages):
        together.setdefault(stage.devices, []).append(i)
    for of_device in together.values():
        first = plan.stages[of_device[0]]
        layers = ", ".join(layer_range(plan.stages[i]) for i in of_device)
        waits = format_percent(1.0 - sum(drawing.busy[i] for i in of_device))
        name = f"stage{'s' if len(of_device) > 1 else ''} {', '.join(map(str, of_device))}"
        rows.append(
            f"<div class=title>{name} <span class=dim>layers {layers}, {len(first.devices)} x "
            f"{escape(first.hardware)}, waits {waits} of the time</span></div>"
        )

        def boxes_of(*kinds: int | None, stages: Sequence[int] = of_device) -> list[Box]:
            return sorted((b for k in kinds for i in stages for b in drawing.boxes[k, i]), key=lambda box: box.start_s)

        add_row("lane", [*_few(boxes_of(*STAGE_KINDS)), *boxes_of(None)])
        if len(of_device) > 1 or of_device[0] + 1 < len(plan.stages):
            for kind in (SEND_FORWARD, SEND_BACKWARD):
                add_row("lane thin", _few(boxes_of(kind)))
    ends = f"<div class=ends><span>0 s</span><span>{format_s(drawing.seconds)}</span></div>"
    key = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>' for kind in _COLOURS if kind in used
    )
    key += '<span><i style="background:var(--track)"></i>waiting</span>'
    key += "<span>1': of a device's second stage</span>" if plan.stages_per_device > 1 else ""
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
    number = box.text.rstrip("'")
    of = f" of micro-batch {number}" if number.isdigit() else ""
    other = " of another step" if box.is_faded else ""
    title = f"{box.kind}{of}{other}: {format_s(box.end_s - box.start_s)} from {format_s(box.start_s)}"
    is_thin = box.kind.startswith("sending")
    edge = ";box-shadow:inset -1px 0 var(--card)" if width >= _LEAST_WITH_EDGE and not is_thin else ""
    text = "" if is_thin else text_in(width, box.text, _PADDING)
    faded = ";opacity:.4" if box.is_faded else ""
    style = f"left:{left:.3f}%;width:{width:.3f}%;background:{_COLOURS[box.kind]}{edge}{faded}"
    return f'<div style="{style}" title="{escape(title)}">{text}</div>'
