"""The vocabulary of the space of communication strategies; the package's docstring has a worked example.

- A *call site* is where something can be chosen in a traced loss: an operand of a collective, or `alternatives` between
  functions.
- An *operation* is one direction of a call site: its values ("forward") or their cotangents ("backward"); or the sum of
  one parameter's gradient over devices ("gradient").
- A *group* is operations that share a strategy. Each group is a *node* of the problem.
- A *strategy* is a way to run the collective of an operation. It is made of *stages*, the steps along one mesh axis
  each.

Letters for sizes: V groups, S_v strategies of group v, n devices that take part in a collective, K parameter leaves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes

Direction = Literal["forward", "backward", "gradient"]
Path = tuple[int, ...]
"""Where an equation is in a jaxpr: its number in each jaxpr on the way down, and the branch of each `cond` between."""


@dataclass(frozen=True)
class Precision:
    """A number format in which a collective's operand can be sent.

    A block of elements shares a scale, float32: the largest magnitude in the block divided by `largest`. The codes are
    the numbers divided by the scale. A format with the range of float32 (`largest` is inf) has neither scales nor
    blocks.

    Attributes:
      name: for people and for plans.
      dtype: of the codes before packing, as JAX names it.
      bits: of one code; two codes of 4 bits share a byte.
      largest: the magnitude that a block's largest element is scaled to.
      mantissa_bits: of a floating-point code, without the leading one; 0 for integers, which are evenly spaced.
      least_exponent: below 2^least_exponent codes are evenly spaced.
      rounding: to the nearest code; or at random up or down, so that the expected code is the number itself.
    """

    name: str
    dtype: str
    bits: int
    largest: float
    mantissa_bits: int = 0
    least_exponent: int = 0
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @property
    def stochastic(self) -> "Precision":
        """The same format with stochastic rounding."""
        return replace(self, name=f"{self.name} stochastic", rounding="stochastic")


FLOAT32 = Precision("float32", "float32", 32, math.inf, 23, -126)
BFLOAT16 = Precision("bfloat16", "bfloat16", 16, math.inf, 7, -126)
FLOAT8 = Precision("float8_e4m3", "float8_e4m3fn", 8, 448.0, 3, -6)
INT8 = Precision("int8", "int8", 8, 127.0)
INT4 = Precision("int4", "int8", 4, 7.0)
PRECISIONS = (FLOAT32, BFLOAT16, FLOAT8, INT8, INT4)


@dataclass(frozen=True)
class CollectiveOp:
    """A linear collective, as one device takes part in it; `collectives.py` runs it.

    Attributes:
      kind: of the collective.
      axes: the mesh axes over which it goes, major to minor.
      sizes: devices along each of these axes.
      dimensions: of an all-gather the gathered dimension, of a reduce-scatter the scattered one, of an all-to-all the
        split and the concatenated one.
      tiled: as in `jax.lax`: True where the dimensions stay and change their size; False where they appear or vanish.
      permutation: of a collective permute, pairs of source and target.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    dimensions: tuple[int, ...] = ()
    tiled: bool = False
    permutation: tuple[tuple[int, int], ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices take part together."""
        return math.prod(self.sizes)

    @property
    def num_copies(self) -> int:
        """How many of these devices hold the same result."""
        return self.num_devices if self.kind in ("all_reduce", "all_gather") else 1

    def transpose(self) -> "CollectiveOp":
        """Returns the collective that carries the cotangents of the result to the operand."""
        kinds: dict[CollectiveKind, CollectiveKind] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        reverse = tuple((target, source) for source, target in self.permutation)
        return replace(
            self, kind=kinds.get(self.kind, self.kind), dimensions=self.dimensions[::-1], permutation=reverse
        )

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the result on one device for an operand of a shape."""
        shape, n = list(shape), self.num_devices
        if self.kind in ("reduce_scatter", "all_to_all"):
            cut_dimension = self.dimensions[0]
            shape[cut_dimension : cut_dimension + 1] = [shape[cut_dimension] // n] if self.tiled else []
        if self.kind in ("all_gather", "all_to_all"):
            grown_dimension = self.dimensions[-1]
            shape[grown_dimension : grown_dimension + self.tiled] = [shape[grown_dimension] * n] if self.tiled else [n]
        return tuple(shape)


class CollectiveStrategy(Protocol):
    """A way to run a collective.

    A strategy that keeps a residual is for gradients only. The residual is what it has not sent yet. The next training
    step gives it back, to whichever strategy sends then: most send the gradient with the residual added to it.

    Attributes:
      name: for people, choices and plans; the strategies of an operation have different names.
      is_exact: whether the result is always that of the plain collective.
      keeps_residual: whether it may have a residual.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def is_exact(self) -> bool: ...  # noqa: D102
    @property
    def keeps_residual(self) -> bool: ...  # noqa: D102

    def run(
        self, collective: CollectiveOp, x: jax.Array, residual: jax.Array | None, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the collective's result, and this device's next residual (float32, shaped as `x`).

        Args:
          collective: to be run.
          x: this device's operand.
          residual: what this device has not sent before; None where no strategy keeps one.
          key: a random key, the same on all devices.
          step: number of the training step, an integer scalar.
        """
        ...

    def stages(self, collective: CollectiveOp, shape: Sequence[int], dtype: np.dtype) -> list["Stage"]:
        """Returns the stages by which an operand of a shape and type is sent in an average training step."""
        ...


@dataclass(frozen=True)
class Stage:
    """A step of a collective along one mesh axis.

    Attributes:
      kind: of the step, a collective itself.
      axis: the mesh axis.
      num_devices: along the axis.
      num_bytes: the full size on the devices that take part together (see `cost.collectives`).
      num_coded: elements that each device encodes or decodes for it.
      precision: of the codes; None where the data is sent as it is.
      count: executions in one training step.
      hidden_s: seconds of computing behind which each execution can hide. They are for all gradients together: an
        operation gets the part of them that its bytes are of all gradients' bytes.
    """

    kind: CollectiveKind
    axis: str
    num_devices: int
    num_bytes: float
    num_coded: float = 0.0
    precision: Precision | None = None
    count: float = 1.0
    hidden_s: float = 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one training step."""
        return float(collective_sent_bytes(self.kind, self.num_bytes, self.num_devices)) * self.count


@dataclass(frozen=True)
class CallSite:
    """A call site of a traced loss: an operand of a collective, or alternatives between functions.

    Attributes:
      path: of the equation; for a collective also the number of the operand.
      stack: the name scopes around it.
      trips: how often it runs: the product of the lengths of the scans around it.
      collective: that runs there; None for alternatives.
      labels: of alternatives, in the order of their functions.
      shape, dtype: of the operand on one device; of alternatives, of the first result.
      branch: the path of the alternatives that it lies in and the number of their branch; None outside of alternatives.
    """

    path: Path
    stack: str
    trips: int
    collective: CollectiveOp | None
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    branch: tuple[Path, int] | None = None

    @property
    def is_alternatives(self) -> bool:
        """Whether functions can be chosen here, and not ways to run a collective."""
        return bool(self.labels)


@dataclass(frozen=True)
class Operation:
    """One direction of a call site, or the sum of a parameter's gradient; it runs a collective or alternatives.

    Attributes:
      name: unique, from the name scopes around it or from the parameter's path.
      kind: of the collective, or "alternatives".
      direction: whether values, cotangents or parameter gradients are sent.
      axes: the mesh axes over which it goes; none for alternatives.
      shape: of the operand on one device.
      dtype: of the operand.
      type: the name scopes without numbers, kind and direction; operations of one type are chosen together.
      trips: executions in one step.
      collective: that runs there; None for alternatives.
      call_site: the number of its call site in the loss; None for gradients.
      leaf: of gradients the number of the parameter's leaf; None for all other operations.
      labels: of alternatives.
      branch: the number of the call site of the alternatives that it lies in and of their branch; None outside.
    """

    name: str
    kind: str
    direction: Direction
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    type: str
    trips: int
    collective: CollectiveOp | None
    call_site: int | None = None
    leaf: int | None = None
    labels: tuple[str, ...] = ()
    branch: tuple[int, int] | None = None

    @property
    def is_alternatives(self) -> bool:
        """Whether functions are chosen here, and not ways to run a collective."""
        return bool(self.labels)


class Group(NamedTuple):
    """Operations that share a strategy; a node of the problem.

    Attributes:
      name: unique: the type of the operations, with a number from the second group of that type on; or the name of the
        only operation.
      operations: the numbers of the operations.
      strategies: that can be chosen; none for alternatives.
      names: of the strategies, or the labels of the alternatives, `[S]`.
    """

    name: str
    operations: tuple[int, ...]
    strategies: tuple[CollectiveStrategy, ...]
    names: tuple[str, ...]

    @property
    def is_alternatives(self) -> bool:
        """Whether functions are chosen here, and not ways to run a collective."""
        return not self.strategies

    @property
    def exact(self) -> np.ndarray:
        """Which strategies are exact, `[S]` booleans; of alternatives the first one is."""
        if self.is_alternatives:
            return np.arange(len(self.names)) == 0
        return np.array([strategy.is_exact for strategy in self.strategies])
