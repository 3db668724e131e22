"""A plan of the bilevel search as text and as one self-contained HTML page: what each node takes, saves and costs."""

import math
from collections.abc import Sequence

from diffshard.bilevel_search.plans.base import BilevelPlanData, NodePlan, TrainedCandidate, ValidationRuns
from diffshard.plans.page_elements import COLOURS, Dot, cards, document, escape, plain_bar, scatter, table
from diffshard.plans.printing import (
    format_bytes,
    format_count,
    format_devices,
    format_s,
    format_table,
    is_shown,
    wrapped,
)

_MAX_CANDIDATES = 12
"""Lines of the table of candidates; the page shows all of them."""


def format_plan(plan: BilevelPlanData) -> str:
    """Returns the table that `print(plan)` shows."""
    return "\n\n".join(filter(None, (_header(plan), _nodes(plan), _candidates(plan), _notes(plan))))


def title(plan: BilevelPlanData) -> str:
    """Returns the title of a plan: what it is for, in one line."""
    what = "communication" if has_traffic(plan) else format_count(len(plan.nodes), "choice")
    where = f" on {format_devices(plan.mesh_axes)}" if plan.mesh_axes else ""
    return f"Plan of {what}{where}{f', {plan.hardware.name}' if plan.hardware else ''}"


def has_traffic(plan: BilevelPlanData) -> bool:
    """Returns whether the space told what its nodes send."""
    return any(node.traffic for node in plan.nodes)


def baseline_name(plan: BilevelPlanData) -> str:
    """Returns whose seconds cost ratios are formed with."""
    return "the mean strategies'" if plan.all_exact else "the exact choice's"


def seconds_line(plan: BilevelPlanData) -> str:
    """Returns predicted seconds beside the exact choice's."""
    baseline = f"{baseline_name(plan)} {format_s(plan.baseline_seconds)}"
    return f"{format_s(plan.seconds)} predicted, {plan.cost_ratio:.1%} of {baseline}"


def loss_line(plan: BilevelPlanData) -> str:
    """Returns the increase of the loss, how it is known, and what is allowed."""
    if plan.all_exact:
        return "the same with every choice"
    how = "measured by training" if plan.validation else "predicted by the search, not measured"
    bound = "" if plan.max_loss_increase is None else f"; {plan.max_loss_increase:.4g} allowed"
    return f"{plan.loss_increase:+.4g} over the exact choice's, {how}{bound}"


def bytes_line(plan: BilevelPlanData) -> str:
    """Returns a line with the bytes that a device sends, beside the exact choice's; "" where the space has none."""
    if not has_traffic(plan):
        return ""
    exact_bytes, share = plan.exact_sent_bytes, "as the exact choice"
    if exact_bytes:
        share = f"{plan.sent_bytes / exact_bytes:.1%} of the exact choice's {format_bytes(exact_bytes)}"
    return f"{format_bytes(plan.sent_bytes)} by each device in a step, {share}"


def schedule_line(plan: BilevelPlanData) -> str:
    """Returns which share of training runs the exact choice; empty where none does."""
    if not plan.exact_share:
        return ""
    return (
        f"the first {plan.exact_share:.0%} of training runs the exact choice; seconds and bytes are the mean over all"
    )


def traffic_texts(node: NodePlan) -> tuple[str, str, str]:
    """Returns direction, kind with its axes, and executions in a step."""
    traffic = node.traffic
    if traffic is None:
        return "", "", ""
    return traffic.direction, " ".join((traffic.kind, "+".join(traffic.axes))).strip(), f"{traffic.count:,g}x"


def chosen_and_exact_bytes(node: NodePlan) -> tuple[float, float]:
    """Returns the bytes that each device sends for a node, as chosen and as the exact choice."""
    return (node.traffic.sent_bytes if node.traffic else 0.0), node.exact_sent_bytes


def is_shown_node(node: NodePlan) -> bool:
    """Returns whether a node sends something or was decided; groups of operations that never run do neither."""
    return node.strategy != node.exact_strategy or any(map(is_shown, chosen_and_exact_bytes(node)))


def _bytes_or_dash(num_bytes: float) -> str:
    return format_bytes(num_bytes) if is_shown(num_bytes) else "-"


