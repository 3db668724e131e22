"""A plan as text: what is sharded how, why, what it costs, and how far from optimal it is at most."""

import math
from collections.abc import Sequence
from functools import partial

from diffshard.plans.base import PlanData
from diffshard.plans.printing import (
    format_axes,
    format_bytes,
    format_devices,
    format_percent,
    format_s,
    format_spec,
    format_table,
    short_name,
    wrapped,
)
from diffshard.plans.sections import Advice, PlannedFormats, Rematerialisation, computing_parts, whole_lines
from diffshard.plans.summary import (
    AlikeOperations,
    argument_rows,
    collective_totals,
    dearest_operations,
    device_bytes,
    host_words,
    objective_words,
    operation_name,
    reason,
    shape_lines,
    verdict,
)
from diffshard.plans.timeline import timeline_words, wait_rows

MAX_OPERATIONS = 24
"""Lines for operations, the most expensive ones: about as many as fit on a screen beside the rest of the text."""
MAX_RESIDUALS = 12
"""Lines for what goes from forward to backward, the largest first."""


def format_plan(plan: PlanData) -> str:
    """Returns the text that `print(plan)` shows."""
    parts = [_header(plan), _arguments(plan), _operations(plan)]
    if plan.remat is not None and plan.remat.residuals:
        parts.append(_residuals(plan.remat))
    if plan.formats is not None:
        parts.append(_formats(plan.formats))
    if plan.comparison:
        parts.append(str(plan.comparison))
    if plan.notes:
        parts.append("\n".join(["Notes", *(line for note in plan.notes for line in wrapped(note, "  ", "    "))]))
    return "\n\n".join(parts)


def format_in_line(plan: PlanData) -> str:
    """Returns a plan in one line, as errors and lists show it."""
    return (
        f"<{type(plan).__name__} of {short_name(plan.function)} on {format_axes(plan.mesh_axes)}: "
        f"step {format_s(plan.step_s)}, memory {format_bytes(plan.peak_bytes)}, bound {plan.certificate.bound_words}>"
    )


def _header(plan: PlanData) -> str:
    communication_s = plan.step_s - plan.compute_s
    title = f"Plan of {short_name(plan.function)} on {format_devices(plan.mesh_axes)}, {plan.hardware.name}"
    lines = [
        *wrapped(title, "", "  "),
        "",
        *_advice(plan.advice),
        f"  step     {format_s(plan.step_s)} predicted: computing {format_s(plan.compute_s)}, "
        f"communicating {format_s(communication_s)}",
    ]
    lines += [f"          {part.name} {part.amounts}" for part in computing_parts(plan.computing) if part.seconds]
    rows = [
        ("", total.kind, total.axis, f"{total.count:,.0f}x", format_bytes(total.num_bytes), total.time)
        for total in collective_totals(plan)
    ]
    lines += format_table(rows, "        ", right=(3, 4, 5))
    if plan.timeline is not None:
        lines += wrapped(timeline_words(plan.timeline), "  timeline ", " " * 11)
        waits = wait_rows(plan.timeline, partial(operation_name, plan))
        lines += format_table([("", *row) for row in waits], "        ", right=(3,), wrap=(4, 5))
    total, *reasons = whole_lines(plan.whole_work, plan.compute_s) or [""]
    lines += wrapped(total, "  whole    ", " " * 11) if total else []
    lines += [line for reason in reasons for line in wrapped(reason, " " * 11, " " * 13)]
    limit = plan.memory_limit_bytes
    share = "" if math.isinf(limit) else f" of {format_bytes(limit)} ({plan.peak_bytes / limit:.0%})"
    lines.append(f"  memory   {format_bytes(plan.peak_bytes)} at the peak on each device{share}")
    if plan.host_bytes:
        lines += wrapped(host_words(plan), "  host     ", " " * 11)
    if plan.remat is not None:
        lines += wrapped(_remat(plan.remat), "  remat    ", " " * 11)
    if plan.objective is not None:
        lines += wrapped(objective_words(plan.objective), "  searched ", " " * 11)
    else:
        lines += wrapped(f"{plan.certificate.bound_words}: {verdict(plan)}", "  bound    ", " " * 11)
    origin = ", taken from a store of plans" if plan.stored_in else ""
    search = f"{format_s(plan.search_s)}, solver {plan.solver}, {plan.status}{origin}"
    lines += wrapped(search, "  search   ", " " * 11)
    return "\n".join([*lines, *shape_lines(plan)])


