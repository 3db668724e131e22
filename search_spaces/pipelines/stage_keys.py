"""How the arrays and programs of a step in stages are named.

An array is known by a key: `("value", i)` for argument i of the traced step, `("sum", key)` for what all micro-batches
of a stage make together, `("constant", i)` for a number, `("closed over", i)` for a result that the step closes over,
`NUMBER` for the number of the micro-batch, and for all else its variable.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax.extend import core

from search_spaces.pipelines.batch_states import State

Key = Any
"""The name of an array; see the module."""
NUMBER = ("number", 0)
ProgramKind = Literal["begin", "forward", "backward", "finish"]
PartName = Literal["before", "each", "after"]


class Label(NamedTuple):
    """Which program an equation belongs to.

    Attributes:
      kind: of the program.
      stage: from 0.
      phase: of "finish": how often results went from stage to stage before; else 0.
    """

    kind: ProgramKind
    stage: int
    phase: int = 0


class Accumulation(NamedTuple):
    """What the micro-batches of a stage make together.

    Attributes:
      total: the key of the result.
      part: the key of what one micro-batch makes.
      state: how the parts are put together.
    """

    total: Key
    part: Key
    state: State


@dataclass(eq=False)
class StageEquation:
    """An equation with the keys that it reads and makes.

    Attributes:
      equation: as traced.
      part: of the step.
      reads, makes: keys; literals are missing.
      label: the program that it belongs to; None where every reader has its own.
    """

    equation: core.JaxprEqn
    part: PartName
    reads: list[Key]
    makes: list[Key]
    label: Label | None = None
