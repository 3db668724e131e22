"""Shardy's collectives of small sharded functions, their bytes worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from diffshard.checks.collectives import with_reduce_scatters
from diffshard.checks.explicit_collectives import explicit_collectives


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _lowered(mesh, function, in_specs, out_specs, *shapes, dtype=jnp.float32):
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function, in_shardings=place(in_specs), out_shardings=place(out_specs)).lower(*arguments)


def _summary(collectives):
    return [(c.kind, c.axes, c.num_devices, c.num_bytes, c.count) for c in collectives]


RESHARDS = {
    # An array of 16 x 32 float32: 2048 bytes.
    "gather": (P("model"), P(), [("all_gather", ("model",), 4, 2048.0, 1.0)]),
    "gather_local": (P("data", "model"), P("data"), [("all_gather", ("model",), 4, 1024.0, 1.0)]),
    "gather_both": (P(("data", "model")), P(), [("all_gather", ("data", "model"), 8, 2048.0, 1.0)]),
    "slice": (P(), P("model"), []),
    "transpose": (P("model"), P(None, "model"), [("all_to_all", ("model",), 4, 2048.0, 1.0)]),
    "transpose_local": (P("model", "data"), P(None, ("data", "model")), [("all_to_all", ("model",), 4, 1024.0, 1.0)]),
}


@pytest.mark.parametrize("name", RESHARDS)
def test_resharding_an_array(mesh, name):
    source, target, expected = RESHARDS[name]
    found = explicit_collectives(_lowered(mesh, lambda x: x, (source,), target, (16, 32)))
    assert _summary(found) == expected


def test_a_permutation_is_named_by_the_axes_that_move(mesh):
    lowered = _lowered(mesh, lambda x: x, (P(("data", "model")),), P(("model", "data")), (16, 32))
    (found,) = explicit_collectives(lowered)
    assert (found.kind, found.axes, found.num_bytes) == ("collective_permute", ("data", "model"), 256.0)


def test_a_contraction_over_a_sharded_dimension_is_reduced(mesh):
    specs = (P("data", "model"), P("model"))
    shapes = ((16, 32), (32, 8))
    lowered = _lowered(mesh, jnp.matmul, specs, P("data"), *shapes, dtype=jnp.bfloat16)
    (found,) = explicit_collectives(lowered)
    assert _summary([found]) == [("all_reduce", ("model",), 4, 8 * 8 * 2.0, 1.0)]
    assert found.dtype == "bf16"
    assert "dot_general" in found.source


def test_an_all_reduce_that_is_scattered_says_so(mesh):
    raw = explicit_collectives(
        _lowered(mesh, jnp.matmul, (P("data", "model"), P("model")), P("data", "model"), (16, 32), (32, 8))
    )
    assert [(c.kind, c.sliced_axes) for c in raw] == [("all_reduce", ("model",))]
    assert _summary(with_reduce_scatters(raw, mesh.shape)) == [("reduce_scatter", ("model",), 4, 8 * 8 * 4.0, 1.0)]


def test_bodies_of_loops_count_each_trip_and_of_branches_the_dearest(mesh):
    def function(x, w, p):
        def body(x, _):
            return lax.fori_loop(2, 5, lambda i, x: x @ w, x), None

        x, _ = lax.scan(body, x, None, length=7)
        return lax.cond(p[0] > 0, lambda: x, lambda: (x @ w) @ w)

    lowered = _lowered(mesh, function, (P("data", "model"), P("model"), P()), P("data"), (16, 32), (32, 32), (1,))
    found = explicit_collectives(lowered)
    assert {c.count for c in found} == {1.0, 21.0}
    assert any(c.kind == "all_reduce" and c.axes == ("model",) and c.count == 21.0 for c in found)


def test_a_shard_map_tells_its_own_collectives(mesh):
    def local(x):
        return lax.all_gather(lax.psum(x, "data"), "model")

    function = jax.shard_map(local, mesh=mesh, in_specs=P("data", "model"), out_specs=P(), check_vma=False)
    found = explicit_collectives(_lowered(mesh, function, (P("data", "model"),), P(), (16, 32)))
    assert _summary(found) == [
        ("all_reduce", ("data",), 2, 8 * 8 * 4.0, 1.0),
        ("all_gather", ("model",), 4, 4 * 8 * 8 * 4.0, 1.0),
    ]


def test_groups_of_one_device_are_left_out():
    mesh = jax.make_mesh((4, 1), ("data", "one"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)

    def local(x):
        x = lax.ppermute(x, "data", [(i, i) for i in range(4)])
        x = lax.all_gather(lax.psum(x, "one"), "one", tiled=True)
        return lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])

    function = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    found = explicit_collectives(_lowered(mesh, function, (P("data"),), P("data"), (16, 32)))
    assert _summary(found) == [("collective_permute", ("data",), 4, 4 * 32 * 4.0, 1.0)]


def test_the_lowered_computation_is_left_as_it_was(mesh):
    lowered = _lowered(mesh, jnp.matmul, (P("data", "model"), P("model")), P("data"), (16, 32), (32, 8))
    before = lowered.as_text()
    assert explicit_collectives(lowered) == explicit_collectives(lowered)
    assert lowered.as_text() == before
