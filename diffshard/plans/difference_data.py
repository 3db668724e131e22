"""What differs between two plans, as data, and which entries of two lists are the same."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from diffshard.plans.base import PlanData
from diffshard.plans.layers import layers_of_operations
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


_MOST_CELLS = 10_000_000  # of one table: 40 MB, and a quarter of a second for two kinds of operations


class Alignment(NamedTuple):
    """The operations of two plans that are the same.

    Attributes:
      pairs: their indices in both plans, in the order of the first.
      num_not_compared: how many operations of each plan were too many to look for their partners.
    """

    pairs: list[tuple[int, int]]
    num_not_compared: tuple[int, int]


def align_operations(first: PlanData, second: PlanData) -> Alignment:
    """Matches operations of equal kind and signature in program order, if possible with one of the same layer.

    What is before the first difference and after the last one is matched at once. What is between them is aligned as a
    whole or, where that is too much, each layer's forward and backward by itself.
    """
    one, other = ([(o.kind, o.signature) for o in plan.operations] for plan in (first, second))
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    rest = shorter - start
    end = next((i for i in range(rest) if one[-1 - i] != other[-1 - i]), rest)
    ours, theirs = list(range(start, len(one) - end)), list(range(start, len(other) - end))
    layers = _layers(first), _layers(second)
    parts = [(ours, theirs)] if _fits(ours, theirs) else _by_layer(ours, theirs, layers)
    between, not_compared = [], (0, 0)
    for mine, yours in parts:
        if _fits(mine, yours):
            keys = [one[i] for i in mine], [other[j] for j in yours]
            groups = [layers[0][i] for i in mine], [layers[1][j] for j in yours]
            between += [(mine[i], yours[j]) for i, j in _longest_common(keys, groups)]
        else:
            not_compared = not_compared[0] + len(mine), not_compared[1] + len(yours)
    last = [(len(one) - end + i, len(other) - end + i) for i in range(end)]
    return Alignment([*((i, i) for i in range(start)), *sorted(between), *last], not_compared)


def _layers(plan: PlanData) -> list[Hashable]:
    """Returns for each operation its layer and whether it is of the backward pass."""
    names = layers_of_operations(plan)
    return [(name, "transpose(" in o.scope) for name, o in zip(names, plan.operations, strict=True)]


def _fits(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    return len(ours) * len(theirs) <= _MOST_CELLS


def _by_layer(
    ours: Sequence[int], theirs: Sequence[int], layers: tuple[Sequence[Hashable], Sequence[Hashable]]
) -> list[tuple[list[int], list[int]]]:
    """Returns the operations of each layer that one of the plans has."""
    parts: dict[Hashable, tuple[list[int], list[int]]] = {}
    for which, indices in enumerate((ours, theirs)):
        for i in indices:
            parts.setdefault(layers[which][i], ([], []))[which].append(i)
    return list(parts.values())


def _longest_common(
    keys: tuple[Sequence[Hashable], Sequence[Hashable]], groups: tuple[Sequence[Hashable], Sequence[Hashable]]
) -> list[tuple[int, int]]:
    """Returns pairs of places with equal keys, increasing in both; pairs of one group count half as much again."""
    rows, columns = (_numbers(keys, which) for which in (0, 1))
    row_groups, column_groups = (_numbers(groups, which) for which in (0, 1))
    best = np.zeros((len(rows) + 1, len(columns) + 1), np.int32)  # of the first i and the first j
    for i, (key, group) in enumerate(zip(rows, row_groups, strict=True)):
        gain = (columns == key) * (2 + (column_groups == group)).astype(np.int32)
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], best[i, :-1] + gain))
    pairs = []
    i, j = len(rows), len(columns)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _numbers(values: tuple[Sequence[Hashable], Sequence[Hashable]], which: int) -> np.ndarray:
    """Returns a number for each of the values of one side, equal ones for equal values of both sides."""
    number = {value: n for n, value in enumerate(dict.fromkeys((*values[0], *values[1])))}
    return np.array([number[value] for value in values[which]], np.int64)
