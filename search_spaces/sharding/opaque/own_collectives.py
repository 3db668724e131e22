"""Collectives that an opaque operation runs itself, between its own rounds of arithmetic.

A plan lists them as it lists all others. Those that run beside a round are waited for only as far as they take longer
than its arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cost.base import CollectiveKind


class OwnCollective(NamedTuple):
    """A collective inside an opaque operation.

    Attributes:
      axis: the mesh axis along which it goes.
      num_bytes: the full size along the axis in one group of devices (see `cost.collectives`).
      count: executions in one run of the operation.
      is_beside: whether each of them runs beside a round of arithmetic.
    """

    kind: CollectiveKind
    axis: int
    num_bytes: float
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    is_beside: bool


class PricedCollective(NamedTuple):
    """A collective inside an opaque operation with the seconds of all its executions in one run of the operation.

    Attributes:
      link_s: seconds that the link is busy.
      waited_s: seconds that the device waits.
    """

    collective: OwnCollective
    link_s: float
    waited_s: float


def priced(
    collectives: Sequence[OwnCollective], arithmetic_s: float, seconds_of: Callable[[OwnCollective], float]
) -> list[PricedCollective]:
    """Returns collectives with their seconds.

    The arithmetic is that of equally long rounds, one more than collectives run beside them: a round and what runs
    beside it take as long as the longer of both. The time that is waited is divided among the collectives by their own.

    Args:
      arithmetic_s: seconds of all rounds without any collective.
      seconds_of: seconds of one execution of a collective alone.
    """
    num_beside = max((c.count for c in collectives if c.is_beside), default=0)
    round_s = arithmetic_s / (num_beside + 1)
    beside_s = sum(c.count * seconds_of(c) for c in collectives if c.is_beside)
    waited_share = max(0.0, 1 - num_beside * round_s / beside_s) if beside_s else 0.0
    entries = []
    for collective in collectives:
        link_s = collective.count * seconds_of(collective)
        entries.append(PricedCollective(collective, link_s, link_s * (waited_share if collective.is_beside else 1.0)))
    return entries