def _header(plan: BilevelPlanData) -> str:
    rows = [
        ("step", seconds_line(plan)),
        ("loss", loss_line(plan)),
        ("sends", bytes_line(plan)),
        ("schedule", schedule_line(plan)),
        ("note", plan.message),
    ]
    return "\n".join([*wrapped(title(plan), "", "  "), "", *format_table([row for row in rows if row[1]], "  ")])


def _nodes(plan: BilevelPlanData) -> str:
    num_changed = sum(node.strategy != node.exact_strategy for node in plan.nodes)
    if not has_traffic(plan):
        rows = [
            ("name", "chosen", "takes"),
            *((node.name, node.strategy, format_s(node.seconds)) for node in plan.nodes),
        ]
        return "\n".join(["Choices", "", *format_table(rows, "  ", right=(2,), wrap=(0, 1))])
    rows = [("name", "collective", "", "chosen", "sends", "exact", "takes", "exact")]
    for node in plan.nodes:
        if not is_shown_node(node):
            continue
        chosen_bytes, exact_bytes = map(_bytes_or_dash, chosen_and_exact_bytes(node))
        times = (format_s(node.seconds), format_s(node.exact_seconds))
        direction, collective, count = traffic_texts(node)
        name = node.name if node.name.endswith(direction) else f"{node.name} {direction}"
        rows.append((name, collective, count, node.strategy, chosen_bytes, exact_bytes, *times))
    heading = f"Groups of operations: {len(plan.nodes)}, {num_changed} of them differ from the exact choice"
    return "\n".join([heading, "", *format_table(rows, "  ", right=(2, 4, 5, 6, 7), wrap=(0, 1))])


def _candidates(plan: BilevelPlanData) -> str:
    if plan.validation is None:
        return ""
    table, steps = plan.validation.table, plan.validation.steps
    rows = [("step", "loss", "increase", "trained", "name")]
    for candidate in table[:_MAX_CANDIDATES]:
        loss, increase = f"{candidate.loss:.4f}", f"{candidate.loss_increase:+.4f}"
        rows.append((format_s(candidate.seconds), loss, increase, f"{candidate.record.steps:,} steps", candidate.name))
    heading = f"Candidates: {len(table)} trained from the start for {steps:,} steps in all, the best first"
    more = [f"  ... and {len(table) - _MAX_CANDIDATES} more"] if len(table) > _MAX_CANDIDATES else []
    return "\n".join([heading, "", *format_table(rows, "  ", right=(0, 1, 2, 3), wrap=(4,)), *more])


def _notes(plan: BilevelPlanData) -> str:
    return (
        "\n".join(["Notes", "", *(line for note in plan.notes for line in wrapped(note, "  ", "    "))])
        if plan.notes
        else ""
    )


def format_page(plan: BilevelPlanData) -> str:
    """Returns the page's text."""
    notes = [note for note in (schedule_line(plan), plan.message) if note]
    body = [
        f"<h1>{escape(title(plan))}</h1>",
        "".join(f"<div class=dim>{escape(note)}</div>" for note in notes),
        _cards(plan),
        _bars(plan),
        _node_table(plan),
        _candidate_table(plan.validation) if plan.validation else "",
        "".join(["<h2>Notes</h2><ul>", *(f"<li>{escape(n)}</li>" for n in plan.notes), "</ul>"]) if plan.notes else "",
        f"<details><summary>As text</summary><pre>{escape(format_plan(plan))}</pre></details>",
    ]
    return document(title(plan), body)


def _cards(plan: BilevelPlanData) -> str:
    pairs = [(format_s(plan.seconds), f"predicted step, {plan.cost_ratio:.1%} of {baseline_name(plan)}")]
    if not plan.all_exact:
        bound = "" if plan.max_loss_increase is None else f", {plan.max_loss_increase:.4g} allowed"
        how = "measured" if plan.validation else "predicted, not measured"
        pairs.append((f"{plan.loss_increase:+.4g}", f"loss over the exact choice's, {how}{bound}"))
        num_changed = sum(node.strategy != node.exact_strategy for node in plan.nodes)
        pairs.append((f"{num_changed} of {len(plan.nodes)}", "groups differ from the exact choice"))
    if has_traffic(plan):
        pairs.insert(2, (format_bytes(plan.sent_bytes), bytes_line(plan).split(" ", 2)[2]))
    return cards(*pairs)


