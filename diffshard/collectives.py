"""The collectives of a compiled program, read from XLA's HLO text (CPU and GPU backends)."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cost.collectives import CollectiveKind
from search_spaces.sharding.collective import Collective, axes_of_groups, axes_of_pairs, bits_of_dtype

_KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class _Instruction:
    opcode: str
    type: str
    text: str


def hlo_collectives(hlo: str, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives that one device takes part in.

    Asynchronous pairs count once, by their start. Bodies of loops count as often as XLA knows that they run, once where
    it does not; of branches the one with most bytes counts. Groups of one device move nothing and are left out.

    Args:
      hlo: `compiled.as_text()`, or one module's text.
      axis_sizes: `mesh.shape`: devices are numbered by their place in the mesh, row-major.

    Returns:
      In the order of the text, from the entry computation; `source` is the operation's name in the traced function.

    Raises:
      ValueError: `hlo` has no entry computation.
    """
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, ""
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current and (instruction := _parsed(line)):
            computations[current].append(instruction)
    if entry is None:
        raise ValueError("`hlo` must be the text of an HLO module; it has no ENTRY computation.")
    return list(_of_computation(entry, 1.0, computations, dict(axis_sizes)))


def _parsed(line: str) -> _Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    end = _end_of_type(line, start.end())
    opcode = _OPCODE.match(line, end)
    return _Instruction(opcode[1], line[start.end() : end], line[opcode.end() :]) if opcode else None


def _end_of_type(line: str, start: int) -> int:
    if line[start] != "(":
        return line.index(" ", start)
    depth = 0
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if depth == 0:
            return position + 1
    return len(line)


def _of_computation(
    name: str, count: float, computations: Mapping[str, list[_Instruction]], axis_sizes: Mapping[str, int]
) -> Iterator[Collective]:
    for instruction in computations.get(name, ()):
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind:
            collective = _collective(kind, instruction, count, axis_sizes)
            if collective.num_devices > 1:
                yield collective
            continue
        if instruction.opcode == "conditional":
            names = _BRANCHES.search(instruction.text)
            names = re.findall(r"[\w.\-]+", names[1]) if names else _CALLED.findall(instruction.text)
            branches = [list(_of_computation(n, count, computations, axis_sizes)) for n in names]
            yield from max(branches, key=lambda found: sum(c.num_bytes * c.count for c in found), default=[])
            continue
        trips = _TRIP_COUNT.search(instruction.text) if instruction.opcode == "while" else None
        for called in _CALLED.findall(instruction.text):
            yield from _of_computation(called, count * float(trips[1]) if trips else count, computations, axis_sizes)


def _collective(
    kind: CollectiveKind, instruction: _Instruction, count: float, axis_sizes: Mapping[str, int]
) -> Collective:
    arrays = _ARRAY.findall(_result_type(instruction))
    num_bytes = sum(_size(dims) * bits_of_dtype(dtype) / 8 for dtype, dims in arrays)
    num_tensors = len(arrays)
    if kind == "collective_permute":
        pairs = [(int(s), int(t)) for s, t in re.findall(r"\{(\d+),(\d+)\}", instruction.text)]
        axes, num_devices = axes_of_pairs(pairs, axis_sizes), len(pairs) if any(s != t for s, t in pairs) else 1
    else:
        groups = replica_groups(instruction.text, math.prod(axis_sizes.values()))
        axes, num_devices = axes_of_groups(groups, axis_sizes), len(groups[0])
    if kind in ("reduce_scatter", "all_to_all"):
        num_bytes *= num_devices
    if kind == "all_to_all" and num_tensors > 1 and "dimensions=" not in instruction.text:
        # The CPU backend hands each device's part over as a tensor of its own.
        num_tensors = max(1, num_tensors // num_devices)
    source = _OP_NAME.search(instruction.text)
    dtype = "+".join(dict.fromkeys(dtype for dtype, _ in arrays))
    return Collective(kind, axes, num_devices, num_bytes, dtype, num_tensors, count, (), source[1] if source else "")


def _result_type(instruction: _Instruction) -> str:
    """What the collective leaves; most starts have a tuple of operands, results and context."""
    opcode, text = instruction.opcode, instruction.type
    if not opcode.endswith("-start") or opcode == "all-reduce-start" or not text.startswith("("):
        return text
    parts, depth, part = [], 0, ""
    for character in text[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    parts.append(part)
    return parts[1]


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
    parts = {name: (1, size, 1) for name, size in axes.items()}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", spanned):
        if size:
            parts[name] = (int(before), int(size), axes[name] // (int(before) * int(size)))
    names = re.findall(r"'([^']+)'", spanned)
    chosen = [3 * list(axes).index(name) + 1 for name in names]
    shaped = devices.reshape([size for part in parts.values() for size in part])
    num_members = math.prod(shaped.shape[i] for i in chosen)
    return np.moveaxis(shaped, chosen, range(-len(chosen), 0)).reshape(-1, num_members).tolist()


def _iota(text: str) -> np.ndarray:
    """Numbers from 0 in the order of `[2,4]T(1,0)`: shaped, transposed, flat again."""
    shape, _, permutation = text.partition("T")
    numbers = np.arange(_size(shape.strip("[]"))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(permutation)) if permutation else numbers).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _size(dims: str) -> int:
    return math.prod(_numbers(dims))
