"""The data of a difference between two plans."""

from dataclasses import dataclass
from typing import NamedTuple

from search_spaces.partition_specs import NamedSpec


class Total(NamedTuple):
    """A quantity of both plans: its name, its unit ("s" or "bytes"), and its values."""

    name: str
    unit: str
    first: float
    second: float


class ArrayDifference(NamedTuple):
    """An argument or result that the plans split otherwise, or of which a device holds more in one of them.

    Attributes:
      path: its name, as in the plans.
      type: such as `float32[512,2048]`; of the first plan where both have it.
      specs: how each plan splits it; None where a plan does not have it.
      device_bytes: what a device holds of it in each plan.
    """

    path: str
    type: str
    specs: tuple[NamedSpec | None, NamedSpec | None]
    device_bytes: tuple[float, float]


class LayerDifference(NamedTuple):
    """A layer that takes or sends more in one of the plans: seconds and bytes of a device in one step, of each plan."""

    name: str
    compute_s: tuple[float, float]
    communicate_s: tuple[float, float]
    sent_bytes: tuple[float, float]


class OperationDifference(NamedTuple):
    """An operation whose result the plans split otherwise, or that needs other collectives.

    Attributes:
      indices: into `PlanData.operations` of each plan.
      name: module path and primitive, as in the first plan.
      type: of the first result.
      specs: how each plan keeps the first result.
      seconds: of computing and communicating in one step, in each plan.
      collectives: (kind, axis) of those that it needs, in each plan.
    """

    indices: tuple[int, int]
    name: str
    type: str
    specs: tuple[NamedSpec, NamedSpec]
    seconds: tuple[float, float]
    collectives: tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class DifferenceData:
    """What differs between two plans.

    Attributes:
      titles: function, mesh, hardware and executor of each plan.
      totals: seconds of a step, bytes that a device sends and holds.
      arguments, outputs, layers, operations: those that differ.
      counts: how many arguments, outputs, layers and operations were compared.
      notes: where the functions, meshes or hardware differ, and how many operations were not compared.
    """

    titles: tuple[str, str]
    totals: tuple[Total, ...]
    arguments: tuple[ArrayDifference, ...]
    outputs: tuple[ArrayDifference, ...]
    layers: tuple[LayerDifference, ...]
    operations: tuple[OperationDifference, ...]
    counts: tuple[int, int, int, int]
    notes: tuple[str, ...]
