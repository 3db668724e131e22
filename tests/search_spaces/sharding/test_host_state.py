"""State that only its own update reads may be on the host; updates run early, and few arrays are on the device."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from search_spaces.rematerialisation.program import RematerialisedFunction
from search_spaces.sharding.graph import is_contraction
from search_spaces.sharding.host_state import AHEAD, early_updates, host_arrays, host_s_per_byte
from search_spaces.sharding.memory import memory_use
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.tracing import build_graph
from tests.search_spaces.sharding.small_spaces import array, graph_of, hardware_of

LAYERS, WIDTH = 14, 8
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def step(state, x, *, optimizer):
    params, optimizer_state = state

    def loss(params):
        y = x
        for weights in params:
            y = y + jnp.tanh(y @ weights)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), value


def arguments(optimizer):
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys[:-1]]
    return (params, optimizer.init(params)), jax.random.normal(keys[-1], (16, WIDTH))


def early_graph(name):
    """The graph of a step whose updates run early."""
    optimizer = OPTIMIZERS[name]
    args = arguments(optimizer)
    graph = graph_of(partial(step, optimizer=optimizer), *args)
    flat = RematerialisedFunction(early_updates(graph), frozenset())
    jaxpr = jax.make_jaxpr(flat)(*jax.tree.leaves(args))
    return graph, build_graph(jaxpr, graph.feedback, [str(i) for i in range(len(graph.inputs))])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_early_updates_compute_the_same(name):
    graph, early = early_graph(name)
    leaves = jax.tree.leaves(arguments(OPTIMIZERS[name]))
    expected, found = (RematerialisedFunction(g, frozenset())(*leaves) for g in (graph, early))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(early.vertices) == len(graph.vertices)


def updated_before_the_last_product(graph):
    last = max(v.index for v in graph.operations() if is_contraction(v))
    return sum(graph.values[array.result].vertex < last for array in host_arrays(graph))


@pytest.mark.parametrize(("name", "moments"), [("adam", 2), ("momentum", 1), ("clipped", 2)])
def test_what_needs_one_gradient_is_updated_in_the_backward_pass_and_what_needs_all_behind_it(name, moments):
    graph, early = early_graph(name)
    assert len(host_arrays(early)) == moments * LAYERS
    assert updated_before_the_last_product(graph) == 0
    assert (updated_before_the_last_product(early) > moments * LAYERS / 2) == (name != "clipped")
    beside = sum(one.is_overlapped for one in host_arrays(early))
    assert beside >= updated_before_the_last_product(early)


def test_parameters_and_what_comes_back_as_it_is_stay_on_the_device():
    def fn(state, x):
        weights, scale, frozen, seen = state
        seen = jax.lax.fori_loop(0, 3, jnp.add, seen)
        return (weights - 0.1 * (x @ weights), 2 * scale, frozen, seen), x

    found = host_arrays(graph_of(fn, (array(4, 4), array(4, 4), array(4, 4), array(4)), array(4, 4)))
    assert [one.value for one in found] == [1]


def space(name="adam", **fields):
    _, graph = early_graph(name)
    hardware = dataclasses.replace(
        hardware_of(("x",)), exposed_share=0.25, matrix_share=1.0, host_memory_bytes_per_s=fields.pop("rate", 1e12)
    )
    return ShardingSpace(graph, ("x",), (2,), hardware, {}, (True,) * len(graph.inputs), offloads_state=True)


def test_few_arrays_of_the_state_on_the_host_are_on_the_device_at_a_time():
    spaces = space()
    num_bytes = 4 * WIDTH * WIDTH
    on_device = [0] * len(spaces.nodes)
    on_host = list(on_device)
    for one in spaces.host_arrays:
        strategies = spaces.nodes[one.vertex].strategies
        on_host[one.vertex] = next(
            i for i, s in enumerate(strategies) if s.on_host and s.unreduced == strategies[0].unreduced
        )
    kept, moved = (memory_use(spaces.usages, choice) for choice in (on_device, on_host))
    state_bytes = num_bytes * len(spaces.host_arrays)
    assert kept.num_bytes[0] - moved.num_bytes[0] == state_bytes
    # An array comes when the fourth before it is updated, and has left when the fourth after it is.
    times = np.arange(spaces.graph.length)
    before, after = (use.num_bytes[np.searchsorted(use.times, times, side="right") - 1] for use in (kept, moved))
    assert before[-1] - after[-1] == state_bytes - AHEAD * num_bytes  # the last ones are still leaving
    assert np.max(after - (before - state_bytes)) <= (2 * AHEAD + 1) * num_bytes


def test_the_step_waits_for_the_share_of_copies_that_products_cannot_hide():
    graph = space().graph
    arrays, hardware = host_arrays(graph), space(rate=1e15).hardware
    fast = host_s_per_byte(graph, arrays, hardware, 2)
    beside = {one.vertex: one.is_overlapped for one in arrays}
    for vertex, seconds in fast.items():
        assert seconds == pytest.approx(2e-15 * (0.25 if beside[vertex] else 1.0))
    slow = host_s_per_byte(graph, arrays, dataclasses.replace(hardware, host_memory_bytes_per_s=1e6), 2)
    num_bytes = 4 * WIDTH * WIDTH / 2
    link_s = sum(2e-6 * num_bytes for is_overlapped in beside.values() if is_overlapped)
    waited_s = sum(seconds * num_bytes for vertex, seconds in slow.items() if beside[vertex])
    products = [v for v in graph.operations() if is_contraction(v) and v.position >= min(o.comes_at for o in arrays)]
    products_s = len(products) * 2 * 16 * WIDTH * WIDTH / 2 / 1e12
    assert waited_s == pytest.approx(link_s - products_s, rel=1e-6)
    assert host_s_per_byte(graph, arrays, dataclasses.replace(hardware, host_memory_bytes_per_s=None), 2) == {}
