"""A plan of a pipeline as text: what each stage runs on which devices, how long it takes, and what else was tried."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

from cost.pipeline_schedules import splits_backward
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedStage
from diffshard.pipelines.plans.consistency import simulated
from diffshard.plans.printing import (
    format_axes,
    format_bytes,
    format_count,
    format_percent,
    format_s,
    format_table,
    short_name,
    wrapped,
)

STAGE_HEAD = ("stage", "layers", "begins at", "devices", "mesh", "memory of a device")
_TIME_HEAD = ("stage", "forward", "backward", "send on", "send back", "in flight", "all of them", "end of step")
TIME_TITLE = "One micro-batch on each stage; how many are in flight, with what each keeps; all of them"
TRIED_TITLE = "Tried: seconds of a step, before the programs of the stages were planned one by one"
_SCHEDULES = {
    "gpipe": "all forward operations first",
    "1f1b": "forward and backward operations alternate",
    "eager": "as 1f1b, with more micro-batches in flight",
    "interleaved": "as 1f1b, with several stages on each device",
    "zb-h1": "as 1f1b, with the gradients of weights where stages would wait",
    "zb-v": "two stages on each device, with the gradients of weights where they would wait",
    "2bw": "as 1f1b, and a step begins before the one before it has ended. Results differ from those of the step: "
    "gradients are of the weights of one step ago",
}


def format_pipeline_plan(plan: PipelinePlanData) -> str:
    """Returns the text that `print(plan)` shows."""
    layers = format_count(plan.num_layers, "layer")
    parts = [
        _header(plan),
        _table(f"Stages: {layers}", stage_rows(plan), (0,)),
        _time_table(plan),
    ]
    for title, words_of in RESIDUALS:
        lines = [f"  stage {i}: {words}" for i, stage in enumerate(plan.stages) if (words := words_of(stage))]
        parts += ["\n".join([title, *lines])] if lines else []
    for title, words, replica in replica_plans(plan):
        parts.append("\n".join(wrapped(f"{title}: {words}")))
        parts.append(_table("Its stages", stage_rows(replica), (0,)))
        parts.append(_time_table(replica))
    if plan.tried:
        parts.append(_table(TRIED_TITLE, tried_rows(plan), range(len(plan.tried) + 1)))
    if plan.notes:
        parts.append("\n".join(["Notes", *(line for note in plan.notes for line in wrapped(note, "  ", "    "))]))
    return "\n\n".join(parts)


def format_pipeline_in_line(plan: PipelinePlanData) -> str:
    """Returns a plan of a pipeline in one line, as errors and lists show it."""
    memory = format_bytes(max((stage.peak_bytes for stage in plan.all_stages), default=0.0))
    bound = plan.certificate.bound_words
    return (
        f"<{type(plan).__name__} of {pipeline_headline(plan)}: step {format_s(plan.step_s)}, memory {memory}, "
        f"bound {bound}>"
    )


def pipeline_headline(plan: PipelinePlanData) -> str:
    """Returns the title of a plan: `train_step: 3 stages on 6 of 8 devices, 2 hosts of 4 x H100-80GB`."""
    used = len({device for stage in plan.all_stages for device in stage.devices})
    devices = format_count(plan.num_devices, "device")
    devices = devices if used == plan.num_devices else f"{used} of {devices}"
    stages = stages_words(plan)
    return f"{short_name(plan.function)}: {stages} on {devices}, {plan.cluster}"


def stages_words(plan: PipelinePlanData) -> str:
    """Returns how many stages and replicas there are: `2 replicas of 4 stages`."""
    each = f" ({plan.stages_per_device} on each device)" if plan.stages_per_device > 1 else ""
    stages = format_count(len(plan.stages), "stage") + each
    return f"{len(plan.replicas) + 1} replicas of {stages}" if plan.replicas else stages


def replica_plans(plan: PipelinePlanData) -> list[tuple[str, str, PipelinePlanData]]:
    """Returns for each replica but the main one a title, what it takes and exchanges, and its own part of the plan."""
    found = []
    for number, replica in enumerate(plan.replicas, 1):
        words = (
            f"{micro_batches(replica.num_microbatches)} of {plan.num_microbatches}; it has the weights after "
            f"{format_s(replica.weights_s)}, and its sums are added to those of the main replica in "
            f"{format_s(replica.sums_s)}."
        )
        own = replace(plan, num_microbatches=replica.num_microbatches, stages=replica.stages, replicas=())
        found.append((f"Replica {number}", words, own))
    return found


def pipeline_verdict(plan: PipelinePlanData) -> str:
    """Says in a sentence how good the plan is known to be."""
    if not plan.certificate.has_bound:
        return "no bound was reached"
    if plan.gap < 1e-8:
        return "no pipeline that keeps its residuals is predicted to be faster"
    return f"at most {format_percent(plan.gap)} of the step could be saved by another pipeline that keeps its residuals"


def overlap_words(plan: PipelinePlanData) -> str:
    """Returns whether steps overlap with the schedule "2bw", and what a step takes if they do not; empty for others."""
    if plan.schedule != "2bw":
        return ""
    if plan.overlap == "none":
        return (
            "none: the next step reads what the end of a step makes, two steps at one time do not fit the memory, or "
            "it takes no longer"
        )
    call_s = simulated(plan).call_s
    return f"with `steps(state, batches)`, which the seconds are for; calls one by one take {format_s(call_s)} each"


def schedule_words(plan: PipelinePlanData) -> str:
    """Returns the micro-batches and the schedule: `8 micro-batches, gpipe: all forward operations first`."""
    main = f" ({plan.main_microbatches} of the main replica)" if plan.replicas else ""
    steps = f"{plan.predicted_steps:g} step{'s' if plan.predicted_steps != 1 else ''}"
    ahead = f", predicted {steps} ahead" if plan.predicted_steps else ""
    return f"{micro_batches(plan.num_microbatches)}{main}, {plan.schedule}: {_SCHEDULES[plan.schedule]}{ahead}"


def reduction_words(plan: PipelinePlanData) -> str:
    """Returns how often gradients are reduced: `reduced once a step, over 4 groups of examples`."""
    if plan.num_groups == 1:
        return "reduced in each micro-batch"
    return f"reduced once a step, over {plan.num_groups} groups of the examples of a micro-batch"


def recomputed_words(stage: PlannedStage) -> str:
    """Describes what a stage computes again: `120 operations, for 96.0 MiB of each micro-batch`; empty for nothing."""
    if not stage.recomputed_operations:
        return ""
    operations = format_count(stage.recomputed_operations, "operation")
    return f"{operations}, for {format_bytes(stage.recomputed_bytes)} of each micro-batch on all devices"


def offloaded_words(stage: PlannedStage) -> str:
    """Describes what a stage offloads: `4 of 14 arrays, 96.0 MiB of each micro-batch on a device; ...`; or nothing."""
    if not stage.num_offloaded:
        return ""
    arrays = f"{stage.num_offloaded} of {format_count(stage.num_residuals, 'array')}"
    size, seconds = format_bytes(stage.offloaded_bytes), format_s(stage.offload_s)
    return f"{arrays}, {size} of each micro-batch on a device; {seconds} there, and as long back"


RESIDUALS = (
    ("Made again in the backward pass, rather than kept", recomputed_words),
    ("In memory of the host until the backward pass reads it", offloaded_words),
)
"""What becomes of residuals that are not kept: a title, and what says it of a stage."""


def micro_batches(number: int) -> str:
    """Writes a number of micro-batches: `1 micro-batch`, `8 micro-batches`."""
    return f"{number:,} micro-batch{'es' if number != 1 else ''}"


def stage_rows(plan: PipelinePlanData) -> list[Sequence[str]]:
    """Returns the cells of `STAGE_HEAD` for each stage, after the head."""
    rows: list[Sequence[str]] = [STAGE_HEAD]
    for i, stage in enumerate(plan.stages):
        devices = f"{_device_range(stage.devices)}: {len(stage.devices)} x {stage.hardware}"
        axes = format_axes(stage.mesh_axes)
        rows.append((str(i), layer_range(stage), short_source(stage.source), devices, axes, memory_share(stage)))
    return rows


def time_rows(plan: PipelinePlanData) -> list[Sequence[str]]:
    """Returns the times of each stage, after a head; where gradients of weights are computed apart, these too."""
    is_split = splits_backward(plan.schedule)
    rows: list[Sequence[str]] = [(*_TIME_HEAD[:3], "weights", *_TIME_HEAD[3:]) if is_split else _TIME_HEAD]
    for i, stage in enumerate(plan.stages):
        has_next = i + 1 < len(plan.stages)
        sends = [format_s(s) if has_next else "" for s in (stage.send_forward_s, stage.send_backward_s)]
        busy_s = plan.main_microbatches * (stage.forward_s + stage.backward_s + stage.weights_s)
        busy = f"{format_s(busy_s)} ({busy_s / plan.step_s:.0%})" if plan.step_s else format_s(busy_s)
        kept = f"{stage.in_flight} x {format_bytes(stage.residual_bytes)}"
        passes = [format_s(stage.forward_s), format_s(stage.backward_s)]
        passes += [format_s(stage.weights_s)] if is_split else []
        rows.append((str(i), *passes, *sends, kept, busy, format_s(stage.end_s)))
    return rows


def tried_rows(plan: PipelinePlanData) -> list[Sequence[str]]:
    """Returns a table of what was tried, a row for each number of micro-batches and a column for each schedule."""
    seconds = {(count, schedule): s for count, schedule, s in plan.tried}
    schedules = list(dict.fromkeys(schedule for _, schedule, _ in plan.tried))
    rows: list[Sequence[str]] = [("micro-batches", *schedules)]
    for count in sorted({count for count, _, _ in plan.tried}):
        cells = (seconds.get((count, schedule)) for schedule in schedules)
        rows.append(
            (str(count), *("" if s is None else "nothing fits" if math.isinf(s) else format_s(s) for s in cells))
        )
    return rows


def layer_range(stage: PlannedStage) -> str:
    """Returns the layers of a stage: `0-9`."""
    return _range(stage.first_layer, stage.last_layer)


def memory_share(stage: PlannedStage) -> str:
    """Returns the memory of each device of a stage beside its limit: `30.0 of 80.0 GiB (38%)`."""
    limit = stage.memory_limit_bytes
    share = "" if math.isinf(limit) else f" of {format_bytes(limit)} ({stage.peak_bytes / limit:.0%})"
    return f"{format_bytes(stage.peak_bytes)}{share}"


def short_source(source: str) -> str:
    """Returns a place in the user's code without folders and outer functions: `model.py:10 (loss_fn)`."""
    path, space, function = source.partition(" (")
    file = re.split(r"[/\\]", path)[-1]
    return f"{file}{space}{function.rsplit('<locals>.', 1)[-1]}"


