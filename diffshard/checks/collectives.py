"""The collectives of a compiled program, read from the HLO text of XLA's CPU and GPU backends.

The CPU backend has no reduce-scatter: it reduces everything on every device, and slices. If each device uses only its
own slice of an all-reduce's result, the record says that the all-reduce stands for a reduce-scatter.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cost.base import CollectiveKind
from diffshard.checks.collective_records import CollectiveRecord, axes_of_groups, axes_of_pairs, bits_of_dtype
from diffshard.checks.hlo import Computation, Instruction, Module, arrays, parse, parts_of_tuple, replica_groups, size

_KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
# Instructions whose result has the elements of their operand.
_ELEMENT_BY_ELEMENT = frozenset({"bitcast", "copy", "convert", "reshape", "transpose", "all-reduce-done"})

_Callers = list[tuple[Computation, Instruction]]


def hlo_collectives(hlo: str, axis_sizes: Mapping[str, int]) -> list[CollectiveRecord]:
    """Returns the collectives in which one device takes part.

    An asynchronous pair counts once, by its start. A loop's body counts as often as it runs, or once if XLA does not
    know how often; of several branches the one with most bytes counts. Groups of one device send nothing and do not
    count. All-reduces that stand for reduce-scatters have `sliced_axes`; `with_reduce_scatters` turns them into these.

    Args:
      hlo: `compiled.as_text()`, or the text of one module.
      axis_sizes: `mesh.shape`; devices are numbered by their place in the mesh, row-major.

    Returns:
      Records in the order of the text, from the entry computation on; `source` is the operation's name in the traced
      function.

    Raises:
      ValueError: `hlo` has no entry computation.
    """
    module = parse(hlo)
    return list(_of_computation(module, module.entry, 1.0, dict(axis_sizes)))


def kind_of(instruction: Instruction) -> CollectiveKind | None:
    """Returns the kind of a collective or of its asynchronous start; None for every other instruction."""
    return _KINDS.get(instruction.opcode.removesuffix("-start"))


def device_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """Returns the devices that one collective joins: its replica groups, or the (source, target) pairs of a permute.

    Raises:
      ValueError: replica groups in a spelling that is not known.
    """
    if kind_of(instruction) == "collective_permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
        return [[int(s), int(t)] for s, t in re.findall(r"\{(\d+),(\d+)\}", pairs[1] if pairs else "")]
    return replica_groups(instruction.attributes, num_devices)


def _of_computation(
    module: Module, name: str, count: float, axis_sizes: Mapping[str, int]
) -> Iterator[CollectiveRecord]:
    computation = module.computations.get(name)
    for instruction in computation.instructions if computation else ():
        if computation and kind_of(instruction):
            collective = collective_record(instruction, axis_sizes, count)
            if collective.num_devices > 1:
                yield _with_slices(module, computation, instruction, collective)
            continue
        if instruction.opcode == "conditional":
            branches = [list(_of_computation(module, n, count, axis_sizes)) for n in instruction.callees]
            yield from max(branches, key=lambda branch: sum(c.num_bytes * c.count for c in branch), default=[])
            continue
        trips = instruction.trip_count if instruction.opcode == "while" else None
        for callee in instruction.callees:
            yield from _of_computation(module, callee, count * float(1 if trips is None else trips), axis_sizes)


def _with_slices(
    module: Module, computation: Computation, instruction: Instruction, collective: CollectiveRecord
) -> CollectiveRecord:
    if collective.kind != "all_reduce":
        return collective
    num_sliced = _sliced_elements(module, computation, instruction, collective.num_devices)
    if not num_sliced:
        return collective
    share = num_sliced / instruction.num_elements
    return replace(collective, sliced_axes=collective.axes, sliced_bytes=share * collective.num_bytes)


def collective_record(instruction: Instruction, axis_sizes: Mapping[str, int], count: float = 1.0) -> CollectiveRecord:
    """Reads one collective instruction, or its asynchronous start.

    Raises:
      ValueError: replica groups in a spelling that is not known.
    """
    kind = _KINDS[instruction.opcode.removesuffix("-start")]
    tensors = arrays(_result_type(instruction))
    num_bytes = sum(size(dims) * bits_of_dtype(dtype) / 8 for dtype, dims in tensors)
    num_tensors = len(tensors)
    groups = device_groups(instruction, math.prod(axis_sizes.values()))
    if kind == "collective_permute":
        axes = axes_of_pairs([(source, target) for source, target in groups], axis_sizes)
        num_devices = len(groups) if any(source != target for source, target in groups) else 1
    else:
        axes, num_devices = axes_of_groups(groups, axis_sizes), len(groups[0])
    if kind in ("reduce_scatter", "all_to_all"):
        num_bytes *= num_devices
    if kind == "all_to_all" and num_tensors > 1 and "dimensions=" not in instruction.attributes:
        # The CPU backend passes the part of each device as a tensor of its own.
        num_tensors = max(1, num_tensors // num_devices)
    dtype = "+".join(dict.fromkeys(dtype for dtype, _ in tensors))
    return CollectiveRecord(kind, axes, num_devices, num_bytes, dtype, num_tensors, count, source=instruction.source)


def _result_type(instruction: Instruction) -> str:
    """Returns the type of what is received; the type of most starts is a tuple of operands, results and context."""
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "all-reduce-start" or not instruction.type.startswith("("):
        return instruction.type
    return parts_of_tuple(instruction.type)[1]


def _sliced_elements(module: Module, computation: Computation, all_reduce: Instruction, num_devices: int) -> int:
    """Counts the elements of an all-reduce's results that are used only as the slice that belongs to the device.

    Args:
      num_devices: devices in its group; a slice is smaller by this factor than what it is taken from.

    Returns:
      Elements of all results that are only used in slices; 0 if whole results are used.
    """
    if not all_reduce.type.startswith("("):
        return all_reduce.num_elements if _only_sliced(module, [], computation, all_reduce, num_devices) else 0
    total = 0
    for user in computation.users[all_reduce.name]:
        if user.opcode == "get-tuple-element" and _only_sliced(module, [], computation, user, num_devices):
            total += user.num_elements
    return total


def _only_sliced(
    module: Module, callers: _Callers, computation: Computation, value: Instruction, num_devices: int
) -> bool:
    """Returns whether a value is used only as the slice of the device; `callers` are the fusions around it."""
    users = computation.users[value.name]
    if not users or value.is_root:
        return False
    for user in users:
        if user.opcode == "dynamic-slice":
            if user.operands[0] != value.name or user.num_elements * num_devices != value.num_elements:
                return False
            if not any(_is_by_device(module, callers, computation, index) for index in user.operands[1:]):
                return False
        elif user.opcode in _ELEMENT_BY_ELEMENT:
            if not _only_sliced(module, callers, computation, user, num_devices):
                return False
        elif user.opcode == "fusion":
            fusion = _callee(module, user)
            inside = [*callers, (computation, user)]
            for number, operand in enumerate(user.operands):
                parameter = fusion.by_name[fusion.parameters[number]]
                if operand == value.name and not _only_sliced(module, inside, fusion, parameter, num_devices):
                    return False
        else:
            return False
    return True


def _is_by_device(module: Module, callers: _Callers, computation: Computation, name: str) -> bool:
    """Returns whether a scalar is computed from the device's number, which a loop may get as part of its state."""
    numbers = {parameter: number for number, parameter in computation.parameters.items()}
    names_left, visited = [name], {name}
    while names_left:
        value = computation.by_name[names_left.pop()]
        if value.opcode == "partition-id" or (value.opcode == "get-tuple-element" and value.type.startswith("u32[]")):
            return True
        if value.opcode == "parameter" and callers:
            (outer, call), above = callers[-1], callers[:-1]
            if _is_by_device(module, above, outer, call.operands[numbers[value.name]]):
                return True
        elif value.num_elements == 1:
            new = [operand for operand in value.operands if operand not in visited]
            visited.update(new)
            names_left.extend(new)
    return False


def _callee(module: Module, fusion: Instruction) -> Computation:
    name = fusion.attributes.split("calls=", 1)[1].lstrip("%")
    return module.computations[name.split(",", 1)[0].split(" ", 1)[0]]
