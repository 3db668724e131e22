"""What counts as a number where users give one: Python's and NumPy's real numbers, no truth values and no text.

Types with ranges say what fields of files hold: who reads a file checks them, for everybody else they are floats and
ints. NaN is in no range.

>>> class Stage(NamedTuple):
...     forward_s: Amount  # finite seconds, zero or more
"""

import math
import reprlib
import sys
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, get_args

import numpy as np


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


def as_array(value: Any) -> np.ndarray:
    """Returns a given value as an array; of lists of several lengths an array of objects, which are not numbers."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(value, object)


def is_real(array: np.ndarray) -> bool:
    """Returns whether an array holds integers or real floats."""
    return bool(np.issubdtype(array.dtype, np.number)) and not np.iscomplexobj(array)


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


_LARGEST = sys.float_info.max
_MOST_WHOLE = 2**63 - 1  # what no number of devices, of bytes or of operations exceeds


class Range(NamedTuple):
    """The numbers from `least` to `most`, both included.

    Attributes:
      words: what a number of it is, for errors: "a finite number, zero or more".
    """

    least: float
    most: float
    words: str

    def holds(self, number: float) -> bool:
        """Returns whether a number is in the range."""
        return self.least <= as_float(number) <= self.most


Amount = Annotated[float, Range(0, _LARGEST, "a finite number, zero or more")]
PositiveAmount = Annotated[float, Range(math.ulp(0.0), _LARGEST, "a positive finite number")]
Limit = Annotated[float, Range(math.ulp(0.0), math.inf, "a positive number")]
"""A positive number; infinity is no limit."""
LowerBound = Annotated[float, Range(-math.inf, _LARGEST, "a finite number, or -inf")]
"""A number that nothing is below; -inf where nothing is known."""
AmountOrInf = Annotated[float, Range(0, math.inf, "a number, zero or more")]
AnyNumber = Annotated[float, Range(-math.inf, math.inf, "a number, not NaN")]
FiniteNumber = Annotated[float, Range(-_LARGEST, _LARGEST, "a finite number")]
Share = Annotated[float, Range(0, 1, "a share from 0 to 1")]
Index = Annotated[int, Range(0, _MOST_WHOLE, "a whole number, 0 or more")]
Count = Annotated[int, Range(1, _MOST_WHOLE, "a whole number, 1 or more")]


def checked_number(name: str, value: Any, kind: Any, unit: str = "") -> Any:
    """Returns the number that a user gives, an int or a float, if it is of a kind with a range, such as `Count`.

    Args:
      unit: what follows the rule in the error, such as " of seconds".

    Raises:
      ValueError: it is no such number; names the argument, the rule and the value.
    """
    base, allowed = get_args(kind)
    number = whole_number(value) if base is int else real_number(value)
    if number is None or not allowed.holds(number):
        raise ValueError(f"`{name}` must be {allowed.words}{unit}, not {reprlib.repr(value)}.")
    return number
