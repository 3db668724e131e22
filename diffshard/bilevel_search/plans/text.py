"""A plan of the bilevel search as text: what each node takes, and what that saves and costs."""

from diffshard.bilevel_search.plans.base import BilevelPlanData, NodePlan
from diffshard.plans.formats import (
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
    how = "measured by training" if plan.proof else "predicted by the search, not measured"
    bound = "" if plan.max_loss_increase is None else f"; {plan.max_loss_increase:.4g} allowed"
    return f"{plan.loss_increase:+.4g} over the exact choice's, {how}{bound}"


def bytes_line(plan: BilevelPlanData) -> str:
    """Returns what a device sends beside the exact choice's; empty where the space does not tell."""
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
    """Returns what each device sends for a node, as chosen and as the exact choice."""
    return (node.traffic.sent_bytes if node.traffic else 0.0), node.exact_sent_bytes


def is_shown_node(node: NodePlan) -> bool:
    """Tells whether a node sends something or was decided; groups of sites that never run do neither."""
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
    heading = f"Groups of sites: {len(plan.nodes)}, {num_changed} of them differ from the exact choice"
    return "\n".join([heading, "", *format_table(rows, "  ", right=(2, 4, 5, 6, 7), wrap=(0, 1))])


def _candidates(plan: BilevelPlanData) -> str:
    if plan.proof is None:
        return ""
    table, steps = plan.proof.table, plan.proof.steps
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