def _advice(advice: Sequence[Advice]) -> list[str]:
    """Returns the advice on a faster or smaller step, with an empty line below; nothing without any."""
    if not advice:
        return []
    first, *others = ([*wrapped(item.words, " " * 11, " " * 13)] for item in advice)
    return ["  advice" + first[0][8:], *first[1:], *(line for lines in others for line in lines), ""]


def _remat(remat: Rematerialisation) -> str:
    kept = f"{format_bytes(remat.kept_bytes)} kept from forward to backward"
    if remat.offloaded:
        kept += f", {format_bytes(remat.host_bytes)} offloaded to the host's memory"
    if not remat.recomputed:
        return f"{kept}, nothing computed again"
    takes = "" if remat.offloaded else f" in {format_s(remat.seconds)}"
    count = len(remat.recomputed)
    return f"{kept}, {count} operation{'s' if count != 1 else ''} computed again{takes}"


_KINDS = {"product": "products", "sum": "sums", "kept": "kept arrays", "exchange": "exchanges"}


def _formats(formats: PlannedFormats) -> str:
    rows = format_table(formats_rows(formats), "  ", right=(1, 3, 4), wrap=(0,))
    lines = wrapped(f"Formats: {formats_words(formats)}", "", "  ")
    if formats.groups:
        lines += ["", *rows]
    if formats.trials:
        title = f"Formats that were measured together, by {formats.measured_by}"
        lines += ["", title, "", *format_table(trials_rows(formats), "  ", right=(1, 2, 3, 4), wrap=(0,))]
    if noise := noise_words(formats):
        lines += ["", *wrapped(noise, "  ")]
    return "\n".join(lines)


ONE_RUN = "a validation run"
"""What measured increases of which no error is known."""


def noise_words(formats: PlannedFormats) -> str:
    """Returns advice where the noise of the measurements hides the limit; "" where it does not."""
    if formats.measured_by == ONE_RUN:
        return "A single validation run does not tell how far its increases are noise: two or more do."
    if not 1 < formats.more_runs < math.inf:
        return ""
    return (
        f"Noise hides the limit: an increase is measured to ± {formats.measured_error:.1g}, in the median of these, "
        f"and {formats.max_loss_increase:g} may be added. What is within it is partly chance. About "
        f"{math.ceil(formats.more_runs)} times as much measuring, or longer runs, would tell."
    )


def formats_words(formats: PlannedFormats) -> str:
    """Returns in words what number formats do to the loss."""
    if not formats.groups:
        return "all numbers stay as they are: in fewer bits none would gain time, or no increase of the loss is known"
    measured = formats.measured_increase
    together = "" if measured is None else f"; {measured:+.2g} measured together by {formats.measured_by}"
    kinds = dict.fromkeys(_KINDS[group.kind] for group in formats.groups)
    return (
        f"{' and '.join(kinds)} in fewer bits, with what their group adds to the loss: "
        f"{formats.loss_increase:+.2g} predicted of "
        f"{formats.max_loss_increase:+.2g} that may be added{together}"
    )


def formats_rows(formats: PlannedFormats) -> list[tuple[str, ...]]:
    """Returns titles, then a row for each group of products: name, number, format, loss and seconds."""
    rows: list[tuple[str, ...]] = [("name", "", "in", "loss", "gains")]
    for g in formats.groups:
        gains = format_s(g.gain_s) if g.num_rounded else ""
        rows.append((g.name, f"{g.count}x", g.format if g.num_rounded else "own", f"{g.loss_increase:+.2g}", gains))
    return rows


