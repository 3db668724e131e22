"""Attention whose queries are split over their sequence: equal results, its price, what it sends, when it is chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.checks.verify import verify
from search_spaces.sharding.custom_calls.cudnn import BACKWARD, FORWARD, planned_without_cudnn
from tests.search_spaces.sharding.small_spaces import array, hardware_of, space_of


def step(implementation, **options):
    """Attention's output and the gradients of a weighted sum of it."""

    def run(q, k, v, weights):
        def loss(q, k, v):
            out = jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)
            return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    return run


def avals(length, batch=2, heads=4, kv_heads=2, width=8):
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [array(*shape, dtype=jnp.float16) for shape in shapes]


def calls(space):
    return [v for v in space.graph.operations() if v.primitive in (FORWARD, BACKWARD)]


def choice_of(space, axis, key_axes):
    """A choice that splits nothing but the sequence in attention: of queries along an axis, of keys along others."""
    choice = [0] * len(space.nodes)
    for vertex in calls(space):
        wanted = ((), (axis,), (), ()), ((), key_axes, (), ())
        strategies = enumerate(space.nodes[vertex.index].strategies)
        choice[vertex.index] = next(i for i, s in strategies if s.operands[:2] == wanted)
    return choice


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all", "causal"])
@pytest.mark.parametrize("keys", ["ring", "whole keys"])
@pytest.mark.parametrize("axis", [0, 1], ids=["2 devices", "4 devices"])
def test_parts_of_a_sequence_give_what_one_device_gives(options, keys, axis):
    """Each two of causality, keys and devices with both executors: 8 of the 16 cases hold every three together."""
    executor = ("device_program", "execution")[(bool(options) + (keys == "ring") + axis) % 2]
    sizes = (2, 4)
    with planned_without_cudnn():
        space = space_of(step("cudnn", **options), *avals(32), sizes=sizes)
    choice = choice_of(space, axis, (axis,) if keys == "ring" else ())
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    program = getattr(space, executor)(space.layout(choice), mesh)
    seeds = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(seed, x.shape, x.dtype) for seed, x in zip(seeds, avals(32), strict=True)]
    exact = jax.jit(step("xla", **options))(*(x.astype(jnp.float32) for x in arrays))
    for result, expected in zip(jax.jit(program)(*arrays), exact, strict=True):
        np.testing.assert_allclose(result.astype(jnp.float32), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("key_axes", [(0,), ()], ids=["ring", "whole keys"])
def test_inference_needs_no_statistics_of_its_own(key_axes):
    def run(implementation):
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    shapes = avals(32)[:3]
    with planned_without_cudnn():
        space = space_of(run("cudnn"), *shapes, sizes=(4,))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    program = space.device_program(space.layout(choice_of(space, 0, key_axes)), mesh)
    seeds = jax.random.split(jax.random.key(3), 3)
    arrays = [jax.random.normal(seed, x.shape, x.dtype) for seed, x in zip(seeds, shapes, strict=True)]
    (result,) = jax.jit(program)(*arrays)
    np.testing.assert_allclose(result, run("xla")(*(x.astype(jnp.float32) for x in arrays)), atol=4e-3, rtol=4e-3)
    text = jax.jit(program).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text


def whole_attention(query_lengths=None, key_lengths=None, **options):
    """Attention of a batch with all kinds of masks, and its gradients."""

    def run(implementation):
        def fn(q, k, v, weights, *bias):
            def loss(q, k, v, *bias):
                out = jax.nn.dot_product_attention(
                    q, k, v, *bias, implementation=implementation, query_seq_lengths=query_lengths,
                    key_value_seq_lengths=key_lengths, **options
                )  # fmt: skip
                return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum()

            return jax.value_and_grad(loss, tuple(range(3 + len(bias))))(q, k, v, *bias)

        return fn

    return run


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, None),
        ({"is_causal": True}, None),
        ({"is_causal": True, "local_window_size": (7, 0)}, None),
        ({"query_lengths": jnp.array([20, 32]), "key_lengths": jnp.array([9, 32])}, None),
        ({}, (2, 4, 32, 32)),
        ({}, (1, 4, 32, 32)),
    ],
    ids=["all", "causal", "window", "lengths", "bias", "shared bias"],
)
def test_cudnn_attention_runs_on_other_devices_too(options, bias):
    run = whole_attention(**options)
    shapes = [*avals(32), *([array(*bias, dtype=jnp.float16)] if bias else [])]
    with planned_without_cudnn():
        space = space_of(run("cudnn"), *shapes, sizes=(2,))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    seeds = jax.random.split(jax.random.key(1), len(shapes))
    arrays = [jax.random.normal(seed, x.shape, x.dtype) for seed, x in zip(seeds, shapes, strict=True)]
    if "query_lengths" in options:  # what padded queries give is not defined
        is_query = jnp.arange(32)[:, None, None] < options["query_lengths"][:, None, None, None]
        arrays[3] = arrays[3] * is_query
    results = jax.jit(space.device_program(space.layout([0] * len(space.nodes)), mesh))(*arrays)
    exact = jax.jit(run("xla"))(*(x.astype(jnp.float32) for x in arrays))
    for result, expected in zip(results, jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(result.astype(jnp.float32), expected, atol=4e-3, rtol=4e-3)


def strategies_by_sequence(space, vertex):
    """The strategies of attention, by how the sequences of queries and keys are split where nothing else is."""
    strategies = space.nodes[vertex.index].strategies
    plain = [s for s in strategies if not any(s.operands[0][d] for d in (0, 2))]
    return {(s.operands[0][1], s.operands[1][1]): s for s in plain}


@pytest.mark.parametrize(
    ("length", "other", "options", "offered"),
    [
        (32, {}, {}, True),
        (32, {}, {"is_causal": True}, True),
        (28, {}, {}, True),
        (28, {}, {"is_causal": True}, False),  # parts of 7 do not divide into two chunks
        (30, {}, {}, False),
        (32, {}, {"is_causal": True, "local_window_size": (7, 0)}, False),
        (32, {"key_length": 64}, {}, False),
        (32, {"bias": True}, {}, False),
    ],
)
def test_a_ring_is_offered_where_it_can_run(length, other, options, offered):
    shapes = avals(length)[:3]
    if "key_length" in other:
        shapes = [shapes[0], *avals(other["key_length"])[1:3]]
    bias = [array(2, 4, length, length, dtype=jnp.float16)] if "bias" in other else []

    def fn(q, k, v, *bias):
        return jax.nn.dot_product_attention(q, k, v, *bias, implementation="cudnn", **options)

    with planned_without_cudnn():
        space = space_of(fn, *shapes, *bias, sizes=(4,))
    (forward,) = calls(space)
    assert (((0,), (0,)) in strategies_by_sequence(space, forward)) == offered


def test_a_ring_goes_along_one_axis():
    with planned_without_cudnn():
        space = space_of(step("cudnn"), *avals(64), sizes=(2, 4))
    for vertex in calls(space):
        split = strategies_by_sequence(space, vertex)
        assert ((0,), (0,)) in split
        assert not any(len(axes) > 1 for axes, _ in split)


@pytest.mark.parametrize("flops_per_s", [1e9, 1e10, 1e15], ids=["hidden", "partly", "waited"])
def test_the_price_of_a_ring_is_what_its_rounds_take_longer_to_send_than_to_compute(flops_per_s):
    hardware = hardware_of("x", latency_s=1e-6, flops_per_s=flops_per_s, memory_bytes_per_s=float("inf"))
    with planned_without_cudnn():
        space = space_of(step("cudnn"), *avals(64), sizes=(4,), hardware=hardware)
    forward, backward = calls(space)
    part_bytes, part_s = 2 * 16 * 2 * 8 * 2, 1e-9  # batch, positions, heads of keys, width, float16; seconds per byte
    sent_s = 1e-6 + part_bytes * part_s
    sum_s = 1e-6 + 2 * part_bytes * part_s  # of a gradient in float32
    product_s = 2 * 2 * 4 * 64 * 64 * 8 / 4 / flops_per_s
    for vertex, products, round_s, last_s in (
        (forward, 2, 2 * sent_s, 0.0),
        (backward, 5, 2 * sent_s + 2 * sum_s, 2 * sum_s),
    ):
        strategy = strategies_by_sequence(space, vertex)[(0,), (0,)]
        compute_s = products * product_s
        exposed_s = 3 * max(0.0, round_s - compute_s / 4) + last_s
        own = space.node_costs.own_collectives(vertex, strategy)
        assert sum(c.exposed_s for c in own) == pytest.approx(exposed_s)
        assert sum(c.link_s for c in own) == pytest.approx(3 * round_s + last_s)
        index = space.nodes[vertex.index].strategies.index(strategy)
        assert space.node_costs.node_s(space.nodes[vertex.index])[index] == pytest.approx(compute_s + exposed_s)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all", "causal"])
@pytest.mark.parametrize("key_axes", [(0,), ()], ids=["ring", "whole keys"])
def test_a_plan_lists_what_its_program_sends(options, key_axes):
    with planned_without_cudnn():
        space = space_of(step("cudnn", **options), *avals(32), sizes=(4,))
    choice = choice_of(space, 0, key_axes)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    lowered = jax.jit(space.device_program(space.layout(choice), mesh)).lower(*avals(32))
    transfers: Any = space.predict(choice).transfers
    assert any(t.kind == "collective_permute" for t in transfers) == bool(key_axes or options)
    for row in verify(lowered, mesh.shape, transfers, 0.0).collectives:
        assert row.predicted == row.shardy, row


def test_a_planned_and_saved_ring_runs_as_one_device(tmp_path):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    shapes = avals(4096, batch=1, heads=1, kv_heads=1)
    hardware = hardware_of(("model",), latency_s=1e-6, flops_per_s=1e11)
    sharding = NamedSharding(mesh, P(None, "model"))
    found = diffshard.search(
        step("cudnn", is_causal=True), mesh, hardware=hardware, in_shardings=(sharding,) * 4, executor="program"
    )
    plan = found.plan(*shapes)
    plan.save(tmp_path / "plan.json")
    run = diffshard.Plan.load(tmp_path / "plan.json", mesh).apply(step("cudnn", is_causal=True))
    assert "collective_permute" in run.lower(*shapes).as_text()
    seeds = jax.random.split(jax.random.key(2), 4)
    arrays = [jax.random.normal(seed, x.shape, x.dtype) for seed, x in zip(seeds, shapes, strict=True)]
    exact = jax.jit(step("xla", is_causal=True))(*(x.astype(jnp.float32) for x in arrays))
    for result, expected in zip(run(*plan.shard(*arrays)), exact, strict=True):
        np.testing.assert_allclose(result.astype(jnp.float32), expected, atol=4e-3, rtol=4e-3)


def layer_step(x, weights):
    """The gradients of a layer of causal attention with projections in and out of it."""

    def loss(x, weights):
        q, k, v = (jnp.einsum("blm,mnh->blnh", x, w) for w in weights[:3])
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return (x * jnp.einsum("blnh,nhm->blm", out, weights[3])).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(x, weights)


def chosen(length, heads, width=1024):
    """The best plan for 8 H100s, which get and leave parts of the sequence, and how it splits queries and keys."""
    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x, into = array(1, length, width, dtype=jnp.bfloat16), array(width, heads, 128, dtype=jnp.bfloat16)
    weights = (into, into, into, array(heads, 128, width, dtype=jnp.bfloat16))
    parts, whole = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P())
    found = diffshard.search(layer_step, mesh, hardware="h100", in_shardings=(parts, (whole,) * 4))
    plan = found.plan(x, weights)
    return plan, [o.operands[:2] for o in plan.operations if o.signature.startswith("dot_product_attention")]


def test_a_ring_is_chosen_for_long_sequences_of_few_heads():
    sequence = ((), ("model",), (), ())
    plan, specs = chosen(262144, heads=2)
    assert specs == [(sequence, sequence)] * 2
    permutes = [c for c in plan.collectives if c.kind == "collective_permute"]
    assert sum(c.seconds for c in permutes) < 0.5 * sum(c.link_s or 0.0 for c in permutes), (
        "most of it beside arithmetic"
    )
    # Two heads of 512 queries are eight blocks, which do not fill one device: parts would take as long.
    with pytest.warns(diffshard.plans.WholeWorkWarning, match="repeated on several devices"):
        _, specs = chosen(512, heads=2)
    assert (sequence, sequence) not in specs


def test_heads_are_split_by_all_to_alls_where_there_are_enough():
    plan, specs = chosen(131072, heads=8)
    assert specs == [(((), (), ("model",), ()),) * 2] * 2
    moved = [c for c in plan.collectives if c.kind == "all_to_all"]
    assert 7 <= sum(c.count for c in moved) <= 9, "queries, keys, values, the output, and their gradients"
    assert sum(c.seconds for c in moved) < 0.1 * plan.compute_s
