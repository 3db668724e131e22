"""Quantities and types as text, for everything that shows plans."""

import math
from collections.abc import Mapping
from typing import Protocol

from search_spaces.partition_specs import NamedSpec

_NO_SHARE = 1e-8  # less is rounding of float64 sums
_NO_SECONDS = 0.5e-11  # less would be written as 0.00 ns


def format_s(seconds: float) -> str:
    """Writes seconds with a unit and three digits: `1.26 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return "0 s" if abs(seconds) < _NO_SECONDS else f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(num_bytes: float) -> str:
    """Writes bytes with a binary unit and three digits: `80.0 GiB`."""
    if num_bytes == math.inf:
        return "unlimited"
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.9995 * size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def is_shown(num_bytes: float) -> bool:
    """Tells whether bytes are not written as `0 B`; rows of nothing are left out."""
    return num_bytes > 0.5


def format_count(number: int, noun: str) -> str:
    """Writes a number with its noun: `1 device`, `8 devices`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def format_devices(axes: Mapping[str, int]) -> str:
    """Writes the axes of a mesh as `8 devices (data 2 x model 4)`."""
    return f"{format_count(math.prod(axes.values()), 'device')} ({format_axes(axes)})"


def format_axes(axes: Mapping[str, int]) -> str:
    """Writes the axes of a mesh as `data 2 x model 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "no axes"


def format_percent(share: float) -> str:
    """Writes a share with two digits: `0.012%`, `12%`; `unknown` if it is not finite."""
    if not math.isfinite(share):
        return "unknown"
    return "0%" if share < _NO_SHARE else f"{100 * share:.0f}%" if share >= 0.995 else f"{100 * share:.2g}%"


def short_name(function: str) -> str:
    """Returns a function's name without the names of the functions in which it was defined."""
    return function.rsplit("<locals>.", 1)[-1]


def format_spec(spec: NamedSpec) -> str:
    """Writes a spec as `replicated`, or with the mesh axes of each dimension, a dot for none: `·, model`."""
    if not any(spec):
        return "replicated"
    return ", ".join("+".join(axes) or "·" for axes in spec)


class Array(Protocol):
    """What has the type of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the whole array."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        ...


def format_array(array: Array) -> str:
    """Writes the type of an array as JAX does: `float32[512,2048]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"
