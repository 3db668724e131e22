"""Facts that texts and pages show: similar arguments and operations grouped, totals, and reasons."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from diffshard.plans.base import Operation, PlanData, PlannedObjective, Tensor, TriedShape
from diffshard.plans.page_elements import table
from diffshard.plans.plan_record import has_bound
from diffshard.plans.printing import (
    NamePattern,
    format_array,
    format_axes,
    format_bytes,
    format_count,
    format_percent,
    format_s,
    format_spec,
    format_table,
    group_names,
    is_shown,
    readable_path,
)
from search_spaces.partition_specs import NamedSpec

_EQUAL_SHARE = 1e-6  # of a step: shardings that differ by less take the same time up to rounding
_SCAN = ".<lambda>"  # flax's name for the scan over a module, before the module's own: `layers.<lambda>/layers`
_OF_EQUINOX = "eqx."  # the class of a layer, which Equinox writes after the layer's own place
_OF_JAX = ("checkpoint", "rematted_computation", "while", "body", "closed_call")  # parts of scopes that are not modules


class AlikeOperations(NamedTuple):
    """Operations of equal types and shardings whose names follow one pattern.

    Attributes:
      name: module path and primitive, `backward` in front where it belongs to a derivative.
      spec: the spec in which the first result is kept.
      compute_s, collective_s: seconds of all of them in one step.
      collectives: (kind, axis) of the communication that they cause.
    """

    name: str
    operations: tuple[int, ...]
    result: str
    spec: NamedSpec
    compute_s: float
    collective_s: float
    collectives: tuple[tuple[str, str], ...]


COMBINED = "combined"
"""The kind of the total of collectives that are too small to count."""
_COMBINED_SHARE = 1e-6  # of the step


class CollectiveTotal(NamedTuple):
    """All collectives of a kind along a mesh axis in one step: executions, bytes as predicted, and seconds."""

    kind: str
    axis: str
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    num_bytes: float
    seconds: float

    @property
    def time(self) -> str:
        """The seconds with a unit."""
        return "< 1 ns" if self.kind == COMBINED and self.seconds < 1e-9 else format_s(self.seconds)


class Communication(NamedTuple):
    """The communication of each operation.

    Attributes:
      kinds: for each operation the (kind, axis) of its collectives, each once, without those of 0 bytes.
    """

    seconds: list[float]
    kinds: list[tuple[tuple[str, str], ...]]


def device_bytes(plan: PlanData, tensor: Tensor) -> float:
    """Returns the bytes of an array that one device holds; none of one in the host's memory."""
    return 0.0 if tensor.on_host else local_bytes(tensor, plan.mesh_axes)


def local_bytes(tensor: Tensor, mesh_axes: Mapping[str, int]) -> float:
    """Returns the bytes of an array that one device of a mesh holds."""
    return tensor.num_bytes / math.prod(mesh_axes[axis] for axes in tensor.spec for axis in axes)


def place_words(tensor: Tensor) -> str:
    """Returns how an array is split, and that it is in the host's memory if it is."""
    return f"{format_spec(tensor.spec)} on host" if tensor.on_host else format_spec(tensor.spec)


def host_words(plan: PlanData) -> str:
    """Returns in words how much state is in the host's memory, and what its copies take."""
    count = sum(tensor.on_host for tensor in plan.arguments)
    return (
        f"{format_bytes(plan.host_bytes)} of each device's state in the host's memory, {count} arrays; copied to the "
        f"device and back in each step, which waits {format_s(plan.host_s)} for that"
    )


def alike_arguments(plan: PlanData) -> list[NamePattern]:
    """Groups arguments of equal shape, sharding and reason whose names follow a pattern."""
    keys = [(t.shape, t.dtype, t.spec, t.given, t.on_host, *_reason_key(plan, t)) for t in plan.arguments]
    return group_names([readable_path(t.path) for t in plan.arguments], keys)


def argument_rows(plan: PlanData, times: str) -> Iterator[tuple[Tensor, tuple[str, str, str, str, str, str]]]:
    """Yields a row of a table for arguments that are alike, with the first of them; those without bytes are left out.

    A row has name, number, type, sharding, bytes on a device, and the next best sharding; `times` is behind the number.
    """
    for group in alike_arguments(plan):
        tensors = [plan.arguments[i] for i in group.members]
        if is_shown(sum(t.num_bytes for t in tensors)):
            first, count = tensors[0], f"{len(tensors)}{times}" if len(tensors) > 1 else ""
            held = format_bytes(sum(device_bytes(plan, t) for t in tensors))
            yield first, (group.pattern, count, format_array(first), place_words(first), held, reason(plan, first))


