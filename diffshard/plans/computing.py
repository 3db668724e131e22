"""What a plan's computing is made of: products, and all else, which memory traffic bounds."""

from dataclasses import dataclass
from typing import NamedTuple

from cost.number_ranges import Amount, Share
from diffshard.plans.formats import format_percent, format_s


@dataclass(frozen=True)
class PredictedComputing:
    """The predicted computing of a device in one step, divided by what bounds it.

    Attributes:
      products_s: seconds of products of matrices, convolutions, and kernels of users such as attention.
      products_share: of the hardware's peak rate of arithmetic that these reach.
      traffic_s: seconds of all other operations.
      traffic_share: of the memory's peak bandwidth that these reach.
    """

    products_s: Amount
    products_share: Share
    traffic_s: Amount
    traffic_share: Share


class ComputingPart(NamedTuple):
    """A part of computing as plans show it: its name, its seconds, and these with the share of the peak in words."""

    name: str
    seconds: float
    amounts: str


def computing_parts(computing: PredictedComputing) -> tuple[ComputingPart, ComputingPart]:
    """Returns products and memory traffic, each with what it reaches of the hardware's peak."""
    parts = (
        ("products", computing.products_s, computing.products_share, "rate of arithmetic"),
        ("memory traffic", computing.traffic_s, computing.traffic_share, "bandwidth"),
    )
    first, second = (
        ComputingPart(
            name, seconds, format_s(seconds) + (f" at {format_percent(share)} of the peak {peak}" if share else "")
        )
        for name, seconds, share, peak in parts
    )
    return first, second
