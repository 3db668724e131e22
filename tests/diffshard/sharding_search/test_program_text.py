"""Texts of functions and values: equal in every process, and different wherever a plan may be."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffshard.sharding_search.program_text import program_text, value_text


def _closure(factor: Any) -> Callable[..., Any]:
    def rule(x: Any) -> Any:
        return x * factor

    return rule


def _default(factor: Any) -> Callable[..., Any]:
    def rule(x: Any, factor: Any = factor) -> Any:
        return x * factor

    return rule


def _keyword_default(factor: Any) -> Callable[..., Any]:
    def rule(x: Any, *, factor: Any = factor) -> Any:
        return x * factor

    return rule


@dataclasses.dataclass
class _Solver:
    weights: Any


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    first = np.zeros(2000)
    second = first.copy()
    second[1000] = 1.0  # where NumPy's own text has dots
    return first, second


@pytest.mark.parametrize("make", [_closure, _default, _keyword_default, _Solver])
@pytest.mark.parametrize(
    "values",
    [(2, 3), _arrays(), (_closure(2), _closure(3)), (jax.random.key(0), jax.random.key(1))],
    ids=["numbers", "arrays", "functions", "keys"],
)
def test_what_a_function_or_an_object_holds_is_in_its_text(make: Callable[[Any], Any], values: tuple[Any, Any]):
    first, second = values
    assert value_text(make(first)) != value_text(make(second))
    assert value_text(make(first)) == value_text(make(first))


def test_functions_that_refer_to_each_other_have_a_short_text():
    functions: list[Callable[..., Any]] = []
    functions += [lambda: functions for _ in range(20)]
    assert len(value_text(functions)) < 10_000


def test_a_recursive_function_has_a_text():
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert "factorial" in value_text(factorial)


def test_sets_in_byte_code_do_not_depend_on_the_hash_seed():
    code = (
        "from diffshard.sharding_search.program_text import value_text\n"
        "print(value_text(lambda x: x in {'a', 'b', 'c', 'dd'}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 1, 2)
    }
    assert len(texts) == 1


def test_what_a_function_counts_is_not_in_its_text():
    calls: list[int] = []
    number = 0

    def solver(problem: Any) -> Any:
        nonlocal number
        number += 1
        calls.append(number)
        return problem

    before = value_text(solver)
    solver(None)
    assert value_text(solver) == before


def test_what_a_callback_collects_is_not_in_the_text_of_the_program():
    collected = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: collected.append(float(value)), x.sum())
        return x * 2

    before = program_text(jax.make_jaxpr(step)(jnp.ones(3)))
    collected.append(1.0)
    assert program_text(jax.make_jaxpr(step)(jnp.ones(3))) == before
