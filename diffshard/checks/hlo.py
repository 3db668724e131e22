"""XLA's HLO text as data: computations, their instructions, and who uses whose result."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name, opcode: as written.
      type: of the result, a tuple's parts included.
      operands: names.
      attributes: the text after the operands.
      is_root: whether it is its computation's result.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_elements(self) -> int:
        """Entries of the result, those of all parts together."""
        return sum(size(dims) for _, dims in arrays(self.type))


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
        """The instructions that use a result."""
        found: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return found

    @cached_property
    def parameters(self) -> Mapping[int, str]:
        """Names of the parameters by their number."""
        numbered = [i for i in self.instructions if i.opcode == "parameter"]
        return {int(re.findall(r"\d+", i.attributes)[0]): i.name for i in numbered}


@dataclass(frozen=True)
class Module:
    """All computations of a program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
    """

    computations: Mapping[str, Computation]
    entry: str


def parse(hlo: str) -> Module:
    """Reads a module's text.

    Args:
      hlo: `compiled.as_text()`.

    Raises:
      ValueError: `hlo` has no entry computation.
    """
    found: dict[str, list[Instruction]] = {}
    entry, current = None, ""
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            current = header[2]
            found[current] = []
            entry = current if header[1] else entry
        elif current and (instruction := _instruction(line)):
            found[current].append(instruction)
    if entry is None:
        raise ValueError("`hlo` must be the text of an HLO module; it has no ENTRY computation.")
    return Module({name: Computation(tuple(instructions)) for name, instructions in found.items()}, entry)


def arrays(type_: str) -> list[tuple[str, str]]:
    """(dtype, dimensions) of each array in a type, such as ("f32", "16,8")."""
    return _ARRAY.findall(type_)


def size(dims: str) -> int:
    """The product of comma-separated numbers, 1 for none."""
    return math.prod(int(number) for number in re.findall(r"\d+", dims))


def parts_of_tuple(type_: str) -> list[str]:
    """The types in a tuple's type; any other type alone."""
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
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)
