"""A plan as text: what is sharded how, why, what it costs, and how far from optimal it is at most."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diffshard.plans.base import Operation, PlanData, Spec, Tensor
from diffshard.plans.patterns import Group, format_bytes, format_s, group_names, readable_path

MOST_OPERATIONS = 24
_TIE = 1e-6  # of a step: below, two shardings take the same time and the smaller was taken


class OperationGroup(NamedTuple):
    """Operations of equal names, types and shardings.

    Attributes:
      name: module path and primitive, `backward` in front where it belongs to a derivative.
      operations: indices into `PlanData.operations`.
      result: type of the first result; `spec` how it is left.
      compute_s, collective_s: of all of them in one step.
      collectives: (kind, axis) of the communication that they cause.
    """

    name: str
    operations: tuple[int, ...]
    result: str
    spec: Spec
    compute_s: float
    collective_s: float
    collectives: tuple[tuple[str, str], ...]


def format_plan(plan: PlanData) -> str:
    """The table that `print(plan)` shows."""
    parts = [_header(plan), _arguments(plan), _operations(plan)]
    if plan.notes:
        parts.append("Notes\n" + "\n".join(f"  {note}" for note in plan.notes))
    return "\n\n".join(parts)


def short_name(function: str) -> str:
    """A function's name without the functions that it was made in."""
    return function.rsplit("<locals>.", 1)[-1]


def format_devices(axes: Mapping[str, int]) -> str:
    """`8 devices (data 2 x model 4)`."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "no axes"
    return f"{format_count(math.prod(axes.values()), 'device')} ({mesh})"


def format_count(number: int, noun: str) -> str:
    """`1 device`, `8 devices`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def format_spec(spec: Spec) -> str:
    """`replicated`, or for each dimension its mesh axes or a dot: `·, model`."""
    if not any(spec):
        return "replicated"
    return ", ".join("+".join(axes) or "·" for axes in spec)


def format_array(tensor: Tensor) -> str:
    """A type as JAX writes it: `float32[512,2048]`."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def device_bytes(plan: PlanData, tensor: Tensor) -> float:
    """Bytes of one device's part."""
    parts = math.prod(plan.mesh_axes[axis] for axes in tensor.spec for axis in axes)
    return tensor.num_bytes / parts


def argument_groups(plan: PlanData) -> list[Group]:
    """Arguments of equal shape, sharding and reason whose names follow a pattern."""
    keys = [(t.shape, t.dtype, t.spec, t.given, *_reason_key(plan, t)) for t in plan.arguments]
    return group_names([readable_path(t.path) for t in plan.arguments], keys)


def operation_groups(plan: PlanData) -> list[OperationGroup]:
    """Operations of equal types and shardings whose names follow a pattern; those that cost nothing are left out."""
    seconds = [0.0] * len(plan.operations)
    kinds: list[set[tuple[str, str]]] = [set() for _ in plan.operations]
    for c in plan.collectives:
        seconds[c.operation] += c.seconds
        kinds[c.operation].add((c.kind, c.axis))
    costly = [i for i, o in enumerate(plan.operations) if o.results and (o.compute_s > 0 or seconds[i] > 0)]
    names = [operation_name(plan, i) for i in costly]
    keys = [(result_type(o), o.value_specs[0], tuple(sorted(kinds[i]))) for i in costly for o in (plan.operations[i],)]
    found = []
    for group in group_names(names, keys):
        members = tuple(costly[m] for m in group.members)
        result, spec, collectives = keys[group.members[0]]
        compute_s = sum(plan.operations[i].compute_s for i in members)
        collective_s = sum(seconds[i] for i in members)
        found.append(OperationGroup(group.pattern, members, result, spec, compute_s, collective_s, collectives))
    return found


def operation_name(plan: PlanData, index: int) -> str:
    """Module path and primitive of an operation, or the path of an argument that is gathered."""
    operation = plan.operations[index]
    if operation.kind == "input":
        return readable_path(plan.arguments[index].path)
    modules, is_backward = module_path(operation)
    primitive = operation.signature.split("(", 1)[0]
    return f"{'backward ' if is_backward else ''}{'/'.join((*modules, primitive))}"


def module_path(operation: Operation) -> tuple[tuple[str, ...], bool]:
    """The modules that an operation is in, or else its function's name, and whether it is of a backward pass."""
    modules = []
    for part in operation.scope.split("/"):
        while match := re.fullmatch(r"\w+\((.*)\)", part):
            part = match.group(1)
        if (
            part
            and "->" not in part
            and part not in ("checkpoint", "rematted_computation", "while", "body", "closed_call")
        ):
            modules.append(part)
    if not modules:
        function = re.search(r"\(([\w.<>]+)\)$", operation.source)
        modules = [function.group(1).split(".")[-1]] if function else []
    return tuple(modules), "transpose(" in operation.scope


def result_type(operation: Operation) -> str:
    """Type of an operation's first result."""
    after = operation.signature.split(" -> ", 1)
    return after[1].split("], ", 1)[0].rstrip("]") + "]" if len(after) == 2 and after[1] else ""


def verdict(plan: PlanData) -> str:
    """How good the plan is known to be, in a sentence."""
    found = {
        "optimal": "no plan in the search space is predicted to be faster",
        "time limit": "the best found when the time limit came",
        "interrupted": "the best found when it was interrupted",
    }.get(plan.status, "the best that the solver found")
    if plan.status == "optimal":
        return found if plan.gap < 1e-8 else f"{found} by more than that"
    if not math.isfinite(plan.lower_bound_s) or plan.lower_bound_s <= 0:
        return f"{found}; no bound was reached"
    return f"{found}, at most {_percent(plan.gap)} of it could be saved"


