"""One record for collectives from all sources: Shardy's passes, XLA's program, a plan's prediction."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost.base import CollectiveKind


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
