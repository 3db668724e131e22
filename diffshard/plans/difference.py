"""Two plans side by side: what differs in how arrays are split, what layers take and send, and what the step costs.

Arguments and results are matched by their paths, layers by their names. Operations are matched in program order, as far
as both functions have the same ones; a note names the first operation that differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from diffshard.plans.base import Operation, PlanData, Tensor
from diffshard.plans.difference_data import (
    Alignment,
    ArrayDifference,
    DifferenceData,
    LayerDifference,
    OperationDifference,
    Total,
    align_operations,
)
from diffshard.plans.difference_views import difference_page, format_difference
from diffshard.plans.formats import format_array, format_devices, short_name
from diffshard.plans.layers import layers_of_operations
from diffshard.plans.page_elements import framed
from diffshard.plans.patterns import readable_path
from diffshard.plans.summary import communication, device_bytes, operation_name, result_type

_EQUAL_SHARE = 1e-9  # of the larger: quantities that differ by less are equal up to rounding


@dataclass(frozen=True)
class PlanDifference(DifferenceData):
    """What differs between two plans; `print` shows it, `html` makes a page, and notebooks show that.

    Its fields are those of `DifferenceData`.
    """

    def __str__(self) -> str:
        return format_difference(self)

    def html(self) -> str:
        """Returns the difference as a self-contained page for a browser."""
        return difference_page(self)

    def _repr_html_(self) -> str:
        return framed(self.html())


def difference_of(first: PlanData, second: PlanData) -> PlanDifference:
    """Returns what differs between two plans, of any functions, meshes and hardware."""
    alignment = align_operations(first, second)
    matched = alignment.pairs
    arguments, num_arguments = _arrays(first, second, first.arguments, second.arguments)
    outputs, num_outputs = _arrays(first, second, first.outputs, second.outputs)
    layers, num_layers = _layers(first, second)
    return PlanDifference(
        titles=(_title(first), _title(second)),
        totals=(
            Total("step", "s", first.step_s, second.step_s),
            Total("computing", "s", first.compute_s, second.compute_s),
            Total("communicating", "s", first.step_s - first.compute_s, second.step_s - second.compute_s),
            Total("sent by a device", "bytes", sum(_sent(first)), sum(_sent(second))),
            Total("arguments on a device", "bytes", _held(first), _held(second)),
            Total("peak memory", "bytes", first.peak_bytes, second.peak_bytes),
        ),
        arguments=arguments,
        outputs=outputs,
        layers=layers,
        operations=_operations(first, second, matched),
        counts=(num_arguments, num_outputs, num_layers, sum(first.operations[i].kind != "input" for i, _ in matched)),
        notes=_notes(first, second, alignment),
    )


def _title(plan: PlanData) -> str:
    return f"{short_name(plan.function)} on {format_devices(plan.mesh_axes)}, {plan.hardware.name}, by {plan.executor}"


def _sent(plan: PlanData) -> list[float]:
    """Returns the bytes that a device sends for each operation of a plan in one step."""
    sent = [0.0] * len(plan.operations)
    for c in plan.collectives:
        kind = cast(CollectiveKind, c.kind)
        sent[c.operation] += float(collective_sent_bytes(kind, c.num_bytes, plan.mesh_axes[c.axis])) * c.count
    return sent


def _held(plan: PlanData) -> float:
    return sum(device_bytes(plan, tensor) for tensor in plan.arguments)


def _differs(first: float, second: float) -> bool:
    return abs(first - second) > _EQUAL_SHARE * max(abs(first), abs(second))


def _arrays(
    first: PlanData, second: PlanData, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[tuple[ArrayDifference, ...], int]:
    """Returns the arrays that differ, and how many there are."""
    by_path = {tensor.path: tensor for tensor in theirs}
    paths = dict.fromkeys([*(t.path for t in ours), *by_path])
    own = {tensor.path: tensor for tensor in ours}
    found = []
    for path in paths:
        one, other = own.get(path), by_path.get(path)
        held = device_bytes(first, one) if one else 0.0, device_bytes(second, other) if other else 0.0
        specs = one.spec if one else None, other.spec if other else None
        types = [format_array(tensor) for tensor in (one, other) if tensor]
        if specs[0] != specs[1] or types[0] != types[-1] or _differs(*held):
            found.append(ArrayDifference(readable_path(path), " or ".join(dict.fromkeys(types)), specs, held))
    return tuple(found), len(paths)


def _layers(first: PlanData, second: PlanData) -> tuple[tuple[LayerDifference, ...], int]:
    """Returns the layers that take or send something else, in the order of the first plan, and how many there are."""
    amounts = [_amounts_of_layers(plan) for plan in (first, second)]
    names = dict.fromkeys([*amounts[0], *amounts[1]])
    found = []
    for name in names:
        (compute, wait, sent), others = (each.get(name, (0.0, 0.0, 0.0)) for each in amounts)
        pairs = (compute, others[0]), (wait, others[1]), (sent, others[2])
        if any(_differs(*pair) for pair in pairs):
            found.append(LayerDifference(name, *pairs))
    return tuple(found), len(names)


def _amounts_of_layers(plan: PlanData) -> dict[str, tuple[float, float, float]]:
    """Returns seconds of computing and communicating and sent bytes of each layer."""
    seconds, sent = communication(plan).seconds, _sent(plan)
    amounts: dict[str, tuple[float, float, float]] = {}
    for i, name in enumerate(layers_of_operations(plan)):
        before = amounts.get(name, (0.0, 0.0, 0.0))
        amounts[name] = before[0] + plan.operations[i].compute_s, before[1] + seconds[i], before[2] + sent[i]
    return amounts


def _operations(
    first: PlanData, second: PlanData, matched: Sequence[tuple[int, int]]
) -> tuple[OperationDifference, ...]:
    communications = communication(first), communication(second)
    found = []
    for indices in matched:
        one, other = first.operations[indices[0]], second.operations[indices[1]]
        if not one.results or one.kind == "input":
            continue
        kinds = tuple(sorted(c.kinds[i]) for c, i in zip(communications, indices, strict=True))
        specs = one.value_specs[0], other.value_specs[0]
        if specs[0] == specs[1] and kinds[0] == kinds[1]:
            continue
        seconds = tuple(
            o.compute_s + c.seconds[i] for o, c, i in zip((one, other), communications, indices, strict=True)
        )
        name = operation_name(first, indices[0])
        both = tuple(kinds[0]), tuple(kinds[1])
        found.append(OperationDifference(indices, name, result_type(one), specs, (seconds[0], seconds[1]), both))
    return tuple(found)


def _notes(first: PlanData, second: PlanData, alignment: Alignment) -> tuple[str, ...]:
    notes = []
    matched, not_compared = alignment
    missing = tuple(
        len(plan.operations) - len(matched) - number for plan, number in zip((first, second), not_compared, strict=True)
    )
    if any((*missing, *not_compared)):
        start = next((n for n, (i, j) in enumerate(matched) if (i, j) != (n, n)), None)
        index = start if start is not None else _common_beginning(matched)
        there = " and ".join(
            f"{which} has {_operation_text(plan.operations, index)}"
            for which, plan in (("the first", first), ("the second", second))
        )
        notes.append(
            f"The functions differ from operation {index:,} on, where {there}. {missing[0]:,} operations of the first "
            f"and {missing[1]:,} of the second have no partner and are compared by layer only."
        )
    if any(not_compared):
        notes.append(
            f"{not_compared[0]:,} operations of the first and {not_compared[1]:,} of the second are in layers with too "
            "many to look for their partners: they are not compared one by one, only by layer."
        )
    for what, field in (
        ("products have other number formats", "format"),
        ("sums are sent in other formats", "sent_in"),
        ("arrays are kept in other formats", "kept_in"),
    ):
        pairs = ((i, first.operations[i], second.operations[j]) for i, j in matched)
        differing = [i for i, one, other in pairs if getattr(one, field) != getattr(other, field)]
        if differing:
            names = sorted({operation_name(first, i) for i in differing})
            notes.append(f"{len(differing):,} {what}: {', '.join(names)}.")
    if dict(first.mesh_axes) != dict(second.mesh_axes):
        meshes = f"{format_devices(first.mesh_axes)} and {format_devices(second.mesh_axes)}"
        notes.append(f"The meshes differ: {meshes}. An axis of one name may have different sizes.")
    if first.hardware != second.hardware:
        notes.append(f"The hardware differs: {_hardware_words(first, second)}. Seconds differ by that, too.")
    return tuple(notes)


def _common_beginning(matched: Sequence[tuple[int, int]]) -> int:
    return sum(i == j == n for n, (i, j) in enumerate(matched))


def _operation_text(operations: Sequence[Operation], index: int) -> str:
    if index >= len(operations):
        return "no more operations"
    operation = operations[index]
    return f"{operation.signature} ({operation.source or operation.kind})"


def _hardware_words(first: PlanData, second: PlanData) -> str:
    names = first.hardware.name, second.hardware.name
    return " and ".join(names) if names[0] != names[1] else f"{names[0]} with other links or rates"