def collective_totals(plan: PlanData) -> list[tuple[str, str, float, float, float]]:
    """(kind, axis, executions, bytes, seconds) in one step, the dearest first."""
    totals: dict[tuple[str, str], list[float]] = {}
    for c in plan.collectives:
        entry = totals.setdefault((c.kind, c.axis), [0.0, 0.0, 0.0])
        for i, amount in enumerate((c.count, c.count * c.num_bytes, c.seconds)):
            entry[i] += amount
    rows = [(kind, axis, e[0], e[1], e[2]) for (kind, axis), e in totals.items()]
    return sorted(rows, key=lambda row: -row[4])


def _header(plan: PlanData) -> str:
    communication_s = plan.step_s - plan.compute_s
    lines = [
        f"Plan of {short_name(plan.function)} on {format_devices(plan.mesh_axes)}, {plan.hardware.name}",
        "",
        f"  step     {format_s(plan.step_s)} predicted: computing {format_s(plan.compute_s)}, "
        f"communicating {format_s(communication_s)}",
    ]
    rows = [
        ("", kind, axis, f"{count:,.0f}x", format_bytes(size), format_s(seconds))
        for kind, axis, count, size, seconds in collective_totals(plan)
    ]
    lines += format_table(rows, "        ", right=(3, 4, 5))
    limit = plan.memory_limit_bytes
    used = "" if math.isinf(limit) else f" of {format_bytes(limit)} ({plan.peak_bytes / limit:.0%})"
    lines.append(f"  memory   {format_bytes(plan.peak_bytes)} at the peak on each device{used}")
    bound = format_s(plan.lower_bound_s) if math.isfinite(plan.lower_bound_s) else "none"
    lines.append(f"  bound    {bound}, gap {_percent(plan.gap)}: {verdict(plan)}")
    lines.append(f"  search   {format_s(plan.search_s)}, solver {plan.solver}, {plan.status}")
    return "\n".join(lines)


def _arguments(plan: PlanData) -> str:
    whole = sum(t.num_bytes for t in plan.arguments)
    local = sum(device_bytes(plan, t) for t in plan.arguments)
    title = (
        f"Arguments: {len(plan.arguments)} arrays, {format_bytes(whole)}, of which a device holds {format_bytes(local)}"
    )
    rows = [("name", "", "type", "sharding", "device", "next best, what it adds")]
    for group in argument_groups(plan):
        members = [plan.arguments[i] for i in group.members]
        first, count = members[0], len(members)
        size = sum(device_bytes(plan, t) for t in members)
        times = f"{count}x" if count > 1 else ""
        rows.append(
            (
                group.pattern,
                times,
                format_array(first),
                format_spec(first.spec),
                format_bytes(size),
                reason(plan, first),
            )
        )
    return "\n".join([title, "", *format_table(rows, "  ", right=(1, 4))])


def reason(plan: PlanData, tensor: Tensor | Operation) -> str:
    """Why an array is sharded as it is: the next best sharding, and what that would add to the step."""
    if isinstance(tensor, Tensor) and tensor.given:
        return "given"
    if tensor.next_best_spec is None:
        return "no other"
    other = format_spec(tensor.next_best_spec)
    if math.isinf(tensor.next_best_s):
        return f"{other}: not possible"
    if tensor.next_best_s <= _TIE * plan.step_s:
        return f"{other}: the same"
    return f"{other}: +{format_s(tensor.next_best_s)}"


def _operations(plan: PlanData) -> str:
    groups = operation_groups(plan)
    dear = sorted(groups, key=lambda g: -(g.compute_s + g.collective_s))[:MOST_OPERATIONS]
    shown = [g for g in groups if any(g is other for other in dear)]
    rows = [("name", "", "result", "sharding", "compute", "communicate", "", "next best, what it adds")]
    for g in shown:
        kinds = ", ".join(f"{kind} {axis}" for kind, axis in g.collectives)
        times = f"{len(g.operations)}x" if len(g.operations) > 1 else ""
        communicate = format_s(g.collective_s) if g.collective_s else ""
        why = reason(plan, plan.operations[min(g.operations)])
        rows.append((g.name, times, g.result, format_spec(g.spec), format_s(g.compute_s), communicate, kinds, why))
    rest = [g for g in groups if not any(g is other for other in dear)]
    rest_s = sum(g.compute_s + g.collective_s for g in rest)
    title = f"Operations: {len(plan.operations):,}, the {len(shown)} dearest kinds in the program's order"
    lines = [title, "", *format_table(rows, "  ", right=(1, 4, 5))]
    if rest:
        lines.append(
            f"  ... and {len(rest)} more kinds, {format_s(rest_s)} together ({rest_s / max(plan.step_s, 1e-30):.0%})"
        )
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]], indent: str, right: Sequence[int] = ()) -> list[str]:
    """Lines of columns as wide as their widest cell, two spaces apart; `right` are flush with the right edge."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _reason_key(plan: PlanData, tensor: Tensor) -> tuple[Spec | None, str]:
    # Which of several equally good shardings comes first is chance; a table shall not split by it.
    is_tie = tensor.next_best_s <= _TIE * plan.step_s
    return (None, "tie") if is_tie else (tensor.next_best_spec, f"{tensor.next_best_s:.2g}")


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "unknown"
    return "0%" if share < 1e-8 else f"{100 * share:.0f}%" if share >= 0.995 else f"{100 * share:.2g}%"
