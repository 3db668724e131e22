"""Exchanges of activations as codes: tokens go to experts, which are on other devices, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from cost.evaluation import evaluate
from cost.quantities import with_weights
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.base import Coded
from search_spaces.sharding.coded_exchanges import exchange_bytes, is_exchange
from search_spaces.sharding.edge_costs import edge_specs
from search_spaces.sharding.format_gains import gains_s, in_formats, in_own_formats
from search_spaces.sharding.number_formats import ExchangedInCodes, MixedProducts

EXPERTS, WIDTH = 8, 16


def experts_step(params, x):
    """Trains one layer of experts; each group of tokens has a slot of every expert."""

    def loss_of(params):
        sent = jnp.tanh(jnp.einsum("gem,mn->gen", x, params["before"]))
        inside = jnp.tanh(jnp.einsum("gen,enh->geh", sent, params["experts"]))
        return jnp.mean((jnp.einsum("geh,hm->gem", inside, params["after"]) - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(groups=8, width=WIDTH, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"before": (width, width), "experts": (EXPERTS, width, width), "after": (width, width)}
    params = {name: jax.random.normal(key, shape) / 4 for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    return params, jax.random.normal(keys[3], (groups, EXPERTS, width))


def space_for(fn, args, devices=4):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    hardware = diffshard.preset("h100", dict(mesh.shape))
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12)
    return space_of(options, trace_function(options, args)), mesh


def split_choice(space, dim_of, rest=0):
    """Returns the strategies whose results of three dimensions are split along one that depends on the node.

    Args:
      dim_of: of a vertex and whether the node is a shared reshard; `rest` is the strategy of others.
    """
    choice = []
    for node in space.nodes:
        result = node.shared_value or (node.vertex.results[0] if node.vertex.results else None)
        dim = dim_of(node.vertex, node.shared_value is not None)
        wanted = tuple((0,) if d == dim else () for d in range(3))
        fits = [
            i
            for i, s in enumerate(node.strategies)
            if result is not None and len(result.shape) == 3 and s.results[:1] == (wanted,) and s.parts > 1
        ]
        choice.append(fits[0] if fits else rest)
    return choice


def groups_then_experts(vertex, is_shared):
    """Values are made by the devices that have their group, and read by those that have their expert."""
    del vertex
    return 1 if is_shared else 0


def emulated(space, layout, keys, used, args):
    """Returns the results of one device where some vertices exchange codes; `keys` are all that could."""
    rows = {key.vertex: row for row, key in enumerate(keys)}
    codes = ExchangedInCodes([keys[0].format], frozenset(rows))
    weights = np.array([[float(vertex in used)] for vertex in rows], np.float32)
    mixed = MixedProducts(space.graph, layout, rows, [], exchanges=codes)
    return jax.jit(mixed)(weights, {}, *jax.tree.leaves(args))[0]


@pytest.mark.parametrize("name", ["int8", "float8", "bfloat16"])
def test_one_device_measures_the_numbers_of_the_program(name):
    args = arguments()
    space, mesh = space_for(experts_step, args)
    keys = [Coded(vertex.index, name, "exchange") for vertex in space.exchangeable]
    free = space.with_formats(dict.fromkeys(keys, 0.0))
    choice = in_formats(free, np.array(split_choice(space, groups_then_experts)), keys)
    layout = free.layout(choice.tolist())
    used = {coded.vertex for coded in layout.coded}
    assert len(used) >= 3
    program = jax.jit(space.device_program(layout, mesh))
    results = program(*jax.tree.leaves(args))
    measured = emulated(space, layout, keys, used, args)
    exact = jax.tree.leaves(experts_step(*args))
    for result, array, number in zip(results, measured, exact, strict=True):
        np.testing.assert_allclose(result, array, rtol=1e-5, atol=1e-7)
        assert np.abs(result - number).max() > 1e-6
    exchanged = [line for line in program.lower(*jax.tree.leaves(args)).as_text().splitlines() if "all_to_all" in line]
    types = [line.split("tensor<")[-1].split(">")[0].split("x")[-1] for line in exchanged]
    assert types.count("bf16" if name == "bfloat16" else "ui8") == len(used)


def scanned_step(params, x):
    """Trains two layers of experts in a loop, which computes each again in the backward pass."""

    @jax.checkpoint
    def layer(x, weights):
        sent = jnp.tanh(jnp.einsum("gem,mn->gen", x, weights["before"]))
        inside = jnp.tanh(jnp.einsum("gen,enh->geh", sent, weights["experts"]))
        return x + jnp.einsum("geh,hm->gem", inside, weights["after"]), None

    def loss_of(params):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def test_layers_in_a_loop_exchange_codes_in_each_trip():
    params, x = arguments()
    args = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), params), x
    space, mesh = space_for(scanned_step, args)
    keys = [Coded(vertex.index, "int8", "exchange") for vertex in space.exchangeable]
    free = space.with_formats(dict.fromkeys(keys, 0.0))
    choice = in_formats(free, np.array(split_choice(space, groups_then_experts)), keys)
    layout = free.layout(choice.tolist())
    used = {coded.vertex for coded in layout.coded}
    assert len(used) >= 3
    results = jax.jit(space.device_program(layout, mesh))(*jax.tree.leaves(args))
    measured = emulated(space, layout, keys, used, args)
    for result, array, number in zip(results, measured, jax.tree.leaves(scanned_step(*args)), strict=True):
        np.testing.assert_allclose(result, array, rtol=1e-5, atol=1e-7)
        assert np.abs(result - number).max() > 1e-6


def test_only_even_blocks_with_the_same_rows_are_exchanged_as_codes():
    space, _ = space_for(experts_step, arguments())
    path, value = space.reshard_costs.path, space.exchangeable[0].results[0]
    first, second, last, whole = ((0,), (), ()), ((), (0,), ()), ((), (), (0,)), ((), (), ())
    assert is_exchange(path, value, first, second)
    assert not is_exchange(path, value, first, first)
    assert not is_exchange(path, value, first, whole)  # a gather
    assert not is_exchange(path, value, whole, first)
    assert not is_exchange(path, value, first, last)
    uneven, _ = space_for(experts_step, arguments(groups=6))
    assert not is_exchange(path, uneven.exchangeable[0].results[0], first, second)
    assert exchange_bytes(value, "int8") == 8 * EXPERTS * (WIDTH + 4)
    assert exchange_bytes(value, "bfloat16") == 8 * EXPERTS * WIDTH * 2


def test_the_price_of_an_exchange_by_hand():
    args = jax.eval_shape(lambda: arguments(groups=4096, width=1024))
    space, _ = space_for(experts_step, args)
    keys = [Coded(vertex.index, "int8", "exchange") for vertex in space.exchangeable]
    free, costs = space.with_formats(dict.fromkeys(keys, 2e-3)), space.reshard_costs
    choice = split_choice(space, groups_then_experts)
    key = next(key for key in keys if free.node_of(key) != key.vertex)
    (edge,) = (edge for edge in free.edges if edge.node == key.vertex)
    coded = in_formats(free, np.array(choice), [key])
    ends = zip(edge_specs(edge, free.nodes), (choice[edge.node], choice[edge.reader]), strict=True)
    (step,) = costs.path(*(specs[i] for specs, i in ends))
    assert step.kind == "all_to_all"
    num_bytes, num_codes = edge.value.num_bytes, 4096 * EXPERTS * (1024 + 8 * 4)
    exact_s, sent_s = (costs.step_s(step, n) for n in (num_bytes, num_codes))
    hardware = space.hardware
    coding_s = 2 * (num_bytes + num_codes) / 4 / hardware.reached_memory_bytes_per_s + 2 * hardware.kernel_launch_s
    seconds = [evaluate(free.problem, c).cost for c in (choice, coded.tolist())]
    assert seconds[0] - seconds[1] == pytest.approx(exact_s - sent_s - coding_s - 2e-3)
    assert gains_s(free, choice)[key] == pytest.approx(exact_s - sent_s - coding_s)
    compute_s = [free.predict(c).compute_s.sum() for c in (choice, coded.tolist())]
    assert compute_s[1] - compute_s[0] == pytest.approx(coding_s)
    (transfer,) = set(free.predict(coded.tolist()).transfers) - set(free.predict(choice).transfers)
    assert transfer.seconds == pytest.approx(sent_s)
    steps = [free.program_steps(free.layout(c)).steps for c in (choice, coded.tolist())]
    assert len(steps[1]) == len(steps[0]) + 1
    totals = [sum(step.seconds for step in own) for own in steps]
    assert totals[1] - totals[0] == pytest.approx(sent_s + coding_s - exact_s)


def test_all_prices_of_choices_agree():
    """The problem, the prediction and the quantities of random choices have the same seconds."""
    space, _ = space_for(experts_step, jax.eval_shape(lambda: arguments(groups=4096, width=1024)))
    names = "int8", "bfloat16"
    keys = [Coded(vertex.index, name, "exchange") for vertex in space.exchangeable for name in names]
    free, generator = space.with_formats(dict.fromkeys(keys, 0.0)), np.random.default_rng(0)
    num_coded = 0
    for _ in range(15):
        choice = [int(generator.integers(len(node.strategies))) for node in free.nodes]
        predicted = free.predict(choice)
        seconds = predicted.compute_s.sum() + predicted.preference_s.sum() + sum(t.seconds for t in predicted.transfers)
        assert evaluate(free.problem, choice).cost == pytest.approx(seconds)
        num_coded += len(free.layout(choice).coded)
        exact = in_own_formats(free, choice)
        for key, gain_s in list(gains_s(free, exact).items())[::3]:
            saved_s = evaluate(free.problem, exact).cost - evaluate(free.problem, in_formats(free, exact, [key])).cost
            assert gain_s == pytest.approx(saved_s, abs=1e-12)
    assert num_coded > 5
    weights = {name: np.ones(quantity.shape) for name, quantity in free.quantities.items()}
    weights |= {name: np.zeros_like(weights[name]) for name in ("overlapped_s", "memory_bytes")}
    of_quantities = with_weights(free.preference_problem, free.quantities, weights)
    for found, expected in zip(of_quantities.edge_cost, free.problem.edge_cost, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
