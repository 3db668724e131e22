"""What the price of a kernel may be: a number of operations or bytes, given itself or by a function of operands."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from cost.real_numbers import real_number

Price = float | Callable[..., float]
"""A number for whole arrays, or a function of the operands of one device, as `jax.ShapeDtypeStruct`s."""


def checked_price(price: Any, subject: str, kinds: str = "a number") -> float:
    """Returns a price as a float.

    Args:
      price: what is given as the number.
      subject: what has the price, as the error calls it.
      kinds: what would be accepted, for the error.

    Raises:
      TypeError: it is not a real number of Python or NumPy.
      ValueError: it is negative, infinite or NaN.
    """
    number = real_number(price)
    if number is None:
        raise TypeError(f"{subject} must be {kinds}, not {price!r}.")
    if not isfinite(number) or number < 0:
        raise ValueError(f"{subject} must be finite and not negative, not {number!r}.")
    return number
