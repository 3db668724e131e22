"""XLA's HLO text as data: computations, their instructions, which of them use a result, and groups of devices."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
# XLA counts the parts of long tuples in comments, which stand between a part's comma and its type.
_COMMENT = re.compile(r"/\*index=\d+\*/")
_CALLEES = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      type: of the result, with all parts if it is a tuple.
      is_root: whether the result is that of the computation.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_elements(self) -> int:
        """Number of elements of the result, all parts of a tuple together."""
        return sum(size(dims) for _, dims in arrays(self.type))

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls; the branches of a conditional."""
        branches = _BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else _CALLEES.findall(self.attributes)
        return tuple(names)

    @property
    def body(self) -> str:
        """The name of a loop's body, or ""."""
        body = _BODY.search(self.attributes)
        return body[1] if body else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, where XLA knows it."""
        trips = _TRIP_COUNT.search(self.attributes)
        return int(trips[1]) if trips else None

    @property
    def source(self) -> str:
        """The operation's name in the traced function, or ""."""
        name = _OP_NAME.search(self.attributes)
        return name[1] if name else ""


@dataclass(frozen=True)
class Computation:
    """A list of instructions in program order."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The instructions that use each result, by its name."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @cached_property
    def parameters(self) -> Mapping[int, str]:
        """Names of the parameters by their number."""
        unordered = [i for i in self.instructions if i.opcode == "parameter"]
        return {int(re.findall(r"\d+", i.attributes)[0]): i.name for i in unordered}


@dataclass(frozen=True)
class Module:
    """All computations of a program."""

    computations: Mapping[str, Computation]
    entry: str


def parse(hlo: str) -> Module:
    """Reads a module's text."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, ""
    for line in map(_without_comments, hlo.splitlines()):
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current and (instruction := _instruction(line)):
            computations[current].append(instruction)
    if entry is None:
        raise ValueError("`hlo` must be the text of an HLO module; it has no ENTRY computation.")
    return Module({name: Computation(tuple(instructions)) for name, instructions in computations.items()}, entry)


def arrays(type_: str) -> list[tuple[str, str]]:
    """Returns dtype and dimensions of each array in a type, such as `("f32", "16,8")`."""
    return _ARRAY.findall(type_)


def size(dims: str) -> int:
    """Returns the product of comma-separated numbers, 1 if there are none."""
    return math.prod(int(number) for number in re.findall(r"\d+", dims))


def parts_of_tuple(type_: str) -> list[str]:
    """Returns the types of a tuple's parts; a type that is not a tuple is returned alone."""
    if not type_.startswith("("):
        return [type_]
    parts, depth, part = [], 0, ""
    for character in type_[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()]


def replica_groups(text: str, num_devices: int) -> list[list[int]]:
    """Reads the groups of devices of one instruction, in each of XLA's spellings.

    `{{0,1},{2,3}}` lists the groups. `[2,4]<=[8]T(1,0)` reshapes and transposes the numbers from 0.
    `mesh['a'=2,'b'=4] {'b'}` forms groups along axes of a mesh; the mesh may be transposed
    (`device_ids=([4,2]T(1,0))`), and an axis may be named in part (`'b':(1)2`).

    Args:
      num_devices: number of devices of the whole program; an empty list of groups means one group of all of them.
    """
    match = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text)
    if match:
        groups = [[int(i) for i in group.split(",") if i] for group in re.findall(r"\{([\d,]*)\}", match[1])]
        return [group for group in groups if group] or [list(range(num_devices))]
    match = re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    if match:
        return _iota(match[2]).reshape(_numbers(match[1])).tolist()
    match = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(([^()]*(?:\([\d,]*\))?)\))? *\{([^}]*)\}", text
    )
    if match:
        return _mesh_groups(match[1], match[2], match[3])
    raise ValueError(f"`text` must have replica groups in a known spelling: {text[:200]!r}.")


def _without_comments(line: str) -> str:
    return _COMMENT.sub("", line) if "/*" in line else line


def _instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    end = _closing(line, start.end()) if line[start.end()] == "(" else line.find(" ", start.end())
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    inside, attributes = line[opcode.end() : close - 1], line[close:]
    # Constants and parameters have their value or number where others have operands.
    operands = () if opcode[1] in ("constant", "parameter") else tuple(_NAME.findall(inside))
    if opcode[1] == "parameter":
        attributes = inside + attributes
    type_ = line[start.end() : end]
    return Instruction(start[2], opcode[1], type_, operands, attributes, start[1] is not None)


def _closing(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


def _mesh_groups(mesh: str, device_ids: str | None, axes_text: str) -> list[list[int]]:
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    if device_ids is None:
        devices = np.arange(math.prod(axes.values()))
    else:
        devices = _iota(device_ids) if device_ids.startswith("[") else np.array(_numbers(device_ids))
    # Each axis becomes three, so that a part of it, `'b':(before)size`, is an axis of its own.
    parts = {name: (1, length, 1) for name, length in axes.items()}
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes_text):
        if part:
            parts[name] = (int(before), int(part), axes[name] // (int(before) * int(part)))
    names = re.findall(r"'([^']+)'", axes_text)
    positions = [3 * list(axes).index(name) + 1 for name in names]
    grid = devices.reshape([length for lengths in parts.values() for length in lengths])
    num_members = math.prod(grid.shape[i] for i in positions)
    return np.moveaxis(grid, positions, range(-len(positions), 0)).reshape(-1, num_members).tolist()


def _iota(text: str) -> np.ndarray:
    """Returns numbers from 0 in the order of `[2,4]T(1,0)`: reshaped, transposed, and flat again."""
    shape, _, permutation = text.partition("T")
    numbers = np.arange(size(shape.strip("[]"))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(permutation)) if permutation else numbers).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


class MemoryPlan(NamedTuple):
    """Bytes of one device while a compiled program runs.

    Attributes:
      aliased: outputs that are written over donated arguments; they count in both.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """The peak; outputs that reuse donated arguments count once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_plan(compiled: Any) -> MemoryPlan | None:
    """Reads the plan of memory of a program, `jax.jit(...).lower(...).compile()`; None where the backend has none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryPlan(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def with_host_memory(lowered: Any, arguments: Sequence[bool], results: Sequence[bool]) -> Any:
    """Says in a lowered program which arguments and results are in the host's memory; returns it.

    JAX leaves that out for devices that are only described, because these do not say which memories they have. The
    program would then be compiled with kernels that read the host's memory instead of copies.

    Args:
      lowered: `jax.jit(...).lower(...)`, which is changed.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        names = {op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes}
        main = names["main"]
        text, array = type(main.attributes["sym_name"]), type(main.attributes["arg_attrs"])
        for name, on_host in (("arg_attrs", arguments), ("res_attrs", results)):
            kinds = (text.get("pinned_host" if is_on_host else "device") for is_on_host in on_host)
            pairs = zip(main.attributes[name], kinds, strict=True)
            changed = [
                type(one).get({**{a.name: a.attr for a in one}, "mhlo.memory_kind": kind}) for one, kind in pairs
            ]
            main.attributes[name] = array.get(changed)
    return lowered
