"""The collectives of a compiled program, read from the HLO text of XLA's CPU and GPU backends.

The CPU backend has no reduce-scatter: it reduces everything on every device, and slices. If each device uses only its
own slice of an all-reduce's result, the record says that the all-reduce stands for a reduce-scatter.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cost.base import CollectiveKind
from diffshard.checks.hlo import Computation, Instruction, Module, arrays, parse, parts_of_tuple, replica_groups, size
from search_spaces.sharding.collective_records import CollectiveRecord, axes_of_groups, axes_of_pairs, bits_of_dtype

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
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')

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


def _of_computation(
    module: Module, name: str, count: float, axis_sizes: Mapping[str, int]
) -> Iterator[CollectiveRecord]:
    computation = module.computations.get(name)
    for instruction in computation.instructions if computation else ():
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if computation and kind:
            collective = _collective(kind, instruction, count, axis_sizes)
            if collective.num_devices > 1:
                yield _with_slices(module, computation, instruction, collective)
            continue
        if instruction.opcode == "conditional":
            names = _BRANCHES.search(instruction.attributes)
            names = re.findall(r"[\w.\-]+", names[1]) if names else _CALLED.findall(instruction.attributes)
            branches = [list(_of_computation(module, n, count, axis_sizes)) for n in names]
            yield from max(branches, key=lambda branch: sum(c.num_bytes * c.count for c in branch), default=[])
            continue
        trips = _TRIP_COUNT.search(instruction.attributes) if instruction.opcode == "while" else None
        for called in _CALLED.findall(instruction.attributes):
            yield from _of_computation(module, called, count * float(trips[1]) if trips else count, axis_sizes)


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


def _collective(
    kind: CollectiveKind, instruction: Instruction, count: float, axis_sizes: Mapping[str, int]
) -> CollectiveRecord:
    tensors = arrays(_result_type(instruction))
    num_bytes = sum(size(dims) * bits_of_dtype(dtype) / 8 for dtype, dims in tensors)
    num_tensors = len(tensors)
    if kind == "collective_permute":
        pairs = [(int(s), int(t)) for s, t in re.findall(r"\{(\d+),(\d+)\}", instruction.attributes)]
        axes, num_devices = axes_of_pairs(pairs, axis_sizes), len(pairs) if any(s != t for s, t in pairs) else 1
    else:
        groups = replica_groups(instruction.attributes, math.prod(axis_sizes.values()))
        axes, num_devices = axes_of_groups(groups, axis_sizes), len(groups[0])
    if kind in ("reduce_scatter", "all_to_all"):
        num_bytes *= num_devices
    if kind == "all_to_all" and num_tensors > 1 and "dimensions=" not in instruction.attributes:
        # The CPU backend passes the part of each device as a tensor of its own.
        num_tensors = max(1, num_tensors // num_devices)
    source = _OP_NAME.search(instruction.attributes)
    dtype = "+".join(dict.fromkeys(dtype for dtype, _ in tensors))
    return CollectiveRecord(
        kind, axes, num_devices, num_bytes, dtype, num_tensors, count, source=source[1] if source else ""
    )


def _result_type(instruction: Instruction) -> str:
    """Returns the type of what is received; the type of most starts is a tuple of operands, results and context."""
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "all-reduce-start" or not instruction.type.startswith("("):
        return instruction.type
    return parts_of_tuple(instruction.type)[1]


def _sliced_elements(module: Module, computation: Computation, reduced: Instruction, num_devices: int) -> int:
    """Counts the elements of an all-reduce's results that are used only as the slice that belongs to the device.

    Args:
      module: the whole program.
      computation: the computation with the all-reduce.
      reduced: the all-reduce.
      num_devices: devices in its group; a slice is smaller by this factor than what it is taken from.

    Returns:
      Elements of all results that are only used in slices; 0 if whole results are used.
    """
    if not reduced.type.startswith("("):
        return reduced.num_elements if _only_sliced(module, [], computation, reduced, num_devices) else 0
    total = 0
    for user in computation.users[reduced.name]:
        if user.opcode == "get-tuple-element" and _only_sliced(module, [], computation, user, num_devices):
            total += user.num_elements
    return total


def _only_sliced(
    module: Module, callers: _Callers, computation: Computation, value: Instruction, num_devices: int
) -> bool:
    """Tells whether a value is used only as the slice of the device; `callers` are the fusions around it."""
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
            fused = _called(module, user)
            inside = [*callers, (computation, user)]
            for number, operand in enumerate(user.operands):
                parameter = fused.by_name[fused.parameters[number]]
                if operand == value.name and not _only_sliced(module, inside, fused, parameter, num_devices):
                    return False
        else:
            return False
    return True


def _is_by_device(module: Module, callers: _Callers, computation: Computation, name: str) -> bool:
    """Tells whether a scalar is computed from the device's number, which a loop may get as part of its state."""
    numbers = {parameter: number for number, parameter in computation.parameters.items()}
    waiting, visited = [name], {name}
    while waiting:
        value = computation.by_name[waiting.pop()]
        if value.opcode == "partition-id" or (value.opcode == "get-tuple-element" and value.type.startswith("u32[]")):
            return True
        if value.opcode == "parameter" and callers:
            (outer, call), above = callers[-1], callers[:-1]
            if _is_by_device(module, above, outer, call.operands[numbers[value.name]]):
                return True
        elif value.num_elements == 1:
            new = [operand for operand in value.operands if operand not in visited]
            visited.update(new)
            waiting.extend(new)
    return False


def _called(module: Module, fusion: Instruction) -> Computation:
    name = fusion.attributes.split("calls=", 1)[1].lstrip("%")
    return module.computations[name.split(",", 1)[0].split(" ", 1)[0]]
