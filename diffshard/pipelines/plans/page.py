"""A plan of a pipeline as a self-contained HTML page: the schedule as a drawing, the stages, and their arguments."""

import math
from collections.abc import Mapping

from diffshard.pipelines.plans.base import PipelinePlanData, PlannedStage
from diffshard.pipelines.plans.schedule_drawing import Exchange, schedule_elements
from diffshard.pipelines.plans.text import (
    RESIDUALS,
    STAGE_HEAD,
    TRIED_TITLE,
    format_pipeline_plan,
    layer_range,
    micro_batches,
    overlap_words,
    pipeline_verdict,
    reduction_words,
    replica_plans,
    schedule_words,
    stage_rows,
    stages_words,
    time_rows,
    tried_rows,
)
from diffshard.plans.page_elements import COMPUTE, Html, axis_fills, bar, cards, document, escape, table
from diffshard.plans.printing import (
    format_array,
    format_bytes,
    format_count,
    format_percent,
    format_s,
    format_spec,
    group_names,
    readable_path,
    short_name,
)
from diffshard.plans.summary import local_bytes

_RESIDUALS = "#d9822b"  # of the bar of memory, as in the drawings of memory of ordinary plans


def format_pipeline_page(plan: PipelinePlanData) -> str:
    """Returns a plan of a pipeline as the text of an HTML page."""
    stages, devices = stages_words(plan), format_count(plan.num_devices, "device")
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    of_replicas = zip(replica_plans(plan), plan.replicas, strict=True)
    body = [
        f"<h1>{escape(short_name(plan.function))} in {stages} on {devices}</h1>",
        f"<div class=dim>{escape(plan.cluster)} · {escape(schedule_words(plan))} · "
        f"gradients {escape(reduction_words(plan))} · {_overlap(plan)}searched for "
        f"{escape(format_s(plan.search_s))} · {escape(pipeline_verdict(plan))}</div>",
        _cards(plan),
        f"<h2>Schedule of a step</h2>{schedule_elements(plan, seconds=plan.step_s if plan.replicas else 0.0)}",
        f"<h2>Stages</h2>{_stage_table(plan)}",
        f"<h2>Times</h2>{_time_table(plan)}",
        f"<h2>Memory of each device</h2>{''.join(_memory(i, stage) for i, stage in enumerate(plan.stages))}",
        *(_replica(*found, Exchange(r.weights_s, r.sums_s)) for found, r in of_replicas),
        _arguments(plan),
        _tried(plan),
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        f"<details><summary>As text</summary><pre>{escape(format_pipeline_plan(plan))}</pre></details>",
    ]
    return document(f"Pipeline of {short_name(plan.function)}", body)


def _replica(title: str, words: str, plan: PipelinePlanData, exchange: Exchange) -> str:
    """Returns the stages of a replica besides the main one, and their schedule, to the scale of the whole step."""
    return (
        f"<h2>{title}</h2><p>{escape(words)}</p>{schedule_elements(plan, exchange, plan.step_s)}"
        f"<h3>Its stages</h3>{_stage_table(plan)}<h3>Their times</h3>{_time_table(plan)}"
        f"<h3>Memory of each of its devices</h3>{''.join(_memory(i, stage) for i, stage in enumerate(plan.stages))}"
    )


def _overlap(plan: PipelinePlanData) -> str:
    return f"overlap {escape(overlap_words(plan))} · " if overlap_words(plan) else ""


def _cards(plan: PipelinePlanData) -> str:
    fullest = max(plan.all_stages, key=lambda stage: stage.peak_bytes / stage.memory_limit_bytes)
    share = fullest.peak_bytes / fullest.memory_limit_bytes
    return cards(
        (format_s(plan.step_s), "predicted step"),
        (format_percent(plan.bubble), "of their time the stages wait (bubble)"),
        (f"{plan.num_microbatches:,}", f"micro-batches, {plan.schedule}"),
        (f"{share:.0%}", f"of the memory of {fullest.hardware}, the fullest device"),
        (format_percent(plan.gap), f"gap to the lower bound {format_s(plan.lower_bound_s)}")
        if plan.certificate.has_bound
        else ("none", "proven as a lower bound"),
    )


