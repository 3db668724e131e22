"""Seconds of products and of fused attention by their shapes, by laws with a few numbers that were fitted to kernels.

A kernel works in blocks, so a product with few rows, columns or a short sum takes as long as one with some more: its
seconds are those of (m + m0)(n + n0)(k + k0) multiplications at a constant rate. So they grow with each size, whatever
the numbers, and beyond the measured sizes the rate goes to its limit. Attention has a rate likewise, and what each
token's queries, keys and values take beside it; a few blocks of queries do not fill a device.

The numbers are in `measured_rates.json`. `python -m experiments.measured_kernels` fits them and prints their errors on
kernels that were held out.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cost.lines import Line
from cost.real_numbers import real_number

QUERIES_OF_A_BLOCK = 128
"""Queries that one block of a fused attention kernel has; the law only needs a unit, as `idle_blocks` is in it."""


@dataclass(frozen=True)
class ProductRate:
    """Seconds of products of matrices in one number format.

    Attributes:
      flops_per_s: the limit for large products.
      lost_rows, lost_depth: m0 = n0 and k0.
      launch_s: of the smallest product.
      memory_bytes_per_s: at which operands and result are moved where that takes longer.

    Raises:
      ValueError: a rate is not positive, or another number is negative or not finite.
    """

    flops_per_s: float
    lost_rows: float
    lost_depth: float
    launch_s: float
    memory_bytes_per_s: float

    def __post_init__(self):
        _check_numbers(self, ("flops_per_s", "memory_bytes_per_s"), ("lost_rows", "lost_depth", "launch_s"))

    def seconds(
        self, count: ArrayLike, rows: ArrayLike, columns: ArrayLike, depth: ArrayLike, num_bytes: ArrayLike
    ) -> np.ndarray:
        """Computes the seconds of `count` products `[rows, depth] @ [depth, columns]` in one kernel; arrays broadcast.

        A product of vectors or of nothing is a matter of bytes alone.
        """
        m, n, k, b = (np.asarray(x, np.float64) for x in (rows, columns, depth, count))
        padded = b * (m + self.lost_rows) * (n + self.lost_rows) * (k + self.lost_depth)
        arithmetic_s = np.where(b * m * n * k > 0, 2 * padded / self.flops_per_s, 0.0)
        return np.maximum(arithmetic_s, np.asarray(num_bytes, np.float64) / self.memory_bytes_per_s)


@dataclass(frozen=True)
class AttentionRate:
    """Seconds of fused attention on 16-bit numbers.

    Attributes:
      flops_per_s: of the products that the mask lets through.
      bytes_per_s: what operands and results take beside them.
      idle_blocks: blocks of `QUERIES_OF_A_BLOCK` queries in whose time a device waits for its last ones.
      launch_s: of the smallest call.
      backward_share: the part of `flops_per_s` that the backward pass reaches.

    Raises:
      ValueError: a rate or the share is not positive, or another number is negative or not finite.
    """

    flops_per_s: float
    bytes_per_s: float
    idle_blocks: float
    launch_s: float
    backward_share: float

    def __post_init__(self):
        positive = ("flops_per_s", "bytes_per_s", "backward_share")
        _check_numbers(self, positive, ("idle_blocks", "launch_s"))

    def seconds(
        self, flops: ArrayLike, num_bytes: ArrayLike, queries: ArrayLike, is_forward: ArrayLike = True
    ) -> np.ndarray:
        """Computes the seconds of one call; arguments broadcast. Of no work it takes none."""
        reached = self.flops_per_s * np.where(is_forward, 1.0, self.backward_share)
        busy_s = np.asarray(flops, np.float64) / reached + np.asarray(num_bytes, np.float64) / self.bytes_per_s
        blocks = np.maximum(np.asarray(queries, np.float64) / QUERIES_OF_A_BLOCK, 1.0)
        return np.where(busy_s > 0, self.launch_s + busy_s * (1 + self.idle_blocks / blocks), 0.0)


@dataclass(frozen=True)
class MeasuredRates:
    """Measured rates of one kind of device; empty ones price everything by roofline.

    Attributes:
      attention: of fused attention.
      products: by the name of the dtype of the operands.
    """

    attention: AttentionRate | None = None
    products: Mapping[str, ProductRate] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.attention, tuple(sorted(self.products.items(), key=lambda item: item[0]))))


NOT_MEASURED = MeasuredRates()
"""Prices everything by roofline."""


@cache
def measured_rates(name: str) -> MeasuredRates:
    """Returns the measurements of a kind of device: "a100", "h100", ...; none of one that was not measured."""
    known = _document().get(name, {})
    attention = known.get("attention")
    products = {dtype: ProductRate(**numbers) for dtype, numbers in known.get("products", {}).items()}
    return MeasuredRates(attention and AttentionRate(**attention), products)


def measured_lines(name: str) -> dict[int, dict[Any, tuple[Line, ...]]]:
    """Returns the lines of collectives inside a host of a kind of device, by the number of devices that take part."""
    links = _document().get(name, {}).get("links", {})
    return {
        int(size): {kind: tuple(Line(*line) for line in lines) for kind, lines in by_kind.items()}
        for size, by_kind in links.items()
    }


def _check_numbers(rate: Any, positive: tuple[str, ...], others: tuple[str, ...]) -> None:
    for name in (*positive, *others):
        number = real_number(getattr(rate, name))
        if number is None or not math.isfinite(number) or number < 0 or (name in positive and number == 0):
            rule = "positive" if name in positive else "zero or more"
            raise ValueError(f"`{type(rate).__name__}.{name}` must be finite and {rule}, not {getattr(rate, name)!r}.")


@cache
def _document() -> dict[str, Any]:
    return json.loads(resources.files("cost").joinpath("measured_rates.json").read_text())
