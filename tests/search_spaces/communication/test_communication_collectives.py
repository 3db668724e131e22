"""Collectives: simulated as on a mesh, encoded as exact, what travels as what is counted."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from search_spaces.communication.base import FLOAT32, INT4, INT8, CollectiveOp
from search_spaces.communication.collectives import run_encoded, run_exact
from search_spaces.communication.simulated_spmd import simulate
from search_spaces.communication.strategies import stages_of

MESH = {"data": 2, "model": 4}
BOTH = ("data", "model")
SHAPE = (2, 32, 5)
COLLECTIVES = [
    CollectiveOp("all_reduce", ("model",), (4,)),
    CollectiveOp("all_reduce", BOTH, (2, 4)),
    CollectiveOp("all_gather", BOTH, (2, 4), (1,), True),
    CollectiveOp("all_gather", ("data",), (2,), (1,), False),
    CollectiveOp("reduce_scatter", BOTH, (2, 4), (1,), True),
    CollectiveOp("reduce_scatter", ("data",), (2,), (0,), False),
    CollectiveOp("all_to_all", ("model",), (4,), (1, 0), True),
    CollectiveOp("all_to_all", ("data",), (2,), (0, 2), False),
    CollectiveOp("all_to_all", BOTH, (2, 4), (1, 2), True),
    CollectiveOp("collective_permute", ("model",), (4,), permutation=((0, 1), (1, 2), (2, 3))),
]
IDS = [f"{c.kind} {len(c.axes)} {c.tiled}" for c in COLLECTIVES]
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(8 * SHAPE[0], *SHAPE[1:])), jnp.float32)


def _on_devices(fn, x, on_mesh=False):
    """Every device's result of `fn(x, key)`, `[8, ...]`."""

    def local(x, key):
        return jax.tree.map(lambda y: y[None], fn(x, key))

    in_specs, out_specs = (P(BOTH), P()), P(BOTH)
    if on_mesh:
        mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    else:
        run = simulate(local, MESH, in_specs, out_specs)
    return jax.tree.map(np.asarray, jax.jit(run)(x, jax.random.key(0)))


@pytest.mark.parametrize("collective", COLLECTIVES, ids=IDS)
def test_simulated_and_encoded_results(collective):
    precisions = (FLOAT32, INT8, INT4.stochastic)

    def all_of_them(x, key):
        return [run_exact(collective, x), *(run_encoded(collective, x, precision, key) for precision in precisions)]

    results = _on_devices(all_of_them, NUMBERS)
    exact, *encoded = results
    assert exact.shape[1:] == collective.result_shape(SHAPE)
    for simulated, real in zip(
        jax.tree.leaves(results), jax.tree.leaves(_on_devices(all_of_them, NUMBERS, True)), strict=True
    ):
        np.testing.assert_allclose(simulated, real, rtol=0, atol=1e-6)  # one ulp of the sums of eight
    # Each addend is off by at most half a step (a whole one if stochastic), and each sum once more for each axis.
    summed = collective.num_devices if collective.kind in ("all_reduce", "reduce_scatter") else 1
    largest = float(jnp.abs(NUMBERS).max()) * summed
    for (y, residuals), step in zip(encoded, (1e-6, 0.5 / 127, 1 / 7), strict=True):
        assert np.abs(y - exact).max() <= 2.2 * (2 if summed > 1 else 1) * step * largest
        if collective.kind == "all_reduce":
            copies = 8 // collective.num_devices  # groups, each with a sum of its own
            own = residuals.reshape(2, 4, *SHAPE).sum(axis=(0, 1) if copies == 1 else 1)
            missing = (exact - y).reshape(2, 4, *SHAPE)[:, 0]
            np.testing.assert_allclose(own, missing[0] if copies == 1 else missing, atol=2e-5)
        if collective.kind == "reduce_scatter":
            own = residuals.reshape(2, 4, *SHAPE).sum(axis=(0, 1) if collective.tiled else 0)
            missing = exact - y  # each device has a part of the sum
            parts = missing.reshape(2, 4, *SHAPE[1:]).swapaxes(0, 1) if not collective.tiled else None
            np.testing.assert_allclose(own, np.concatenate(missing, 1) if parts is None else parts, atol=2e-5)


def test_devices_round_by_noise_of_their_own():
    """Of equal numbers on eight devices the mean is off by less than each, because their errors are independent."""
    gather, same = CollectiveOp("all_gather", BOTH, (2, 4), (0,), False), NUMBERS[:2]
    gathered = _on_devices(lambda x, key: run_encoded(gather, same, INT4.stochastic, key)[0], NUMBERS)
    assert (gathered == gathered[0]).all()  # all devices get the same codes
    errors = gathered[0] - np.asarray(same)
    assert np.abs(errors.mean(axis=0)).mean() < 0.5 * np.abs(errors).mean()


@pytest.mark.parametrize("collective", COLLECTIVES, ids=IDS)
def test_transposes_are_adjoint(collective):
    y = _on_devices(lambda x, key: run_exact(collective, x), NUMBERS)
    other = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
    flat = jnp.asarray(other.reshape(-1, *other.shape[2:]))
    back = _on_devices(lambda x, key: run_exact(collective.transpose(), x), flat) if other.ndim > 2 else None
    assert back is not None
    assert back.shape[1:] == SHAPE
    assert np.vdot(y, other) == pytest.approx(np.vdot(NUMBERS.reshape(8, *SHAPE), back), rel=1e-4)


def _travelling_bytes(jaxpr) -> float:
    """Bytes that a device sends by the collectives in a jaxpr."""
    total = 0.0
    for equation in jaxpr.eqns:
        axes = equation.params.get("axis_name", ())
        n = prod(MESH[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis in MESH)
        num_bytes = sum(
            v.aval.size * v.aval.dtype.itemsize for v in equation.invars if hasattr(v.aval, "itemsize") or n
        )
        share = {"all_to_all": (n - 1) / n, "all_gather": n - 1, "ppermute": 1}
        if equation.primitive.name in share:
            total += num_bytes * share[equation.primitive.name]
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                total += _travelling_bytes(inner.jaxpr)
    return total


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c.kind != "all_to_all" or len(c.axes) == 1])
@pytest.mark.parametrize("precision", [INT8, INT4], ids=lambda p: p.name)
def test_counted_bytes_are_those_that_travel(collective, precision):
    traced = jax.make_jaxpr(lambda x, key: run_encoded(collective, x, precision, key), axis_env=list(MESH.items()))(
        jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.random.key(0)
    )
    counted = sum(stage.sent_bytes for stage in stages_of(collective, SHAPE, np.dtype("float32"), precision))
    assert counted == pytest.approx(_travelling_bytes(traced.jaxpr))


def test_exact_bytes_by_hand():
    def sent(collective):
        return [(s.axis, s.sent_bytes) for s in stages_of(collective, (100, 8), np.dtype("float32"), None)]

    assert sent(CollectiveOp("all_reduce", ("model",), (4,))) == [("model", 2 * 3200 * 3 / 4)]
    assert sent(CollectiveOp("all_reduce", BOTH, (2, 4))) == [("model", 2 * 3200 * 3 / 4), ("data", 2 * 800 / 2)]
    assert sent(CollectiveOp("all_gather", BOTH, (2, 4), (0,), True)) == [("data", 3200.0), ("model", 6400 * 3.0)]
    assert sent(CollectiveOp("all_to_all", ("model",), (4,), (0, 1), True)) == [("model", 3200 * 3 / 4)]