def _stage_table(plan: PipelinePlanData) -> str:
    """Returns the stages; the first cell, which heads a box on narrow screens, has the number and the layers."""
    rows = []
    for stage, (number, layers, source, *others) in zip(plan.stages, stage_rows(plan)[1:], strict=True):
        place = Html(f'<span title="{escape(stage.source)}">{escape(source)}</span>')
        rows.append((f"stage {number}, layers {layers}", place, *others))
    return table(("stage", *STAGE_HEAD[2:]), rows)


def _time_table(plan: PipelinePlanData) -> str:
    head, *rows = time_rows(plan)
    rows = [(f"stage {number}", *others) for number, *others in rows]
    return table(head, rows, right=range(1, len(head)))


def _memory(number: int, stage: PlannedStage) -> str:
    kept = min(stage.in_flight * stage.residual_bytes, stage.peak_bytes)
    limit = stage.memory_limit_bytes
    whole = stage.peak_bytes if math.isinf(limit) else limit
    pieces = [
        ("weights, state and working memory", stage.peak_bytes - kept, format_bytes(stage.peak_bytes - kept), COMPUTE),
        (f"residuals of {micro_batches(stage.in_flight)} in flight", kept, format_bytes(kept), _RESIDUALS),
    ]
    others = "".join(
        f"<div class=dim>{escape(title)}: {escape(words)}</div>"
        for title, words_of in RESIDUALS
        if (words := words_of(stage))
    )
    return f"<h3>stage {number} <span class=dim>of {format_bytes(limit)}</span></h3>{bar(pieces, whole)}{others}"


def _arguments(plan: PipelinePlanData) -> str:
    axes = list(dict.fromkeys(axis for stage in plan.stages for axis in stage.mesh_axes))
    fills = axis_fills([tensor.spec for stage in plan.stages for tensor in stage.arguments], axes)
    tables = [_stage_arguments(i, stage, fills) for i, stage in enumerate(plan.stages) if stage.arguments]
    return f"<h2>Arguments</h2>{''.join(tables)}" if tables else ""


def _stage_arguments(number: int, stage: PlannedStage, fills: Mapping[frozenset[str], str]) -> str:
    tensors = stage.arguments
    keys = [(tensor.shape, tensor.dtype, tensor.spec) for tensor in tensors]
    rows = []
    for pattern, members in group_names([readable_path(tensor.path) for tensor in tensors], keys):
        first, count = tensors[members[0]], len(members)
        fill = fills[frozenset(axis for axes in first.spec for axis in axes)]
        swatch = f'<span><i class=swatch style="background:{fill}"></i>{escape(format_spec(first.spec))}</span>'
        size = format_bytes(sum(local_bytes(tensors[i], stage.mesh_axes) for i in members))
        rows.append((pattern, f"{count}×" if count > 1 else "", format_array(first), Html(swatch), size))
    total = format_bytes(sum(local_bytes(tensor, stage.mesh_axes) for tensor in tensors))
    title = f"{format_count(len(tensors), 'array')}, {total} on each of {format_count(len(stage.devices), 'device')}"
    head = ("name", "how many", "type", "sharding", "on a device")
    return (
        f"<details{' open' * (number == 0)}><summary>stage {number}, layers {layer_range(stage)} "
        f"<span class=dim>{title}</span></summary>{table(head, rows, right=(1, 4))}</details>"
    )


def _tried(plan: PipelinePlanData) -> str:
    if not plan.tried:
        return ""
    head, *cells = tried_rows(plan)
    rows = [(micro_batches(int(count)), *others) for count, *others in cells]
    return f"<h2>{TRIED_TITLE}</h2>{table(head, rows, right=range(1, len(head)))}"
