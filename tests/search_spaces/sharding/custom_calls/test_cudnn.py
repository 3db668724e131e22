"""cuDNN's attention is planned where cuDNN is not installed: what is split, what it costs, how it lowers."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from search_spaces.sharding.custom_calls.cudnn import BACKWARD, FORWARD, named_rule, planned_without_cudnn
from search_spaces.sharding.custom_calls.kernel import Kernel
from search_spaces.sharding.graph import Value
from tests.search_spaces.sharding.custom_calls.layouts import check_layout, split_dimensions
from tests.search_spaces.sharding.small_spaces import array, space_of

B, T, S, N, H = 8, 64, 64, 8, 64


def bf16(*shape):
    return array(*shape, dtype=jnp.bfloat16)


def attention(**options):
    """Sum of cuDNN's attention and its gradients."""

    def loss(*arrays):
        out = jax.nn.dot_product_attention(*arrays, implementation="cudnn", **options)
        return out.astype(jnp.float32).sum()

    return lambda *arrays: jax.grad(loss, tuple(range(len(arrays))))(*arrays)


def calls(fn, *avals, sizes=(2, 4)):
    """The forward and the backward of a function with one call, and their space."""
    with planned_without_cudnn():
        space = space_of(fn, *avals, sizes=sizes)
    forward, backward = (v for v in space.graph.operations() if v.primitive in (FORWARD, BACKWARD))
    return space, forward, backward


def plain(batch=B, heads=N, kv_heads=N):
    return bf16(batch, T, heads, H), bf16(batch, S, kv_heads, H), bf16(batch, S, kv_heads, H)


@pytest.mark.parametrize(
    ("options", "dims"),
    [({}, {0, 1, 2}), ({"is_causal": True}, {0, 1, 2}), ({"local_window_size": (7, 0), "is_causal": True}, {0, 2})],
)
def test_batch_heads_and_without_a_window_the_sequence_are_split(options, dims):
    space, forward, backward = calls(attention(**options), *plain())
    for vertex in (forward, backward):
        strategies = space.nodes[vertex.index].strategies
        for operand in range(3):
            assert split_dimensions(strategies, operand) == dims
    assert not space.notes


def test_groups_of_heads_are_split_after_their_keys():
    space, forward, backward = calls(attention(), *plain(heads=8, kv_heads=2))
    specs = {s.operands[0][2]: s.operands[1][2] for s in space.nodes[forward.index].strategies}
    assert specs == {(): (), (0,): (0,), (0, 1): (0,)}, (
        "2 heads of keys on the axis of 2 devices, 4 groups on the other"
    )
    by_group = [s for s in space.nodes[backward.index].strategies if s.operands[0][2] == (0, 1)]
    assert all([bool(steps) for steps in s.reductions] == [False, True, True] for s in by_group)


def test_lengths_go_along_with_the_batch():
    def padded(q, k, v, lengths):
        return attention(query_seq_lengths=lengths, key_value_seq_lengths=lengths)(q, k, v)

    space, forward, _ = calls(padded, *plain(), array(B, dtype=jnp.int32))
    assert split_dimensions(space.nodes[forward.index].strategies, operand=4) == {0}


def test_the_gradient_of_a_shared_bias_is_summed():
    space, _, backward = calls(attention(), *plain(), bf16(1, N, T, S))
    for s in space.nodes[backward.index].strategies:
        batch_axes = set(s.operands[0][0])
        assert {step.axis for step in s.reductions[3]} == batch_axes
        assert s.unreduced[3][1] == s.operands[0][2], "heads are split as those of the queries"


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 1.0), ({"is_causal": True}, 0.5), ({"is_causal": True, "local_window_size": (7, 0)}, 8 / S)],
)
def test_the_price_is_that_of_two_and_five_products(options, share):
    space, forward, backward = calls(attention(**options), *plain())
    product = 2 * B * N * T * S * H * share
    for vertex, count in ((forward, 2), (backward, 5)):
        strategies = space.nodes[vertex.index].strategies
        arrays = [o for o in (*vertex.operands, *vertex.results) if isinstance(o, Value)]
        whole_s = max(count * product / 1e12, sum(o.num_bytes for o in arrays) / 1e12)
        seconds = space.node_costs.compute_s(vertex, strategies)
        assert seconds == pytest.approx([whole_s / s.parts for s in strategies], rel=0.02)


def reference_forward(q, k, v, bias, *others):
    """What cuDNN's forward returns, for arrays without lengths."""
    del others
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8 + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1)


def reference_backward(q, k, v, bias, *others):
    cotangent = others[-1]
    _, pull = jax.vjp(lambda *x: reference_forward(*x)[0], q, k, v, bias)
    return pull(cotangent)


