"""Pallas calls are split along the axes of their grid that do nothing but number blocks, without being told."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.sharding import AxisType, PartitionSpec

import diffshard
from cost.compute import equation_flops
from search_spaces.sharding.custom_calls import operations, pallas
from search_spaces.sharding.custom_calls.kernel import Parts
from tests.search_spaces.sharding.custom_calls.layouts import check_layout, split_dimensions, strategies_of
from tests.search_spaces.sharding.small_spaces import array

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11 recommends another package
    from jax.experimental.pallas.ops.gpu import (
        attention,
        decode_attention,
        layer_norm,
        paged_attention,
        rms_norm,
        softmax,
    )

BLOCKS = attention.BlockSizes(
    block_q=8, block_k=8, block_q_dkv=8, block_kv_dkv=8, block_q_dq=8, block_kv_dq=8
)  # fmt: skip


def mha(causal, blocks=BLOCKS):
    return lambda q, k, v: attention.mha(q, k, v, None, causal=causal, block_sizes=blocks, interpret=True)


def gradients(fn, *argnums):
    """Results and gradients of the sum of squares."""
    return lambda *args: jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32) ** 2), argnums)(*args)


def scaled_rows(x, w, block=4, **options):
    """Two rows at a time, each times a vector."""

    def body(x_ref, w_ref, y_ref):
        y_ref[...] = x_ref[...] * w_ref[...]

    rows, width = x.shape
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // block,),
        in_specs=[pl.BlockSpec((block, width), lambda i: (i, 0)), pl.BlockSpec((width,), lambda i: (0,))],
        out_specs=pl.BlockSpec((block, width), lambda i: (i, 0)),
        interpret=True,
        **options,
    )(x, w)


def called(body, index_maps, *, out=(8, 16), blocks=((1, 16), (1, 16)), grid=(8,)):
    """A call on an array [8, 16] by the index maps of its operand and its result."""
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=grid,
        in_specs=[pl.BlockSpec(blocks[0], index_maps[0])],
        out_specs=pl.BlockSpec(blocks[1], index_maps[1]),
        interpret=True,
    )


def copy(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def written_over(in_blocks):
    """A call whose result takes the memory of its operand, which has the same blocks or is one block."""
    blocks = pl.BlockSpec((1, 16), lambda i: (i, 0))
    whole = pl.BlockSpec((8, 16), lambda i: (0, 0))

    def body(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[:1] + y_ref[...]

    def fn(x, y):
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
            grid=(8,),
            in_specs=[blocks if in_blocks else whole, blocks],
            out_specs=blocks,
            input_output_aliases={0: 0},
            interpret=True,
        )(x, y)

    return fn


def add(x_ref, y_ref):
    y_ref[...] += x_ref[...]


def where_it_runs(x_ref, y_ref):
    y_ref[...] = x_ref[...] + pl.program_id(0)


def draw(x_ref, y_ref):
    """Random numbers of a generator that goes on from one place of the grid to the next."""
    y_ref[...] = x_ref[...] + pltpu.bitcast(pltpu.prng_random_bits(x_ref.shape), jnp.float32)


def lookup(q, k_pages, v_pages, block_tables, lengths):
    return paged_attention.paged_attention(
        q, k_pages, v_pages, block_tables, lengths, pages_per_compute_block=2, k_splits=2, interpret=True
    )


def normal(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def paged_arguments():
    q, k, v = normal((4, 32, 16), (2, 16, 4, 16), (2, 16, 4, 16))
    return [q, k, v, jnp.arange(16).reshape(4, 4), jnp.array([16, 3, 9, 12])]


HEADS = [(4, 16, 4, 16)] * 3
CASES = {
    "attention": (gradients(mha(False), 0, 1, 2), normal(*HEADS)),
    "causal attention": (gradients(mha(True), 0, 1, 2), normal(*HEADS)),
    "decoding": (
        functools.partial(decode_attention.gqa, block_h=2, k_splits=2, interpret=True),
        normal((4, 8, 16), (4, 32, 4, 16), (4, 32, 4, 16)),
    ),
    "paged attention": (lookup, paged_arguments()),
    "layer norm": (
        gradients(lambda x, w, b: layer_norm.layer_norm(x, w, b, interpret=True), 0, 1, 2),
        normal((8, 4, 16), (16,), (16,)),
    ),
    "rms norm": (
        gradients(lambda x, w, b: rms_norm.rms_norm(x, w, b, interpret=True), 0, 1, 2),
        normal((8, 4, 16), (16,), (16,)),
    ),
    "softmax": (lambda x: softmax.softmax(x, interpret=True), normal((8, 4, 16))),
    "blocks of rows": (scaled_rows, normal((16, 8), (8,))),
    "batch of calls": (jax.vmap(scaled_rows, (0, None)), normal((4, 16, 8), (8,))),
}


@pytest.mark.parametrize(("seed", "executor"), [(0, "execution"), (1, "device_program")])
@pytest.mark.parametrize("name", CASES)
def test_random_layouts_compute_what_one_device_computes(name, seed, executor):
    fn, arguments = CASES[name]
    check_layout(fn, arguments, seed, executor, tolerance=2e-3)


def calls(fn, *avals):
    return [s for _, s in strategies_of("pallas_call", fn, *avals)[1]]


def test_attention_is_split_by_batch_heads_and_blocks_of_queries():
    heads = [array(4, 16, 4, 16)] * 3
    forward, _, backward = calls(gradients(mha(False), 0, 1, 2), *heads)
    assert split_dimensions(forward) == {0, 1, 2}
    assert split_dimensions(forward, operand=1) == {0, 2}
    assert split_dimensions(backward) == {0, 2}, "each block of a gradient sums over the whole sequence"
    (causal,) = calls(mha(True), *heads)
    assert split_dimensions(causal) == {0, 2}, "the mask asks where the block lies"


@pytest.mark.parametrize(
    "fn",
    [
        called(where_it_runs, [lambda i: (i, 0)] * 2),
        called(draw, [lambda i: (i, 0)] * 2),
        called(copy, [lambda i: (i, 0), lambda i: (7 - i, 0)]),
        called(copy, [lambda i: (i // 2, 0), lambda i: (i, 0)]),
        called(add, [lambda i: (i, 0), lambda i: (0, 0)], out=(1, 16)),
        called(copy, [lambda i: (i, i)] * 2, blocks=((1, 2), (1, 2))),
        called(copy, [lambda i: (i, 0)] * 2, blocks=((3, 16), (3, 16)), grid=(3,)),
    ],
    ids=[
        "asks its place",
        "draws random numbers",
        "writes backwards",
        "reads twice",
        "accumulates",
        "diagonal",
        "last block is not full",
    ],
)
def test_axes_that_do_more_than_number_blocks_stay_whole(fn):
    space, ((_, strategies),) = strategies_of("pallas_call", fn, array(8, 16))
    assert len(strategies) == 1
    names = ("'copy'", "'add'", "'draw'", "'where_it_runs'")
    assert any(name in note for name in names for note in space.notes if "runs whole" in note)


def test_a_result_in_the_memory_of_an_operand_is_split_like_it():
    (strategies,) = calls(written_over(True), *[array(8, 16)] * 2)
    assert split_dimensions(strategies) == {0}
    (strategies,) = calls(written_over(False), *[array(8, 16)] * 2)
    assert len(strategies) == 1


def test_a_block_is_not_divided():
    (strategies,) = calls(scaled_rows, array(16, 8), array(8))
    assert {s.operands[0][0] for s in strategies} == {(), (0,), (1,)}, "4 blocks on 2 or 4 devices, not on 8"


def work(fn, *avals):
    _, ((vertex, _),) = strategies_of("pallas_call", fn, *avals)
    assert vertex.equation is not None
    return equation_flops(vertex.equation)


def test_the_body_counts_at_each_place_of_the_grid():
    heads = [array(4, 64, 4, 16)] * 3
    products = 4 * 4 * 4 * 64 * 64 * 16
    assert products < work(mha(False), *heads) < 2.2 * products
    # Of 8 blocks of keys a block of queries reads 1 to 8, 4.5 in the mean.
    assert work(mha(True), *heads) == pytest.approx(work(mha(False), *heads) * 4.5 / 8, rel=0.1)


def test_a_call_that_estimates_its_cost_is_believed():
    def call(x):
        estimate = pl.CostEstimate(flops=8_000_000, transcendentals=0, bytes_accessed=16_000)
        return pl.pallas_call(copy, out_shape=x, cost_estimate=estimate, interpret=True)(x)

    space, ((vertex, strategies),) = strategies_of("pallas_call", call, array(8, 16))
    assert space.node_costs.compute_s(vertex, strategies) == pytest.approx([8e6 / 1e12])


def test_a_call_on_parts_estimates_the_cost_of_its_parts():
    estimate = pl.CostEstimate(flops=8_000, transcendentals=400, bytes_accessed=16_000)
    fn = functools.partial(scaled_rows, cost_estimate=estimate)
    _, ((vertex, strategies),) = strategies_of("pallas_call", fn, array(16, 8), array(8))
    equation = vertex.equation
    assert equation is not None
    for strategy in strategies:
        parts = Parts(strategy.operands, strategy.unreduced, ("x", "y"), (2, 4))
        operands = operations.local_operands(vertex, strategy, (2, 4))
        jaxpr = jax.make_jaxpr(lambda *x, parts=parts: pallas.run_call(equation, x, parts))(*operands)
        (bound,) = jaxpr.eqns
        n = strategy.parts
        numbers = bound.params["cost_estimate"]
        assert (numbers.flops, numbers.transcendentals, numbers.bytes_accessed) == (8_000 // n, 400 // n, 16_000 // n)
    assert {s.parts for s in strategies} == {1, 2, 4}


def test_unknown_calls_cost_their_bytes():
    space, ((vertex, strategies),) = strategies_of(
        "pallas_call", pl.pallas_call(copy, out_shape=array(512, 512), interpret=True), array(512, 512)
    )
    assert space.node_costs.compute_s(vertex, strategies) == pytest.approx([2 * 512 * 512 * 4 / 1e12])


def test_flash_attention_for_tpus_is_known():
    heads = [array(4, 8, 256, 128)] * 3
    for strategies in calls(gradients(lambda *x: flash_attention.flash_attention(*x, causal=True), 0, 1, 2), *heads):
        assert split_dimensions(strategies) == {0, 1}


def test_layers_with_equal_calls_have_equal_forms():
    def layers(x, w):
        for _ in range(3):
            x = scaled_rows(x, w)
        return x

    space, vertices = strategies_of("pallas_call", layers, array(16, 8), array(8))
    assert len({space.forms[v.index] for v, _ in vertices}) == 1


def test_results_are_those_of_the_interpreter():
    x, w = normal((16, 8), (8,))
    np.testing.assert_allclose(scaled_rows(x, w), x * w, rtol=1e-6)


@pytest.mark.parametrize("executor", ["program", "constraints", "propagation"])
def test_a_plan_from_a_file_runs_calls_on_parts(executor, tmp_path, monkeypatch):
    def step(x, w):
        return jnp.tanh(scaled_rows(x, w))

    x, w = normal((32, 8), (8,))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("data"), PartitionSpec())
    plan = diffshard.search(step, mesh, in_shardings=specs, hardware="h100", executor="program").plan(x, w)
    plan.save(tmp_path / "plan.json")
    applied = diffshard.Plan.load(tmp_path / "plan.json", mesh).apply(step, executor=executor)
    grids = set()

    def watched(equation, operands, parts):
        parameters = pallas._local_parameters(equation, operands)
        grids.add(tuple(parameters["grid_mapping"].grid))
        return run(equation, operands, parts)

    known = operations.CUSTOM_CALLS["pallas_call"]
    run = known.run
    monkeypatch.setitem(operations.CUSTOM_CALLS, "pallas_call", known._replace(run=watched))
    np.testing.assert_allclose(applied(*plan.shard(x, w)), step(x, w), rtol=1e-5)
    assert grids == {(1,)}, "8 blocks of 4 rows, one on each device"
