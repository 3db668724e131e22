"""Numbers with their ranges as types: who reads a file checks them, and for everybody else they are floats and ints.

>>> class Stage(NamedTuple):
...     forward_s: Amount

says that a stage takes a finite number of seconds, zero or more. NaN is in no range.
"""

import math
import sys
from typing import Annotated, NamedTuple

from cost.real_numbers import as_float

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
Limit = Annotated[float, Range(math.ulp(0.0), math.inf, "positive")]
"""A positive number; infinity is no limit."""
LowerBound = Annotated[float, Range(-math.inf, _LARGEST, "a finite number, or -inf")]
"""A number that nothing is below; -inf where nothing is known."""
AmountOrInf = Annotated[float, Range(0, math.inf, "a number, zero or more")]
AnyNumber = Annotated[float, Range(-math.inf, math.inf, "a number, not NaN")]
FiniteNumber = Annotated[float, Range(-_LARGEST, _LARGEST, "a finite number")]
Share = Annotated[float, Range(0, 1, "a share from 0 to 1")]
Index = Annotated[int, Range(0, _MOST_WHOLE, "a whole number, 0 or more")]
Count = Annotated[int, Range(1, _MOST_WHOLE, "a whole number, 1 or more")]
