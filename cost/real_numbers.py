"""What counts as a number where users give one: Python's and NumPy's real numbers, no truth values and no text."""

import math
from numbers import Integral, Real
from typing import Any


def real_number(value: Any) -> float | None:
    """Returns a value as a float, None if it is no real number; what is too large for a float is infinite.

    NumPy's numbers count, truth values and text do not.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return as_float(value)


def whole_number(value: Any) -> int | None:
    """Returns a value as an integer, None if it is no whole number of Python or NumPy; truth values are none."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def as_float(number: Any) -> float:
    """Returns a real number as a float; what is too large for one is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def is_positive(value: Any) -> bool:
    """Returns whether a value is a number above zero; infinity is, NaN is not."""
    number = real_number(value)
    return number is not None and number > 0