def _header(plan: PipelinePlanData) -> str:
    search = f"{format_s(plan.search_s)}{', taken from a store of plans' if plan.stored_in else ''}"
    step = f"{format_s(plan.step_s)} predicted: in {format_percent(plan.bubble)} of their time the stages wait (bubble)"
    rows = {
        "step": step,
        "schedule": schedule_words(plan),
        "overlap": overlap_words(plan),
        "gradients": reduction_words(plan),
        "bound": f"{plan.certificate.bound_words}: {pipeline_verdict(plan)}",
    }
    lines = (wrapped(text, f"  {name:<10}", " " * 12) for name, text in rows.items() if text)
    title = wrapped(f"Pipeline of {pipeline_headline(plan)}", "", "  ")
    return "\n".join([*title, "", *itertools.chain.from_iterable(lines), f"  search    {search}"])


def _table(title: str, rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    return "\n".join([*wrapped(title), "", *format_table(rows, "  ", right)])


def _time_table(plan: PipelinePlanData) -> str:
    rows = time_rows(plan)
    right = [column for column in range(len(rows[0])) if rows[0][column] not in ("in flight", "all of them")]
    return _table(TIME_TITLE, rows, right)


def _device_range(numbers: Sequence[int]) -> str:
    """Writes numbers of devices: `0-7`, or `0, 4` where they do not follow each other."""
    if all(b == a + 1 for a, b in itertools.pairwise(numbers)):
        return _range(numbers[0], numbers[-1])
    return ", ".join(map(str, numbers))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
