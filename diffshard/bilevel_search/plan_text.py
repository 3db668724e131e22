"""A plan of the bilevel search as text: what each group of collectives does, and what that saves and costs."""

from diffshard.bilevel_search.plan import BilevelPlan, GroupPlan
from diffshard.plans.formats import format_bytes, format_count, format_devices, format_s, format_table

MOST_CANDIDATES = 12


def format_plan(plan: BilevelPlan) -> str:
    """The table that `print(plan)` shows."""
    return "\n\n".join(filter(None, (_header(plan), _groups(plan), _candidates(plan), _notes(plan))))


def title(plan: BilevelPlan) -> str:
    """What it is a plan of, in a line."""
    what = "communication" if has_traffic(plan) else format_count(len(plan.groups), "choice")
    where = f" on {format_devices(plan.mesh_axes)}" if plan.mesh_axes else ""
    return f"Plan of {what}{where}{f', {plan.hardware.name}' if plan.hardware else ''}"


def has_traffic(plan: BilevelPlan) -> bool:
    """Whether the space told what its groups send."""
    return any(group.traffic for group in plan.groups)


def others(plan: BilevelPlan) -> str:
    """What ratios are formed with."""
    return "the mean strategies'" if plan.lossless else "the exact choice's"


def seconds_line(plan: BilevelPlan) -> str:
    """Predicted seconds beside the exact choice's."""
    return f"{format_s(plan.seconds)} predicted, {plan.cost_ratio:.1%} of {others(plan)} {format_s(plan.exact_seconds)}"


def loss_line(plan: BilevelPlan) -> str:
    """The increase of the loss, how it is known, and what is allowed."""
    if plan.lossless:
        return "the same with every choice"
    how = "measured by training" if plan.proof else "predicted by the search, not measured"
    bound = "" if plan.max_loss_increase is None else f"; {plan.max_loss_increase:.4g} allowed"
    return f"{plan.loss_increase:+.4g} over the exact choice's, {how}{bound}"


def bytes_line(plan: BilevelPlan) -> str:
    """What a device sends beside the exact choice's; empty where the space has no sites."""
    if not has_traffic(plan):
        return ""
    sent, exact = plan.sent_bytes, plan.exact_sent_bytes
    share = f"{sent / exact:.1%} of the exact choice's {format_bytes(exact)}" if exact else "as the exact choice"
    return f"{format_bytes(sent)} by each device in a step, {share}"


def schedule_line(plan: BilevelPlan) -> str:
    """Which share of training runs the exact choice; empty where none does."""
    if not plan.exact_share:
        return ""
    return (
        f"the first {plan.exact_share:.0%} of training runs the exact choice; seconds and bytes are the mean over all"
    )


def group_kind(group: GroupPlan) -> tuple[str, str, str]:
    """Direction, kind with its axes, and executions in a step."""
    traffic = group.traffic
    if traffic is None:
        return "", "", ""
    return traffic.direction, " ".join((traffic.kind, "+".join(traffic.axes))).strip(), f"{traffic.times:,}x"


def _header(plan: BilevelPlan) -> str:
    rows = [
        ("step", seconds_line(plan)),
        ("loss", loss_line(plan)),
        ("sends", bytes_line(plan)),
        ("schedule", schedule_line(plan)),
        ("note", plan.message),
    ]
    return "\n".join([title(plan), "", *format_table([row for row in rows if row[1]], "  ")])


def _groups(plan: BilevelPlan) -> str:
    changed = sum(group.strategy != group.exact_strategy for group in plan.groups)
    if not has_traffic(plan):
        rows = [("name", "chosen", "takes"), *((g.name, g.strategy, format_s(g.seconds)) for g in plan.groups)]
        return "\n".join(["Choices", "", *format_table(rows, "  ", right=(2,))])
    rows = [("name", "direction", "collective", "", "chosen", "sends", "exact", "takes", "exact")]
    for group in plan.groups:
        sent = group.traffic
        chosen, exact = (format_bytes(b) for b in ((sent.sent_bytes, sent.exact_sent_bytes) if sent else (0.0, 0.0)))
        times = (format_s(group.seconds), format_s(group.exact_seconds))
        rows.append((group.name, *group_kind(group), group.strategy, chosen, exact, *times))
    heading = f"Groups of sites: {len(plan.groups)}, of which {changed} differ from the exact choice"
    return "\n".join([heading, "", *format_table(rows, "  ", right=(3, 5, 6, 7, 8))])


def _candidates(plan: BilevelPlan) -> str:
    if plan.proof is None:
        return ""
    table, steps = plan.proof.table, plan.proof.steps
    rows = [("step", "loss", "increase", "trained", "name")]
    for tried in table[:MOST_CANDIDATES]:
        loss, increase = f"{tried.loss:.4f}", f"{tried.loss_increase:+.4f}"
        rows.append((format_s(tried.seconds), loss, increase, f"{tried.row.steps:,} steps", tried.name))
    heading = f"Candidates: {len(table)} trained from the start for {steps:,} steps in all, the best first"
    more = [f"  ... and {len(table) - MOST_CANDIDATES} more"] if len(table) > MOST_CANDIDATES else []
    return "\n".join([heading, "", *format_table(rows, "  ", right=(0, 1, 2, 3)), *more])


def _notes(plan: BilevelPlan) -> str:
    return "\n".join(["Notes", "", *(f"  {note}" for note in plan.notes)]) if plan.notes else ""