def communication(plan: PlanData) -> Communication:
    """Collects the predicted collectives of each operation."""
    seconds = [0.0] * len(plan.operations)
    kinds: list[dict[tuple[str, str], None]] = [{} for _ in plan.operations]
    for c in plan.collectives:
        seconds[c.operation] += c.seconds
        if is_shown(c.num_bytes * c.count):
            kinds[c.operation][c.kind, c.axis] = None
    return Communication(seconds, [tuple(k) for k in kinds])


def alike_operations(plan: PlanData) -> list[AlikeOperations]:
    """Groups operations of equal types and shardings whose names follow a pattern; without those that cost nothing."""
    seconds, kinds = communication(plan)
    costly = [i for i, o in enumerate(plan.operations) if o.results and (o.compute_s > 0 or seconds[i] > 0)]
    names = [operation_name(plan, i) for i in costly]
    keys = [(result_type(o), o.value_specs[0], tuple(sorted(kinds[i]))) for i in costly for o in (plan.operations[i],)]
    groups = []
    for group in group_names(names, keys):
        members = tuple(costly[m] for m in group.members)
        result, spec, collectives = keys[group.members[0]]
        compute_s = sum(plan.operations[i].compute_s for i in members)
        collective_s = sum(seconds[i] for i in members)
        groups.append(AlikeOperations(group.pattern, members, result, spec, compute_s, collective_s, collectives))
    return groups


def dearest_operations(plan: PlanData) -> list[AlikeOperations]:
    """Returns `alike_operations`, those that take the most seconds together with their communication first."""
    return sorted(alike_operations(plan), key=lambda group: -(group.compute_s + group.collective_s))


def operation_name(plan: PlanData, index: int) -> str:
    """Returns module path and primitive of an operation, or the path of an argument that is gathered."""
    operation = plan.operations[index]
    if operation.kind == "input":
        return readable_path(plan.arguments[index].path)
    modules, is_backward = module_path(operation)
    primitive = operation.signature.split("(", 1)[0]
    return f"{'backward ' if is_backward else ''}{'/'.join((*modules, primitive))}"


def module_path(operation: Operation) -> tuple[tuple[str, ...], bool]:
    """Returns the modules of an operation, or else its function's name, and whether it is of a backward pass."""
    modules = modules_of(operation.scope)
    if not modules:
        function = re.search(r"\(([\w.<>]+)\)$", operation.source)
        modules = _own_name(function.group(1)) if function else ()
    return modules, "transpose(" in operation.scope


def _own_name(function: str) -> tuple[str, ...]:
    """Returns the last name that a user wrote in a function's qualified name: a method's class, not `<lambda>`."""
    names = [name for name in function.split(".") if not name.startswith(("<", "__"))]
    return (names[-1],) if names else ()


def modules_of(scope: str) -> tuple[str, ...]:
    """Returns the modules in a name stack, without the transformations around them."""
    modules: list[str] = []
    for part in scope.split("/"):
        module = part
        while match := re.fullmatch(r"\w+\((.*)\)", module):
            module = match.group(1)
        if not module or "->" in module or module in _OF_JAX or (modules and module.startswith(_OF_EQUINOX)):
            continue
        if module != part and module in modules:
            # A body repeats the module that it was traced in: `transpose(jvp(Net))/jvp(Net)/layer_0`.
            del modules[modules.index(module) :]
        while modules and modules[-1] == f"{module.removesuffix(_SCAN)}{_SCAN}":
            modules.pop()
        modules.append(module)
    return tuple(module.removesuffix(_SCAN) for module in modules)


def result_type(operation: Operation, result: int = 0) -> str:
    """Returns the type of one of an operation's results, empty if it has no such result."""
    types = operation.signature.partition(" -> ")[2].split("], ")
    return types[result].rstrip("]") + "]" if result < len(types) and types[result] else ""


def type_bytes(array: str) -> int:
    """Returns the bytes of a whole array from its type, such as `float32[512,2048]`."""
    dtype, _, dimensions = array.partition("[")
    shape = tuple(int(size) for size in dimensions.rstrip("]").split(",") if size.strip())
    return Tensor("", shape, dtype, ()).num_bytes


def objective_words(objective: PlannedObjective) -> str:
    """Returns a user's objective with its bound, as `energy_j 12.3, bound 12.1, gap 1.6%`."""
    if math.isinf(objective.lower_bound):
        return f"{objective.name} {objective.value:.6g}, no bound: it turned out not to be convex, or there was no time"
    gap = format_percent(objective.gap)
    return f"{objective.name} {objective.value:.6g}, bound {objective.lower_bound:.6g} if it is convex, gap {gap}"


