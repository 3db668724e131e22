"""The suite of search spaces tells decoded functions apart, and says so where they forget the choice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from search_spaces import numbered
from search_spaces.numbered import NumberedSpace
from tests.conformance import test_spaces


class _DecodesBy(NumberedSpace):
    """A space whose decoded choices are functions."""

    def __init__(self, make: Callable[[Sequence[int]], Callable[..., Any]]):
        super().__init__(numbered.EXAMPLE().problem)
        self._make = make

    def decode(self, choice: Any) -> Any:
        return self._make(super().decode(choice))


def closure(choice: Sequence[int]) -> Callable[[float], float]:
    def inner(x: float) -> float:
        return x + sum(choice)

    return lambda x: inner(x) + 1


@pytest.mark.parametrize(
    "make",
    [closure, lambda choice: jax.jit(closure(choice)), lambda choice: functools.partial(max, *choice),
     lambda choice: tuple(choice).count, lambda choice: lambda x, first=choice: x],
)  # fmt: skip
def test_functions_are_told_apart_by_what_they_keep(make: Any):
    test_spaces.test_decoding_is_a_function_of_the_choice(_DecodesBy(make))


@pytest.mark.parametrize("make", [lambda choice: abs, lambda choice: lambda x: x])
def test_a_function_that_forgets_the_choice_is_named(make: Any):
    with pytest.raises(AssertionError, match="the same for every choice"):
        test_spaces.test_decoding_is_a_function_of_the_choice(_DecodesBy(make))