@pytest.mark.parametrize("bias_shape", [(1, 8, 16, 16), (8, 1, 16, 16), (1, 1, 16, 16), (8, 8, 16, 16)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_rules_of_forward_and_backward_hold_for_what_they_compute(bias_shape, seed):
    shapes = [(8, 16, 8, 8), (8, 16, 4, 8), (8, 16, 4, 8)]
    with planned_without_cudnn():
        jaxpr = jax.make_jaxpr(attention())(*(bf16(*s) for s in shapes), bf16(*bias_shape))
    forward, backward = (e for e in jaxpr.eqns if e.primitive.name in (FORWARD, BACKWARD))
    kernels = [
        Kernel(fn, named_rule(e), None, None, "reference")
        for fn, e in ((reference_forward, forward), (reference_backward, backward))
    ]
    keys = jax.random.split(jax.random.key(seed), 5)
    arrays = [jax.random.normal(key, s) for key, s in zip(keys, (*shapes, bias_shape, shapes[0]), strict=True)]
    empty = [jnp.zeros(0)] * 6

    def both(q, k, v, bias, cotangent):
        out, statistics = kernels[0].bind([q, k, v, bias, *empty])
        return out, kernels[1].bind([q, k, v, bias, *empty, statistics, out, cotangent])

    check_layout(both, arrays, seed, "device_program", tolerance=1e-3)


@pytest.mark.parametrize("executor", ["device_program", "execution"])
def test_a_planned_step_lowers_for_gpus_on_local_shapes(executor):
    with planned_without_cudnn():
        given = dict.fromkeys(range(3), ((0,), (), (1,), ()))
        space = space_of(attention(is_causal=True), *plain(), sizes=(2, 4), given=given)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    program = getattr(space, executor)(space.layout(diffshard.solve(space.problem).choice), mesh)
    text = jax.jit(program).trace(*plain()).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line]
    assert len(calls) == 2
    assert all(f"tensor<{B // 2}x{T}x{N // 4}x{H}xbf16>" in line for line in calls)


def test_nothing_is_left_behind_after_planning():
    q, k, v = plain()
    planned = diffshard.search(attention(), AbstractMesh((2,), ("data",)), hardware="h100")
    planned.plan(q, k, v)
    with pytest.raises(RuntimeError, match=r"cuDNN (is not detected|not found)"):
        jax.eval_shape(attention(), q, k, v)


def test_jax_asks_where_it_is_answered():
    with planned_without_cudnn():
        names = jax.nn.dot_product_attention.__globals__["cudnn_dot_product_attention"].__globals__
        assert names["check_cudnn_version"]() >= 91000
        assert names["check_compute_capability"]("9.0")
        assert not names["check_compute_capability"]("10.0")


def test_threads_plan_side_by_side():
    is_inside, may_leave = threading.Event(), threading.Event()

    def plan():
        with planned_without_cudnn():
            is_inside.set()
            assert may_leave.wait(60)
            return jax.eval_shape(attention(), *plain(batch=3))

    with ThreadPoolExecutor(1) as pool:
        with planned_without_cudnn():  # the first to enter is the first to leave
            planned = pool.submit(plan)
            assert is_inside.wait(60)
        may_leave.set()
        assert [x.shape[0] for x in planned.result()] == [3, 3, 3]
    with pytest.raises(RuntimeError, match=r"cuDNN (is not detected|not found)"):
        jax.eval_shape(attention(), *plain(batch=5))


def test_the_other_implementations_are_ordinary_operations():
    for options in ({}, {"implementation": "xla"}):

        def fn(q, k, v, options=options):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, **options)

        space = space_of(fn, *(array(8, 16, 8, 4) for _ in range(3)), sizes=(2, 4))
        products = [v for v in space.graph.operations() if v.primitive == "dot_general"]
        assert len(products) == 2
        assert all(split_dimensions(space.nodes[v.index].strategies) >= {0, 2} for v in products)
        arrays = [np.random.default_rng(i).normal(size=(8, 16, 8, 4)).astype(np.float32) for i in range(3)]
        check_layout(fn, [jnp.asarray(a) for a in arrays], 0, "device_program")


def test_dropout_and_packed_sequences_stay_whole_where_parts_would_differ():
    _, forward, _ = calls(attention(), *plain())
    equation = forward.equation
    assert equation is not None
    with_dropout = equation.replace(params={**equation.params, "dropout_rate": 0.5})
    rule = named_rule(with_dropout)
    assert rule.whole >= {"batch", "kv_head", "group"}
    assert dataclasses.replace(rule, whole=frozenset()) == dataclasses.replace(named_rule(equation), whole=frozenset())
