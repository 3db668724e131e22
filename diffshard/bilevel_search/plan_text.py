"""A plan of the bilevel search as text: what each group of collectives does, and what that saves and costs."""

from diffshard.bilevel_search.base import BilevelPlanData, GroupPlan
from diffshard.plans.formats import format_bytes, format_count, format_devices, format_s, format_table

_MAX_CANDIDATES = 12
"""Lines of the table of candidates; the page shows all of them."""


def format_plan(plan: BilevelPlanData) -> str:
    """Returns the table that `print(plan)` shows."""
    return "\n\n".join(filter(None, (_header(plan), _groups(plan), _candidates(plan), _notes(plan))))


def title(plan: BilevelPlanData) -> str:
    """Returns what it is a plan of, in a line."""
    what = "communication" if has_traffic(plan) else format_count(len(plan.groups), "choice")
    where = f" on {format_devices(plan.mesh_axes)}" if plan.mesh_axes else ""
    return f"Plan of {what}{where}{f', {plan.hardware.name}' if plan.hardware else ''}"


def has_traffic(plan: BilevelPlanData) -> bool:
    """Returns whether the space told what its groups send."""
    return any(group.traffic for group in plan.groups)


def reference_name(plan: BilevelPlanData) -> str:
    """Returns whose cost ratios are formed with."""
    return "the mean strategies'" if plan.all_exact else "the exact choice's"


def seconds_line(plan: BilevelPlanData) -> str:
    """Returns predicted seconds beside the exact choice's."""
    reference = f"{reference_name(plan)} {format_s(plan.exact_seconds)}"
    return f"{format_s(plan.seconds)} predicted, {plan.cost_ratio:.1%} of {reference}"


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
    sent, exact = plan.sent_bytes, plan.exact_sent_bytes
    share = f"{sent / exact:.1%} of the exact choice's {format_bytes(exact)}" if exact else "as the exact choice"
    return f"{format_bytes(sent)} by each device in a step, {share}"


def schedule_line(plan: BilevelPlanData) -> str:
    """Returns which share of training runs the exact choice; empty where none does."""
    if not plan.exact_share:
        return ""
    return (
        f"the first {plan.exact_share:.0%} of training runs the exact choice; seconds and bytes are the mean over all"
    )


def group_kind(group: GroupPlan) -> tuple[str, str, str]:
    """Returns direction, kind with its axes, and executions in a step."""
    traffic = group.traffic
    if traffic is None:
        return "", "", ""
    return traffic.direction, " ".join((traffic.kind, "+".join(traffic.axes))).strip(), f"{traffic.count:,g}x"


def chosen_and_exact_bytes(group: GroupPlan) -> tuple[float, float]:
    """Returns what each device sends for a group, as chosen and as the exact choice."""
    return (group.traffic.sent_bytes if group.traffic else 0.0), group.exact_sent_bytes


def _header(plan: BilevelPlanData) -> str:
    rows = [
        ("step", seconds_line(plan)),
        ("loss", loss_line(plan)),
        ("sends", bytes_line(plan)),
        ("schedule", schedule_line(plan)),
        ("note", plan.message),
    ]
    return "\n".join([title(plan), "", *format_table([row for row in rows if row[1]], "  ")])


def _groups(plan: BilevelPlanData) -> str:
    changed = sum(group.strategy != group.exact_strategy for group in plan.groups)
    if not has_traffic(plan):
        rows = [("name", "chosen", "takes"), *((g.name, g.strategy, format_s(g.seconds)) for g in plan.groups)]
        return "\n".join(["Choices", "", *format_table(rows, "  ", right=(2,))])
    rows = [("name", "direction", "collective", "", "chosen", "sends", "exact", "takes", "exact")]
    for group in plan.groups:
        chosen, exact = (format_bytes(num_bytes) for num_bytes in chosen_and_exact_bytes(group))
        times = (format_s(group.seconds), format_s(group.exact_seconds))
        rows.append((group.name, *group_kind(group), group.strategy, chosen, exact, *times))
    heading = f"Groups of sites: {len(plan.groups)}, {changed} of them differ from the exact choice"
    return "\n".join([heading, "", *format_table(rows, "  ", right=(3, 5, 6, 7, 8))])


def _candidates(plan: BilevelPlanData) -> str:
    if plan.proof is None:
        return ""
    table, steps = plan.proof.table, plan.proof.steps
    rows = [("step", "loss", "increase", "trained", "name")]
    for trained in table[:_MAX_CANDIDATES]:
        loss, increase = f"{trained.loss:.4f}", f"{trained.loss_increase:+.4f}"
        rows.append((format_s(trained.seconds), loss, increase, f"{trained.record.steps:,} steps", trained.name))
    heading = f"Candidates: {len(table)} trained from the start for {steps:,} steps in all, the best first"
    more = [f"  ... and {len(table) - _MAX_CANDIDATES} more"] if len(table) > _MAX_CANDIDATES else []
    return "\n".join([heading, "", *format_table(rows, "  ", right=(0, 1, 2, 3)), *more])


def _notes(plan: BilevelPlanData) -> str:
    return "\n".join(["Notes", "", *(f"  {note}" for note in plan.notes)]) if plan.notes else ""
