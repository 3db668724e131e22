"""What a change of one strategy adds, and the least memory, against trying everything."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from cost.base import Link, num_strategies
from cost.evaluation import change_costs, evaluate
from cost.lines import Line
from cost.memory import least_memory
from search_spaces.sharding.custom_calls.cudnn import FORWARD, planned_without_cudnn
from search_spaces.sharding.explaining import next_bests
from search_spaces.sharding.spec import shards
from tests.search_spaces.sharding.small_spaces import (
    EXAMPLES,
    array,
    hardware_of,
    mlp_arguments,
    mlp_step,
    space_of,
)


@pytest.mark.parametrize("name", ["mlp_step", "scan_backward", "branches"])
def test_change_costs_are_those_of_evaluating_again(name):
    problem = space_of(EXAMPLES[name][0], *EXAMPLES[name][1]).problem
    sizes = num_strategies(problem)
    rng = np.random.default_rng(0)
    choice = rng.integers(sizes).tolist()
    before = evaluate(problem, choice).cost
    changes = change_costs(problem, choice)
    assert [len(change) for change in changes] == sizes.tolist()
    for v in rng.choice(len(sizes), 12):
        assert changes[v][choice[v]] == 0
        for s in range(sizes[v]):
            other = choice.copy()
            other[v] = s
            assert changes[v][s] == pytest.approx(evaluate(problem, other).cost - before, rel=1e-6, abs=before * 1e-12)


@pytest.mark.parametrize("name", ["mlp_step", "branches"])
def test_the_next_best_spec_is_the_cheapest_of_all_others(name):
    space = space_of(EXAMPLES[name][0], *EXAMPLES[name][1])
    problem, choice = space.problem, [int(size) // 2 for size in num_strategies(space.problem)]
    found = next_bests(problem, space.graph, space.nodes, space.shared_reshards, choice)
    cost = evaluate(problem, choice).cost
    pairs = [(v.index, n, lambda s: s.unreduced[0]) for v, n in zip(space.graph.inputs, found.inputs, strict=True)]
    for vertex, next_best in zip(space.graph.vertices, found.vertices, strict=True):
        node = space.shared_reshards.get(vertex.results[0].id, vertex.index)
        pairs.append((node, next_best, lambda s: s.results[0]))
    for node, next_best, spec_of in pairs:
        specs = [spec_of(strategy) for strategy in space.nodes[node].strategies]
        added_s = {
            s: evaluate(problem, [*choice[:node], s, *choice[node + 1 :]]).cost - cost
            for s, spec in enumerate(specs)
            if spec != specs[choice[node]]
        }
        if not added_s:
            assert next_best == (None, 0.0)
            continue
        assert next_best.added_s == pytest.approx(min(added_s.values()), rel=1e-6, abs=1e-12 * cost)
        assert next_best.spec in [
            specs[s] for s, added in added_s.items() if added <= min(added_s.values()) + 1e-9 * cost
        ]


def test_the_least_peak_is_no_more_than_any_choice_s():
    problem = space_of(mlp_step, *mlp_arguments()).problem
    rng = np.random.default_rng(0)
    peaks = [evaluate(problem, rng.integers(num_strategies(problem))).peak for _ in range(50)]
    assert 0 < least_memory(problem)[1].max() <= min(peaks)


def test_collectives_of_a_matmul_by_hand():
    """Rows of the left operand stored over x, needed whole; the product summed over y."""
    space = space_of(lambda a, b: a @ b, array(8, 16), array(16, 4), hardware=hardware_of("xy", latency_s=1e-3))
    (dot,) = space.graph.operations()

    def find(node, operands, result):
        strategies = space.nodes[node].strategies
        (found,) = [i for i, s in enumerate(strategies) if s.operands == operands and s.results[0] == result]
        return found

    no, x, y = (), (0,), (1,)
    choice = [find(0, (), (x, no)), find(1, (), (y, no)), find(2, ((no, y), (y, no)), (no, no))]
    found = space.predict(choice).transfers
    assert [(t.kind, t.axis, t.num_bytes, t.count) for t in found] == [
        ("all_reduce", "y", 8 * 4 * 4, 1.0),
        ("all_gather", "x", 8 * 16 * 4 / 2, 1.0),
    ]
    reduce, gather = found
    stored = (8 * 16 + 16 * 4) * 4
    assert (reduce.vertex, gather.vertex) == (dot.index, dot.index)
    assert reduce.seconds == pytest.approx(1e-3 * 128 / stored + 2 * 128 / 2 * 0.5e-9)
    assert gather.seconds == pytest.approx(1e-3 * 512 / stored + 256 / 2 * 1e-9)


def test_each_kind_of_collective_has_its_own_rates_in_the_problem_and_in_the_prediction():
    """The left operand is exchanged from rows to columns, the product summed in pieces; by hand, on two devices."""
    ring = Link(0.0, 1e-9)
    own = replace(ring, by_kind={"reduce_scatter": (Line(2e-5, 3e-9),), "all_to_all": (Line(4e-5, 1.5e-9),)})
    fn, args = (lambda a, b: a @ b), (array(8, 16), array(16, 4))
    no, x = (), (0,)
    seconds = []
    for link in (ring, own):
        hardware = replace(hardware_of("x"), links={"x": link})
        space = space_of(fn, *args, sizes=(2,), hardware=hardware)

        def find(node, operands, result, strategies=space.nodes):
            (found,) = [
                i for i, s in enumerate(strategies[node].strategies) if (s.operands, s.results[0]) == (operands, result)
            ]
            return found

        choice = [find(0, (), (x, no)), find(1, (), (x, no)), find(2, ((no, x), (x, no)), (x, no))]
        transfers = space.predict(choice).transfers
        assert [t.kind for t in transfers] == ["reduce_scatter", "all_to_all"]
        seconds.append([*(t.seconds for t in transfers), evaluate(space.problem, choice).cost])
    (scatter, exchange, cost), (own_scatter, own_exchange, own_cost) = seconds
    stored = (8 * 16 + 16 * 4) * 4
    assert scatter == pytest.approx(128 / 2 * 1e-9)
    assert own_scatter == pytest.approx(2e-5 * 128 / stored + 128 / 2 * 3e-9)
    assert exchange == pytest.approx(512 / 4 * 1e-9)
    assert own_exchange == pytest.approx(4e-5 * 512 / stored + 512 / 4 * 1.5e-9)
    assert own_cost - cost == pytest.approx(own_scatter + own_exchange - scatter - exchange)


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    fn, args = EXAMPLES["scan_of_layers"]
    space = space_of(fn, *args)
    rng = np.random.default_rng(0)
    counts = set()
    for _ in range(10):
        choice = rng.integers(num_strategies(space.problem)).tolist()
        found = space.predict(choice).transfers
        assert all(t.num_bytes > 0 and t.seconds > 0 for t in found)
        counts |= {t.count for t in found}
    assert counts == {1.0, 3.0}


def test_layouts_hold_what_their_strategies_leave():
    space = space_of(mlp_step, *mlp_arguments())
    rng = np.random.default_rng(1)
    choice = rng.integers(num_strategies(space.problem)).tolist()
    layout = space.layout(choice)
    assert len(layout.strategies) == len(space.graph.vertices)
    for value in space.graph.values:
        node = space.shared_reshards.get(value.id, value.vertex)
        left = (
            space.nodes[node].strategies[choice[node]].results[0 if value.id in space.shared_reshards else value.result]
        )
        assert layout.value_specs[value.id] == left
        assert shards(left, space.axis_sizes) in (1, 2, 4)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_two_strategies_of_a_node_share_a_name(name):
    fn, args = EXAMPLES[name]
    space = space_of(fn, *args)
    for node in range(len(space.nodes)):
        names = space.strategy_names(node)
        assert len(set(names)) == len(names)


def test_names_say_what_is_chosen():
    def fn(w, x):
        with jax.named_scope("layer"):
            y = x @ w
        return jnp.sin(y) + y

    space = space_of(fn, array(4, 4), array(8, 4))
    assert space.node_names == ("0", "1", "layer/dot_general", "sin", "add", "readers of layer/dot_general")
    names = space.strategy_names(2)
    assert names[0] == "[-, -] [-, -] -> [-, -]"
    assert "[-, x] [x, -] -> all_reduce -> [-, -]" in names
    assert "[-, x] [x, -] -> [-, -] -> reduce_scatter -> [x, -]" in names


def test_parts_are_computing_collectives_and_a_preference():
    space = space_of(mlp_step, *mlp_arguments())
    choice = [int(size) - 1 for size in num_strategies(space.problem)]
    parts, prediction = space.explain(choice), space.predict(choice)
    by_kind = {kind: sum(p.seconds for p in parts if p.kind == kind) for kind in {p.kind for p in parts}}
    assert by_kind.pop("compute") == pytest.approx(prediction.compute_s.sum())
    assert by_kind.pop("preference") == pytest.approx(prediction.preference_s.sum())
    assert sum(by_kind.values()) == pytest.approx(sum(t.seconds for t in prediction.transfers))
    sent = [p.traffic for p in parts if p.traffic is not None]
    assert [(t.kind, *t.axes, t.count) for t in sent] == [(t.kind, t.axis, t.count) for t in prediction.transfers]


def test_a_decoded_choice_runs_on_devices_as_the_function_does():
    def fn(w, x):
        return jnp.tanh(x @ w)

    space = space_of(fn, array(8, 4), array(16, 8))
    choice = [int(size) - 1 for size in num_strategies(space.problem)]
    decoded = space.decode(choice)
    assert decoded.layout == space.layout(choice)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (16, 8))
    (result,) = jax.jit(decoded.on_mesh(mesh))(w, x)
    np.testing.assert_allclose(result, fn(w, x), rtol=1e-5)


def test_a_carry_that_is_gathered_for_its_loop_is_gathered_in_every_trip():
    def residual_layers(weights, x):  # two readers of the carry share a gathered copy
        return jax.lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, weights)[0]

    space = space_of(residual_layers, array(3, 8, 8), array(4, 8), sizes=(4,))
    (carry,) = [v.index for v in space.graph.vertices if v.kind == "carry"]
    gathering = [any(step.kind == "all_gather" for step in s.reductions[0]) for s in space.nodes[carry].strategies]
    choice = [0] * len(space.nodes)
    choice[carry] = gathering.index(True)
    gathers = [t for t in space.predict(choice).transfers if t.vertex == carry and t.kind == "all_gather"]
    # One gather of 4 x 8 float32 in each of 3 trips: its count, its size, and its seconds in the problem.
    assert [(t.count, t.num_bytes) for t in gathers] == [(3.0, 128.0)]
    step = space.nodes[carry].strategies[choice[carry]].reductions[0][0]
    value = space.graph.vertices[carry].results[0]
    once_s = space.reshard_costs.step_s(step, 128, space.node_costs.shares.latency(value))
    assert gathers[0].seconds == pytest.approx(3 * once_s)
    assert space.problem.node_cost[carry][choice[carry]] == pytest.approx(3 * once_s)


def test_what_a_custom_call_sends_counts_in_every_trip_of_a_loop():
    """Attention whose keys go around four devices, once and in three trips."""

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    def layers(q, k, v):
        return jax.lax.scan(lambda q, _: (attention(q, k, v), None), q, length=3)[0]

    args, found = [array(2, 32, heads, 8, dtype=jnp.float16) for heads in (4, 2, 2)], []
    for fn in (attention, layers):
        with planned_without_cudnn():
            space = space_of(fn, *args, sizes=(4,))
        choice, by_sequence = [0] * len(space.nodes), ((), (0,), (), ())
        (vertex,) = (v for v in space.graph.operations() if v.primitive == FORWARD)
        splits = [s.operands[:2] for s in space.nodes[vertex.index].strategies]
        choice[vertex.index] = splits.index((by_sequence, by_sequence))
        found.append([t for t in space.predict(choice).transfers if t.kind == "collective_permute"])
    once, often = found
    assert [t.count for t in once] == [3.0] * len(once)  # three rounds after the device's own
    assert [(t.count, t.num_bytes) for t in often] == [(3 * t.count, t.num_bytes) for t in once]
    assert sum(t.link_s for t in often) == pytest.approx(3 * sum(t.link_s for t in once))
