"""Gathers and scatters that name rows by their own numbers compute the same without these numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from search_spaces.pipelines.own_rows import with_own_rows

ROWS = jnp.arange(6)
LABELS = jnp.array([3, 0, 4, 4, 1, 2])
TABLE, CUBE = jnp.arange(30.0).reshape(6, 5), jnp.arange(120.0).reshape(6, 4, 5)


def batching_dims(jaxpr):
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(("gather", "scatter")):
            found.append(equation.params["dimension_numbers"].operand_batching_dims)
        for inner in (v.jaxpr for v in equation.params.values() if hasattr(v, "consts")):
            found += batching_dims(inner)
    return found


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda x, y: x[jnp.arange(6), y], (TABLE, LABELS), [(0,)]),
        (jax.grad(lambda x, y: (x[jnp.arange(6), y] ** 2).sum()), (TABLE, LABELS), [(0,), (0,)]),
        (jax.jit(lambda x, y: x[jnp.arange(6), y]), (TABLE, LABELS), [(0,)]),
        (jax.grad(jax.jit(lambda x, y: (x[jnp.arange(6), y] ** 2).sum())), (TABLE, LABELS), [(0,), (0,)]),
        (lambda x, y: x[jnp.arange(6)[:, None], jnp.arange(4)[None], y[:, None]], (CUBE, LABELS), [(0, 1)]),
        (lambda x, y: x[jnp.arange(6), :, y], (CUBE, LABELS), [(0,)]),
        (lambda x, y: x[jnp.arange(6), y % 4, y], (CUBE, LABELS), [(0,)]),
        (lambda x, y: x.at[jnp.arange(6), y].add(1.0), (TABLE, LABELS), [(0,)]),
        (lambda x, y: jax.lax.map(lambda k: x[jnp.arange(6), y] * k, ROWS), (TABLE, LABELS), [(0,)]),
        (lambda x, y: x[jnp.arange(6)[::-1], y], (TABLE, LABELS), [()]),
        (lambda x, y: x[jnp.arange(3), y[:3]], (TABLE, LABELS), [()]),
        (lambda x, y: x[y, y % 5], (TABLE, LABELS), [()]),
        (lambda x, y: x[jnp.arange(5), jnp.arange(5)], (TABLE, LABELS), [(1,)]),
    ],
)
def test_results_are_the_same_and_own_rows_are_mapped_over(function, args, expected):
    program = jax.make_jaxpr(function)(*args)
    changed = with_own_rows(program)
    assert batching_dims(changed.jaxpr) == expected
    assert (changed is program) == (expected == [()])
    for one, other in zip(jaxpr_as_fun(program)(*args), jaxpr_as_fun(changed)(*args), strict=True):
        np.testing.assert_array_equal(one, other)