def trials_rows(formats: PlannedFormats) -> list[tuple[str, ...]]:
    """Returns titles, then a row for each set of products that was measured: name, number, seconds and losses."""
    rows: list[tuple[str, ...]] = [("formats", "rounded", "step", "predicted", "measured")]
    for t in formats.trials:
        error = "" if not t.measured_error else f" ± {t.measured_error:.1g}"
        losses = (f"{t.predicted_increase:+.2g}", f"{t.measured_increase:+.2g}{error}")
        rows.append((t.name, str(t.num_rounded), format_s(t.step_s), *losses))
    return rows


def _residuals(remat: Rematerialisation) -> str:
    rows = [("name", "", "how", "bytes", "takes", "line")]
    for r in remat.residuals[:MAX_RESIDUALS]:
        takes = format_s(r.seconds) if r.seconds else ""
        rows.append((r.name, f"{r.num_arrays}x", r.how, format_bytes(r.num_bytes), takes, r.source))
    ways = "kept, offloaded to the host or computed again" if remat.offloaded else "kept or computed again"
    title = f"From forward to backward: what is {ways}, with the bytes that keeping takes"
    lines = [title, "", *format_table(rows, "  ", right=(1, 3, 4), wrap=(0, 5))]
    if len(remat.residuals) > MAX_RESIDUALS:
        others = remat.residuals[MAX_RESIDUALS:]
        lines.append(f"  ... and {len(others)} more kinds of {format_bytes(sum(r.num_bytes for r in others))} together")
    return "\n".join(lines)


def _arguments(plan: PlanData) -> str:
    total = sum(t.num_bytes for t in plan.arguments)
    local = sum(device_bytes(plan, t) for t in plan.arguments)
    title = (
        f"Arguments: {len(plan.arguments)} arrays, {format_bytes(total)}, of which a device holds {format_bytes(local)}"
    )
    if plan.host_bytes:
        title += f" and has {format_bytes(plan.host_bytes)} in the host's memory"
    if plan.residuals:
        title += f"; and {format_bytes(sum(device_bytes(plan, t) for t in plan.residuals))} of residuals"
    rows = [("name", "", "type", "sharding", "device", "next best, what it adds")]
    rows += [row for _, row in argument_rows(plan, "x")]
    return "\n".join([title, "", *format_table(rows, "  ", right=(1, 4), wrap=(0, 5))])


def _operations(plan: PlanData) -> str:
    groups = dearest_operations(plan)
    top_groups, others = groups[:MAX_OPERATIONS], groups[MAX_OPERATIONS:]
    rows = [("name", "", "result", "sharding", "takes", "next best, what it adds")]
    for g in top_groups:
        times = f"{len(g.operations)}x" if len(g.operations) > 1 else ""
        computing = format_s(g.compute_s) if g.compute_s else ""
        why = reason(plan, plan.operations[min(g.operations)])
        rows.append((g.name, times, g.result, format_spec(g.spec), computing, why))
        if g.collectives:
            rows.append((f"  + {_collectives(g.collectives)}", "", "", "", format_s(g.collective_s), ""))
    count = sum(operation.kind == "operation" for operation in plan.operations)
    title = f"Operations: {count:,}, the {len(top_groups)} most expensive kinds in order{_first_share(plan, groups)}"
    lines = [title, "", *format_table(rows, "  ", right=(1, 4), wrap=(0, 5))]
    if others:
        others_s = sum(g.compute_s + g.collective_s for g in others)
        share = others_s / max(plan.step_s, 1e-30)
        lines.append(f"  ... and {len(others)} more kinds, {format_s(others_s)} together ({share:.0%})")
    return "\n".join(lines)


def _first_share(plan: PlanData, groups: Sequence[AlikeOperations]) -> str:
    """Says what the most expensive operations take of the step; nothing where none takes time."""
    seconds = groups[0].compute_s + groups[0].collective_s if groups else 0.0
    return f"; the first takes {format_percent(seconds / plan.step_s)} of the step" if seconds else ""


def _collectives(kinds_and_axes: Sequence[tuple[str, str]]) -> str:
    """Writes collectives with all axes of a kind beside it: `all_gather data, model`."""
    axes: dict[str, list[str]] = {}
    for kind, axis in kinds_and_axes:
        axes.setdefault(kind, []).append(axis)
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in axes.items())