def verdict(plan: PlanData) -> str:
    """Says in a sentence how good the plan is known to be."""
    quality = {
        "optimal": "no plan in the search space is predicted to be faster",
        "time limit": "the best found when the time limit came",
        "interrupted": "the best found when it was interrupted",
    }.get(plan.status, "the best that the solver found")
    if plan.objective is not None:
        return objective_words(plan.objective)
    if plan.status == "optimal":
        return quality if plan.gap < 1e-8 else f"{quality} by more"
    if not plan.certificate.has_bound:
        return f"{quality}; no bound was reached"
    return f"{quality}, at most {format_percent(plan.gap)} of it could be saved"


def collective_totals(plan: PlanData) -> list[CollectiveTotal]:
    """Adds up collectives of equal kind and axis; the ones that take longest come first.

    Those that take next to nothing, because compilers combine them with others, are one total, `COMBINED`, at the end.
    """
    totals: dict[tuple[str, str], list[float]] = {}
    for c in plan.collectives:
        entry = totals.setdefault((c.kind, c.axis), [0.0, 0.0, 0.0])
        for i, amount in enumerate((c.count, c.count * c.num_bytes, c.seconds)):
            entry[i] += amount
    shown = [CollectiveTotal(*key, *entry) for key, entry in totals.items() if is_shown(entry[1])]
    combined = [total for total in shown if total.seconds < _COMBINED_SHARE * plan.step_s]
    rest = sorted(set(shown) - set(combined), key=lambda total: -total.seconds)
    sums = (sum(column) for column in zip(*(total[2:] for total in combined), strict=True))
    return [*rest, *([CollectiveTotal(COMBINED, "", *sums)] if combined else [])]


def reason(plan: PlanData, tensor: Tensor | Operation) -> str:
    """Says why an array is sharded as it is: the next best sharding, and what that would add to the step."""
    if isinstance(tensor, Tensor) and tensor.given:
        return "given"
    if tensor.next_best_spec is None:
        return "no other"
    other = format_spec(tensor.next_best_spec)
    if math.isinf(tensor.next_best_s):
        return f"{other}: not possible"
    if tensor.next_best_s <= _EQUAL_SHARE * plan.step_s:
        return f"{other}: the same"
    return f"{other}: +{format_s(tensor.next_best_s)}"


def _reason_key(plan: PlanData, tensor: Tensor) -> tuple[NamedSpec | None, str]:
    # Which of several equally good shardings comes first is chance, so it is not used to group rows.
    is_equal = tensor.next_best_s <= _EQUAL_SHARE * plan.step_s
    return (None, "equal") if is_equal else (tensor.next_best_spec, f"{tensor.next_best_s:.2g}")


MAX_LINES = 5
"""Lines of the text for shapes that were not chosen; the page has all of them."""


def shape_lines(plan: PlanData) -> list[str]:
    """Returns the lines of a plan's text about shapes of the mesh that were not chosen; none where a mesh was given."""
    if not plan.shapes:
        return []
    others = [shape for shape in plan.shapes if dict(shape.mesh_axes) != dict(plan.mesh_axes)]
    rows = [("", format_axes(shape.mesh_axes), _outcome(shape)) for shape in others[:MAX_LINES]]
    more = f"; {len(others) - MAX_LINES} more are not shown" if len(others) > MAX_LINES else ""
    best = "best" if plan.objective else "fastest"
    title = f"  mesh     the {best} of {format_count(len(plan.shapes), 'shape')}{more}"
    return [title, *format_table(rows, " " * 9)]


def shape_table(plan: PlanData) -> str:
    """Returns a page's section about the shapes of the mesh; "" where a mesh was given."""
    if not plan.shapes:
        return ""
    rows = [
        (
            format_axes(shape.mesh_axes),
            _best(shape),
            "nothing fits" if shape.status == "infeasible" else _bound(shape),
            shape.status,
            format_s(shape.search_s),
        )
        for shape in plan.shapes
    ]
    head = ("shape", "best plan", "at least", "search", "took")
    return f"<h2>Shapes of the mesh</h2>{table(head, rows, right=(1, 2, 4))}"


def _best(shape: TriedShape) -> str:
    if shape.objective is not None:
        return f"{shape.objective.name} {shape.objective.value:.6g}"
    return "" if shape.step_s is None else format_s(shape.step_s)


def _bound(shape: TriedShape) -> str:
    if shape.objective is not None:
        return f"{shape.objective.lower_bound:.6g}" if math.isfinite(shape.objective.lower_bound) else ""
    return format_s(shape.lower_bound_s) if has_bound(shape.lower_bound_s, 1.0) else ""


def _outcome(shape: TriedShape) -> str:
    if shape.status == "infeasible":
        return "no plan fits the memory"
    bound = f"at least {_bound(shape)}" if _bound(shape) else "no bound"
    return f"{_best(shape)}, {bound}" if _best(shape) else f"{bound}, {shape.status}"
