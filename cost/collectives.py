"""The seconds of a collective on one mesh axis: by the α–β model, or by the fastest of a few such lines for its kind.

Compilers combine collectives, so a line's latency belongs to a combinable group and its bytes to each tensor. Sizes are
the *full* size along the axis within one group of `num_devices` devices:

| kind               | `num_bytes`                    | bytes that one device sends |
| ------------------ | ------------------------------ | --------------------------- |
| all_gather         | the gathered result            | bytes·(n−1)/n               |
| reduce_scatter     | the operand on one device      | bytes·(n−1)/n               |
| all_reduce         | the operand on one device      | 2·bytes·(n−1)/n             |
| all_to_all         | the operand on one device × n  | bytes·(n−1)/n²              |
| collective_permute | the operand on one device      | bytes                       |

An all-reduce of a link without lines by kind has one latency, not two: on V100 hosts it starts as fast as an all-gather
(68 and 69 µs on 2 devices, 104 and 107 µs on 4), so it beats a reduce-scatter followed by an all-gather by one latency
and ties in bytes. Between hosts it has almost two (269 and 143 µs), which lines by kind can say.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), ring
algorithms; Alpa (Zheng et al. 2022) section 4.2 uses the same forms.
"""

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from cost.base import COLLECTIVE_KINDS, CollectiveKind, CostModel, Hardware, Link
from cost.lines import FREE, Line, fastest_lines, least_s


def collective_sent_bytes(kind: CollectiveKind, num_bytes: ArrayLike, num_devices: ArrayLike) -> np.ndarray:
    """Computes the bytes that each device sends; arguments broadcast against each other.

    Raises:
      ValueError: `kind` is none of `COLLECTIVE_KINDS`.
    """
    size = np.asarray(num_bytes, dtype=np.float64)
    n = np.asarray(num_devices, dtype=np.float64)
    match kind:
        case "all_gather" | "reduce_scatter":
            return size * (n - 1) / n
        case "all_reduce":
            return 2 * size * (n - 1) / n
        case "all_to_all":
            return size * (n - 1) / n**2
        case "collective_permute":
            return np.where(n > 1, size, 0.0)
    raise ValueError(f"`kind` must be one of {COLLECTIVE_KINDS}, not {kind!r}.")


def collective_lines(kind: CollectiveKind, num_devices: int, link: Link) -> tuple[Line, ...]:
    """Returns the lines of one kind of collective over its full size; free for one device.

    Raises:
      ValueError: `kind` is none of `COLLECTIVE_KINDS`.
    """
    sent = float(collective_sent_bytes(kind, 1.0, num_devices))
    if num_devices == 1:
        return FREE
    return fastest_lines(Line(latency_s, s_per_byte * sent) for latency_s, s_per_byte in link.lines(kind))


def collective_s(kind: CollectiveKind, num_bytes: ArrayLike, num_devices: ArrayLike, link: Link) -> np.ndarray:
    """Computes the seconds of one collective alone: latency and transfer; zero for one device or no bytes.

    Arguments broadcast against each other.

    Example: an all-reduce of 1 GB over 4 devices at 1 GB/s takes 2 · 3/4 s.

    Raises:
      ValueError: `kind` is none of `COLLECTIVE_KINDS`.
    """
    seconds = least_s(link.lines(kind), collective_sent_bytes(kind, num_bytes, num_devices))
    return np.where((np.asarray(num_bytes) > 0) & (np.asarray(num_devices) > 1), seconds, 0.0)


def _all_kinds(axis: str, num_devices: int) -> tuple[CostModel, ...]:
    """Makes a model of each kind of collective on one axis; its size is in bytes."""
    return tuple(partial(_on_axis, kind=kind, axis=axis, num_devices=num_devices) for kind in COLLECTIVE_KINDS)


def _on_axis(size: ArrayLike, hardware: Hardware, *, kind: CollectiveKind, axis: str, num_devices: int) -> np.ndarray:
    return collective_s(kind, size, num_devices, hardware.link(axis))


EXAMPLE = partial(_all_kinds, "data", num_devices=4)