def _bars(plan: BilevelPlanData) -> str:
    """Draws the seconds of each node, with the exact choice and as chosen, to one scale."""
    if not has_traffic(plan):
        return ""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(plan.nodes))]
    rows = [
        ("the exact choice", [node.exact_seconds for node in plan.nodes]),
        (f"as chosen{', after the exact choice' if plan.exact_share else ''}", [node.seconds for node in plan.nodes]),
    ]
    whole = max(sum(seconds) for _, seconds in rows)
    bars = ""
    for name, seconds in rows:
        pieces = [(node.name, s, format_s(s), c) for node, s, c in zip(plan.nodes, seconds, colours, strict=True)]
        bars += f"<div style='margin:10px 0 3px'>{name} <span class=dim>{format_s(sum(seconds))}</span></div>"
        bars += plain_bar(pieces, whole)
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(node.name)} '
        f"<span class=dim>{format_s(node.exact_seconds)} → {format_s(node.seconds)}</span></span>"
        for node, colour in zip(plan.nodes, colours, strict=True)
        if node.exact_seconds or node.seconds
    )
    return f"<h2>Communication of a step</h2>{bars}<div class=key>{key}</div>"


def _node_table(plan: BilevelPlanData) -> str:
    if not has_traffic(plan):
        rows = [(node.name, node.strategy, format_s(node.seconds)) for node in plan.nodes]
        return f"<h2>Choices</h2>{table(('name', 'chosen', 'takes'), rows, right=(2,))}"
    rows = []
    for node in plan.nodes:
        num_bytes = chosen_and_exact_bytes(node)
        if not is_shown_node(node):
            continue
        seconds = (node.seconds, node.exact_seconds)
        rows.append(
            (node.name, *traffic_texts(node), node.strategy, *map(format_bytes, num_bytes), *map(format_s, seconds))
        )
    head = ("group", "direction", "collective", "", "chosen", "sends", "exact", "takes", "exact")
    return f"<h2>Groups of operations</h2>{table(head, rows, right=(3, 5, 6, 7, 8))}"


def _candidate_table(validation: ValidationRuns) -> str:
    """Draws loss against seconds of those that were trained to the end, numbered as in the table of all."""
    rows = []
    for number, candidate in enumerate(validation.table, start=1):
        loss = (f"{candidate.loss:.4f}", f"{candidate.loss_increase:+.4f}", f"{candidate.record.steps:,}")
        shown_number = str(number) if number <= len(validation.finalists) else ""
        rows.append((shown_number, candidate.name, format_s(candidate.seconds), *loss))
    head = ("", "candidate", "step", "loss", "increase", "steps")
    trained = f"{len(validation.table)} trained from the start, {validation.steps:,} steps in all"
    summary = f"{trained}; those without a number were dropped"
    return (
        f"<h2>Candidates</h2><div class=dim>{summary} on the way, with fewer steps</div>"
        f"{_picture(validation.finalists)}{table(head, rows, right=(0, 2, 3, 4, 5))}"
    )


def _picture(finalists: Sequence[TrainedCandidate]) -> str:
    """Draws loss against seconds, the finalists by their numbers; those whose loss is not finite are left out."""
    dots = []
    for i, t in enumerate(finalists, start=1):
        if not math.isfinite(t.loss):
            continue
        name = " chosen" if i == 1 else " exact" if t.name == "exact" else ""
        colour = "second" if i == 1 else "first" if t.name == "exact" else "other"
        dots.append(Dot(t.seconds, t.loss, f"{i}{name}", f"{t.name}: {format_s(t.seconds)}, {t.loss:.4f}", colour))
    if not dots:
        return ""
    seconds, losses = [dot.x for dot in dots], [dot.y for dot in dots]
    return scatter(
        "Loss against predicted step",
        dots,
        across=(format_s(min(seconds)), "predicted step", format_s(max(seconds))),
        up=(f"loss {min(losses):.4f}", f"loss {max(losses):.4f}"),
    )
