"""The collectives of a compiled program, read from XLA's HLO text (CPU and GPU backends)."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from cost.base import CollectiveKind
from diffshard.checks.hlo import Computation, Instruction, Module, arrays, parse, parts_of_tuple, size
from diffshard.checks.scattered import sliced_elements
from search_spaces.sharding.collective_records import CollectiveRecord, axes_of_groups, axes_of_pairs, bits_of_dtype

_KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def hlo_collectives(hlo: str, axis_sizes: Mapping[str, int]) -> list[CollectiveRecord]:
    """The collectives that one device takes part in.

    Asynchronous pairs count once, by their start. Bodies of loops count as often as XLA knows that they run, once where
    it does not; of branches the one with most bytes counts. Groups of one device move nothing and are left out. The CPU
    backend writes reduce-scatters as all-reduces whose results are sliced: they say so, and `with_reduce_scatters`
    writes them as what they are.

    Args:
      hlo: `compiled.as_text()`, or one module's text.
      axis_sizes: `mesh.shape`: devices are numbered by their place in the mesh, row-major.

    Returns:
      In the order of the text, from the entry computation; `source` is the operation's name in the traced function.

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
            yield from max(branches, key=lambda found: sum(c.num_bytes * c.count for c in found), default=[])
            continue
        trips = _TRIP_COUNT.search(instruction.attributes) if instruction.opcode == "while" else None
        for called in _CALLED.findall(instruction.attributes):
            yield from _of_computation(module, called, count * float(trips[1]) if trips else count, axis_sizes)


def _with_slices(
    module: Module, computation: Computation, instruction: Instruction, collective: CollectiveRecord
) -> CollectiveRecord:
    if collective.kind != "all_reduce":
        return collective
    entries = sliced_elements(module, computation, instruction, collective.num_devices)
    if not entries:
        return collective
    share = entries / instruction.num_elements
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
        # The CPU backend hands each device's part over as a tensor of its own.
        num_tensors = max(1, num_tensors // num_devices)
    source = _OP_NAME.search(instruction.attributes)
    dtype = "+".join(dict.fromkeys(dtype for dtype, _ in tensors))
    return CollectiveRecord(
        kind, axes, num_devices, num_bytes, dtype, num_tensors, count, source=source[1] if source else ""
    )


def _result_type(instruction: Instruction) -> str:
    """What the collective leaves; most starts have a tuple of operands, results and context."""
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "all-reduce-start" or not instruction.type.startswith("("):
        return instruction.type
    return parts_of_tuple(instruction.type)[1]


def replica_groups(text: str, num_devices: int) -> list[list[int]]:
    """The groups of devices of one instruction, in each of XLA's spellings.

    `{{0,1},{2,3}}` lists them; `[2,4]<=[8]T(1,0)` reshapes and transposes the numbers from 0; and
    `mesh['a'=2,'b'=4] {'b'}` spans axes of a mesh, which may itself be a transposed one (`device_ids=([4,2]T(1,0))`)
    and of whose axes a part may be named (`'b':(1)2`).

    Args:
      text: the instruction's text.
      num_devices: of the whole program: an empty list means all of them.

    Raises:
      ValueError: groups in a spelling that is not known.
    """
    found = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text)
    if found:
        groups = [[int(i) for i in group.split(",") if i] for group in re.findall(r"\{([\d,]*)\}", found[1])]
        return [group for group in groups if group] or [list(range(num_devices))]
    found = re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    if found:
        return _iota(found[2]).reshape(_numbers(found[1])).tolist()
    found = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(([^()]*(?:\([\d,]*\))?)\))? *\{([^}]*)\}", text
    )
    if found:
        return _mesh_groups(found[1], found[2], found[3])
    raise ValueError(f"`text` must have replica groups in a known spelling: {text[:200]!r}.")


def _mesh_groups(mesh: str, device_ids: str | None, spanned: str) -> list[list[int]]:
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    if device_ids is None:
        devices = np.arange(math.prod(axes.values()))
    else:
        devices = _iota(device_ids) if device_ids.startswith("[") else np.array(_numbers(device_ids))
    # Each axis becomes three, so that a part of it, `'b':(before)size`, is an axis of its own.
    parts = {name: (1, length, 1) for name, length in axes.items()}
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", spanned):
        if part:
            parts[name] = (int(before), int(part), axes[name] // (int(before) * int(part)))
    names = re.findall(r"'([^']+)'", spanned)
    chosen = [3 * list(axes).index(name) + 1 for name in names]
    shaped = devices.reshape([length for lengths in parts.values() for length in lengths])
    num_members = math.prod(shaped.shape[i] for i in chosen)
    return np.moveaxis(shaped, chosen, range(-len(chosen), 0)).reshape(-1, num_members).tolist()


def _iota(text: str) -> np.ndarray:
    """Numbers from 0 in the order of `[2,4]T(1,0)`: shaped, transposed, flat again."""
    shape, _, permutation = text.partition("T")
    numbers = np.arange(size(shape.strip("[]"))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(permutation)) if permutation else numbers).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
