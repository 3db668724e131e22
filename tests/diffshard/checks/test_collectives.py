"""HLO in every spelling that the CPU and GPU backends write, and real programs of the CPU backend."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from diffshard.checks.collectives import hlo_collectives, with_reduce_scatters

MESH = {"data": 2, "model": 4}


GPU = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %x)
}

%body (p: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %p = (s32[], f32[16,8]{1,0}) parameter(0)
  %all-reduce-start = (f32[16,8]{1,0}, bf16[4]{0}) all-reduce-start(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(step)/while/dot_general"}
  %all-reduce-done = (f32[16,8]{1,0}, bf16[4]{0}) all-reduce-done(%all-reduce-start)
  ROOT %t = (s32[], f32[16,8]{1,0}) tuple(%i, %r)
}

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %permute = f32[8]{0:T(256)} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}

%cheap (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

ENTRY %main.1_spmd (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %ag = ((bf16[4,256]{0,1}, f32[2]{0}), (bf16[8,256]{0,1}, f32[4]{0})) all-gather-start(%x, %y), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %ag.done = (bf16[8,256]{0,1}, f32[4]{0}) all-gather-done(%ag)
  %rs = ((f32[32]{0}), f32[8]{0}) reduce-scatter-start(%z), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}, to_apply=%add
  %rs.done = f32[8]{0} reduce-scatter-done(%rs)
  %a2a = (f32[1,5]{1,0}, f32[1,5]{1,0}, f32[1,5]{1,0}, /*index=3*/f32[1,5]{1,0}) all-to-all(%s, %s, %s, %s), replica_groups={{0,1,2,3},{4,5,6,7}}
  %whole = f32[4,5]{1,0} all-to-all(%s), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  %alone = f32[8]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add
  %w = (s32[], f32[16,8]{1,0}) while(%init), condition=%cheap, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %c = f32[8]{0} conditional(%which, %x, %x), branch_computations={%cheap, %inner}
  %async = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%x), calls=%inner
  ROOT %done = f32[8]{0} async-done(%async)
}
"""  # noqa: E501 instructions are lines


def test_every_form_of_a_gpu_program():
    found = hlo_collectives(GPU, MESH)
    assert [(c.kind, c.axes, c.num_devices, c.num_bytes, c.num_tensors, c.count) for c in found] == [
        ("all_gather", ("data",), 2, 8 * 256 * 2 + 4 * 4, 2, 1),
        ("reduce_scatter", ("model",), 4, 32 * 4, 1, 1),
        ("all_to_all", ("model",), 4, 4 * 4 * 5 * 4, 1, 1),
        ("all_to_all", ("model",), 4, 4 * 4 * 5 * 4, 1, 1),
        ("collective_permute", ("data",), 4, 8 * 4, 1, 1),
        ("all_reduce", ("model",), 4, 16 * 8 * 4 + 4 * 2, 2, 6),
        ("collective_permute", ("model",), 4, 8 * 4, 1, 1),
        ("collective_permute", ("model",), 4, 8 * 4, 1, 1),
    ]
    assert found[0].dtype == "bf16+f32"
    assert found[5].source == "jit(step)/while/dot_general"


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo_collectives("not HLO", MESH)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_a_program_of_the_cpu_backend(mesh):
    """Column and row parallel in a loop: one all-reduce of the local activations each trip; then one gather."""
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))

    @functools.partial(jax.jit, in_shardings=place((P("data"), P(None, "model"), P("model"))), out_shardings=place(P()))
    def function(x, w, v):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w) @ v, None), x, None, length=5)
        return lax.with_sharding_constraint(x, place(P("data")))

    shapes = ((16, 32), (32, 64), (64, 32))
    program = function.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    assert program is not None
    found = {(c.kind, c.axes, c.num_bytes, c.count) for c in hlo_collectives(program, mesh.shape)}
    assert found == {("all_reduce", ("model",), 8 * 32 * 4.0, 5.0), ("all_gather", ("data",), 16 * 32 * 4.0, 1.0)}


def test_all_reduces_that_are_sliced_on_the_cpu_backend_are_reduce_scatters(mesh):
    """One of three gradients is used whole; XLA combines the all-reduces of all three."""
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))

    def function(w, x, g):
        first = lax.with_sharding_constraint(x.T @ g, place(P("model")))
        second = lax.with_sharding_constraint(x.T @ (g * 2), place(P(None, "model")))
        third = lax.with_sharding_constraint(x.T @ jnp.sin(g), place(P()))
        return w - 0.1 * first, second * 3, third

    specs = (P("model"), P("model"), P("model"))
    shapes = ((32, 16), (64, 32), (64, 16))
    jitted = jax.jit(function, in_shardings=place(specs), out_shardings=place((P("model"), P(None, "model"), P())))
    program = jitted.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    assert program is not None
    found = hlo_collectives(program, mesh.shape)
    totals = {}
    for c in with_reduce_scatters(found, mesh.shape):
        totals[c.kind, c.axes] = totals.get((c.kind, c.axes), 0.0) + c.num_bytes
    one = 32 * 16 * 4.0
    assert totals == {("reduce_scatter", ("model",)): 2 * one, ("all_reduce", ("model",)): one}


def test_a_slice_at_a_place_of_the_users_own_is_no_reduce_scatter(mesh):
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    jitted = jax.jit(
        lambda x, g, i: lax.dynamic_slice(x.T @ g, (i, 0), (8, 16)),
        in_shardings=place((P("model"), P("model"), P())),
        out_shardings=place(P()),
    )
    shapes = (((64, 32), jnp.float32), ((64, 16), jnp.float32), ((), jnp.int32))
    program = jitted.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile().as_text()
    assert program is not None
    found = hlo_collectives(program, mesh.shape)
    assert [(c.kind, c.sliced_axes) for c in found] == [("all_reduce", ())]


SLICED = """\
HloModule jit_step, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %x)
}

ENTRY %main (x: f32[16]) -> f32[SIZE] {
  %x = f32[16]{0} parameter(0)
  %reduced = f32[16]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %device = u32[] partition-id()
  %other = u32[] constant(4)
  ROOT %part = f32[SIZE]{0} dynamic-slice(%reduced, %START), dynamic_slice_sizes={SIZE}
}
"""


@pytest.mark.parametrize(
    ("size", "start", "sliced_bytes"),
    [
        (4, "device", 64.0),  # a quarter of 16 numbers for each of four devices
        (8, "device", 0.0),  # more than a device's own part
        (2, "device", 0.0),
        (4, "other", 0.0),  # the same part on all devices
    ],
)
def test_only_a_device_s_own_part_makes_a_reduce_scatter(size, start, sliced_bytes):
    (found,) = hlo_collectives(SLICED.replace("SIZE", str(size)).replace("START", start), MESH)
    assert (found.kind, found.num_bytes, found.sliced_bytes) == ("all_reduce", 64.0, sliced_bytes)
    (record,) = with_reduce_scatters([found], MESH)
    assert record.kind == ("reduce_scatter" if sliced_bytes else "all_reduce")
