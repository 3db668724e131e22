"""The collectives of a compiled program, read from the HLO text of XLA's CPU and GPU backends.

The CPU backend has no reduce-scatter: it reduces everything on every device, and slices. If each device uses only its
own slice of an all-reduce's result, the record says that the all-reduce stands for a reduce-scatter.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost.base import CollectiveKind
from diffshard.checks.hlo import Computation, Instruction, Module, arrays, parse, parts_of_tuple, replica_groups, size


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective as one device takes part in it.

    Attributes:
      axes: the mesh axes that a group of devices spans, in the mesh's order.
      num_devices: devices in a group; smaller than the axes' product where only a part of an axis takes part.
      num_bytes: the full size within one group of devices (see `cost.collectives`): the gathered result, the reduced or
        scattered operand of one device, the operand of one device times `num_devices` for an all-to-all.
      dtype: of the data, as NumPy and ml_dtypes name it; several joined by "+" where XLA has combined tensors.
      num_tensors: how many tensors XLA has combined into it.
      count: executions in one step: the product of the trip counts around it, where they are known.
      sliced_axes: for an all-reduce, the axes along which its result is only ever used in slices.
      sliced_bytes: the part of `num_bytes` for which that holds, where tensors are combined.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    num_devices: int
    num_bytes: float
    dtype: str
    num_tensors: int = 1
    count: float = 1.0
    sliced_axes: tuple[str, ...] = ()
    sliced_bytes: float = 0.0
    source: str = ""


def with_reduce_scatters(
    collectives: Iterable[CollectiveRecord], axis_sizes: Mapping[str, int]
) -> list[CollectiveRecord]:
    """Writes an all-reduce followed by a slice as the reduce-scatter that XLA makes of it on GPU and TPU.

    Where the result is sliced along some of the reduced axes only, the reduce-scatter along those comes first and what
    is left is reduced along the others.
    """
    records = []
    for collective in collectives:
        scattered_axes = tuple(axis for axis in collective.axes if axis in collective.sliced_axes)
        if collective.kind != "all_reduce" or not scattered_axes:
            records.append(collective)
            continue
        all_reduce = replace(
            collective, num_bytes=collective.num_bytes - collective.sliced_bytes, sliced_axes=(), sliced_bytes=0
        )
        if all_reduce.num_bytes > 0:
            records.append(all_reduce)
        part = replace(all_reduce, num_bytes=collective.sliced_bytes)
        num_devices = math.prod(axis_sizes[axis] for axis in scattered_axes)
        records.append(replace(part, kind="reduce_scatter", axes=scattered_axes, num_devices=num_devices))
        rest = tuple(axis for axis in collective.axes if axis not in scattered_axes)
        if rest:
            num_others, num_bytes = collective.num_devices // num_devices, part.num_bytes / num_devices
            records.append(replace(part, axes=rest, num_devices=num_others, num_bytes=num_bytes))
    return records


def split_by_axis(collectives: Iterable[CollectiveRecord], axis_sizes: Mapping[str, int]) -> list[CollectiveRecord]:
    """Writes a collective over several axes as one after the other over single axes, so that links can be compared.

    Devices send as many bytes in total. The whole size counts on the mesh's last axis, the fastest by convention, and
    what is left of it on those before: one ring over hosts crosses between them for each of a host's devices once, so
    that a device's part is all that its slow link carries.
    """
    records = []
    for collective in collectives:
        num_bytes = collective.num_bytes
        if len(collective.axes) < 2 or collective.kind == "collective_permute":
            records.append(collective)
            continue
        for axis in collective.axes if collective.kind == "all_to_all" else reversed(collective.axes):
            size = axis_sizes[axis]
            share = num_bytes * size / collective.num_devices if collective.kind == "all_to_all" else num_bytes
            records.append(replace(collective, axes=(axis,), num_devices=size, num_bytes=share))
            if collective.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                num_bytes /= size
    return records


def axes_of_groups(groups: Sequence[Sequence[int]], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes that groups of devices span.

    Returns:
      Axes in the mesh's order; an axis of which only a part is spanned counts. All axes longer than one where the
      groups follow no axes at all.
    """
    # Prime parts of axes are the finest that Shardy and XLA split.
    parts = [(axis, prime) for axis, size in axis_sizes.items() for prime in _primes(size)]
    devices = np.arange(math.prod(axis_sizes.values())).reshape([size for _, size in parts])
    group_set = {frozenset(group) for group in groups}
    group_size = len(next(iter(group_set), ()))
    for count in range(len(parts) + 1):
        for subset in itertools.combinations(range(len(parts)), count):
            if math.prod(parts[i][1] for i in subset) != group_size:
                continue
            rows = (
                np.moveaxis(devices, subset, range(-count, 0)).reshape(-1, group_size)
                if subset
                else devices.reshape(-1, 1)
            )
            if {frozenset(row.tolist()) for row in rows} == group_set:
                return tuple(dict.fromkeys(parts[i][0] for i in subset))
    return tuple(axis for axis, size in axis_sizes.items() if size > 1)


def axes_of_pairs(pairs: Iterable[tuple[int, int]], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the sources and targets of a permutation differ."""
    shape = tuple(axis_sizes.values())
    offsets = [np.subtract(np.unravel_index(s, shape), np.unravel_index(t, shape)) for s, t in pairs]
    return tuple(axis for i, axis in enumerate(axis_sizes) if any(difference[i] for difference in offsets))


def bits_of_dtype(name: str) -> int:
    """Returns the bits of an element by the name that StableHLO or HLO gives its type; booleans take a byte."""
    lower_case = name.lower()
    if lower_case in ("i1", "pred"):
        return 8
    if lower_case.startswith("complex<"):
        return 2 * bits_of_dtype(lower_case[8:-1])
    digits = "".join(itertools.takewhile(str.isdigit, lower_case.lstrip("abcdefghijklmnopqrstuvwxyz")))
    return int(digits) if digits else 0


def _primes(size: int) -> list[int]:
    primes, divisor = [], 2
    while size > 1:
        if size % divisor:
            divisor += 1
        else:
            primes.append(divisor)
            size //= divisor
    return primes


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
