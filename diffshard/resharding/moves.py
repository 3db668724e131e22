"""What it takes to move an array from one sharding to another, where the devices may change as well.

Of each device's new part, what it does not hold yet arrives from the devices that do. Those that hold the same part
send equal shares of it, straight to whoever needs it. A move takes as long as the busiest device's link: what it sends,
or what it receives, whichever is more, because links carry both ways at once. Arrays move one after the other, started
together: they share one latency by their bytes.

Letters for sizes: D devices before, E devices after, R dimensions of an array.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware, Link
from cost.lines import least_s
from cost.number_ranges import Amount, Index
from search_spaces.partition_specs import IndexedSpec


class Devices(NamedTuple):
    """The devices of a mesh.

    Attributes:
      ids: `[D]` numbers of the devices, row-major; a device has the same number before and after a move.
      axis_sizes: devices along each mesh axis.
    """

    ids: tuple[int, ...]
    axis_sizes: tuple[int, ...]


class Move(NamedTuple):
    """The way of some arrays from one plan to another.

    Attributes:
      seconds: predicted; one array after the other.
      num_bytes: bytes that go from one device to another, of all devices together.
      num_arrays: arrays of which something has to be sent.
    """

    seconds: Amount
    num_bytes: Amount
    num_arrays: Index


class MovedBytes(NamedTuple):
    """The bytes of a move.

    Attributes:
      sent: `[D]` by each device before.
      received: `[E]` by each device after.
    """

    sent: np.ndarray
    received: np.ndarray


def moved_bytes(
    shape: Sequence[int], num_bytes: float, before: tuple[Devices, IndexedSpec], after: tuple[Devices, IndexedSpec]
) -> MovedBytes:
    """Returns what each device sends and receives when an array moves.

    Args:
      shape: of the whole array; its dimensions are split evenly.
      num_bytes: of the whole array.
      before: the devices that hold the array, and how it is split over them.
      after: the same after the move.
    """
    (devices, spec), (new_devices, new_spec) = before, after
    parts, new_parts = _parts(shape, spec, devices.axis_sizes), _parts(shape, new_spec, new_devices.axis_sizes)
    common = np.ones((len(parts), len(new_parts)))
    for d in range(len(shape)):
        start = np.maximum(parts[:, None, d, 0], new_parts[None, :, d, 0])
        common *= np.maximum(np.minimum(parts[:, None, d, 1], new_parts[None, :, d, 1]) - start, 0)
    _, part_number, num_holders = np.unique(
        parts.reshape(len(parts), -1), axis=0, return_inverse=True, return_counts=True
    )
    part_number = part_number.reshape(-1)
    place = {device: i for i, device in enumerate(devices.ids)}
    own_part = np.array([part_number[place[i]] if i in place else -1 for i in new_devices.ids])
    is_needed = part_number[:, None] != own_part[None, :]
    share = num_bytes / max(prod(shape), 1)
    amounts = share * common * is_needed / num_holders[part_number][:, None]
    return MovedBytes(amounts.sum(axis=1), amounts.sum(axis=0))


def move_s(moved: MovedBytes, links: Sequence[Link], latency_share: float = 1.0) -> float:
    """Returns the seconds of a move over the slowest of several links.

    Args:
      moved: what each device sends and receives.
      links: one at least, unless nothing moves.
      latency_share: the part of a latency that is this array's own.
    """
    most_bytes = max(moved.sent.max(initial=0.0), moved.received.max(initial=0.0))
    if not most_bytes:
        return 0.0
    return max(float(least_s(link.lines("collective_permute"), most_bytes, latency_share)) for link in links)


def links_between(*hardware_and_axes: tuple[Hardware, Mapping[str, int]]) -> tuple[Link, ...]:
    """Returns the links of some meshes over which arrays may move: those of axes with several devices."""
    links = [hardware.link(name) for hardware, axes in hardware_and_axes for name, size in axes.items() if size > 1]
    return tuple(dict.fromkeys(links))


def _parts(shape: Sequence[int], spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """Returns where each device's part begins and ends, `[D, R, 2]`."""
    coordinates = np.indices(axis_sizes).reshape(len(axis_sizes), -1)  # [axes, D], row-major
    parts = np.zeros((coordinates.shape[1], len(shape), 2), np.int64)
    for d, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        number = np.zeros(coordinates.shape[1], np.int64)
        for a in axes:
            number = number * axis_sizes[a] + coordinates[a]
        length = size // prod(axis_sizes[a] for a in axes)
        parts[:, d, 0], parts[:, d, 1] = number * length, (number + 1) * length
    return parts
