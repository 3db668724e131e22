"""The bodies of Pallas calls are counted at the places of their grid, loops as often as they run there."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from cost.compute import equation_flops


def counted(body, grid=(4, 2), **options):
    """Arithmetic of a call on an array [8, 8] that is one block."""
    spec = pl.BlockSpec((8, 8), lambda *_: (0, 0))
    call = pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), grid=grid, in_specs=[spec], out_specs=spec, **options
    )
    jaxpr = jax.make_jaxpr(call)(jnp.zeros((8, 8)))
    (equation,) = (e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "pallas_call")
    return equation_flops(equation)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name in ("jit", "pjit"):
            yield from _equations(equation.params["jaxpr"].jaxpr)


def squared(x_ref, y_ref, times):
    """Adds a product of 1,024 operations as often as told."""
    product = lambda _, total: total + jax.lax.dot(x_ref[...], x_ref[...])  # noqa: E731
    y_ref[...] = jax.lax.fori_loop(0, times, product, x_ref[...])


ONCE = 2 * 8 * 8 * 8 + 8 * 8


@pytest.mark.parametrize(
    ("times", "mean"),
    [
        (lambda: 3, 3),
        (lambda: pl.program_id(0), 1.5),
        (lambda: pl.program_id(0) + 2 * pl.program_id(1), 2.5),
        (lambda: (pl.program_id(0) * 4 + 3) // 4, 1.5),
        (lambda: jnp.minimum(pl.program_id(0), 1), 0.75),
        (lambda: pl.num_programs(0) - pl.program_id(0), 2.5),
        (lambda: pl.cdiv(pl.program_id(0), 2), 1),
    ],
)
def test_loops_run_as_often_as_their_place_says(times, mean):
    count = counted(lambda x, y: squared(x, y, times()))
    assert count == pytest.approx(mean * ONCE * 8, rel=0.02)


def test_branches_count_where_they_are_taken():
    def body(x_ref, y_ref):
        @pl.when(pl.program_id(0) == 3)
        def _():
            squared(x_ref, y_ref, 4)

    assert counted(body) == pytest.approx(ONCE * 8)


def test_of_branches_that_data_decide_the_largest_counts():
    def body(x_ref, y_ref):
        x = x_ref[...]
        y_ref[...] = jax.lax.cond(x_ref[0, 0] > 0, lambda: x @ x, lambda: x)

    def other(x_ref, y_ref):
        x = x_ref[...]
        y_ref[...] = jax.lax.cond(x_ref[0, 0] > 0, lambda: x, lambda: x @ x)

    assert counted(body) == counted(other) == pytest.approx(2 * 8**3 * 8, rel=0.01)


def test_large_grids_are_sampled():
    assert counted(lambda x, y: squared(x, y, pl.program_id(0)), (100_000,)) == pytest.approx(
        99_999 / 2 * ONCE * 1e5, rel=0.02
    )


def test_an_estimate_is_believed():
    estimate = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)
    assert counted(lambda x, y: squared(x, y, 1), cost_estimate=estimate) == 7
