"""Seconds of a node's strategies, by hand."""

import jax
import jax.numpy as jnp
import pytest

from tests.search_spaces.sharding.small_spaces import array, hardware_of, space_of


def test_storing_less_is_preferred_and_of_equal_sizes_a_split_of_the_first_dimension():
    """By a thousandth of the time to read what is stored, over the number of devices: 64 bytes at 1e12 bytes/s."""
    space = space_of(lambda x: jnp.sin(x), array(4, 4), sizes=(2,))
    (vertex,) = space.graph.inputs
    strategies = space.nodes[vertex.index].strategies
    seconds = space.node_costs.preference_s(vertex, strategies)
    read_s = 64 / 1e12 / 1000
    shares = {s.unreduced[0]: seconds / read_s for s, seconds in zip(strategies, seconds, strict=True)}
    assert shares == {
        ((), ()): pytest.approx(1 / 2),
        ((0,), ()): pytest.approx(1 / 4),
        ((), (0,)): pytest.approx(1.1 / 4),
    }


def test_a_product_in_a_loop_computes_and_reduces_in_every_trip():
    """Without latency a reduction of 64 numbers over two devices takes as long as sending them once."""
    hardware = hardware_of("x", latency_s=0.0, flops_per_s=1e9, memory_bytes_per_s=float("inf"))
    found = []
    for fn in (lambda w, x: x @ w, lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]):
        space = space_of(fn, array(8, 8), array(8, 8), sizes=(2,), hardware=hardware)
        (vertex,) = (v for v in space.graph.operations() if v.primitive == "dot_general")
        strategies = space.nodes[vertex.index].strategies
        seconds = space.node_costs.node_s(space.nodes[vertex.index])
        kinds = [tuple(step.kind for step in s.reductions[0]) for s in strategies]
        found.append({(s.operands, kind): t for s, kind, t in zip(strategies, kinds, seconds, strict=True)})
    once, often = found
    whole, summed = (((), ()), ((), ())), (((), (0,)), ((0,), ()))
    assert once[whole, ()] == pytest.approx(2 * 8**3 / 1e9)
    assert once[summed, ("all_reduce",)] == pytest.approx(8**3 / 1e9 + 64 * 4 * 1e-9)
    for key, seconds in once.items():
        assert often[key] == pytest.approx(3 * seconds)


@pytest.mark.parametrize("donated", [(), (0, 1, 2)])
def test_a_chosen_strategy_computes_as_long_as_among_all_of_its_vertex(donated):
    """Seconds are kept for equal vertices together; what is read and written tells apart those that look equal."""

    def step(weights, x):
        gradients = jax.grad(lambda weights: sum(jnp.sin(jnp.tanh(x @ w) @ w).sum() for w in weights))(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    space = space_of(step, [array(8, 8)] * 3, array(8, 8), donated=donated)
    times = set()
    for vertex in space.graph.vertices:
        strategies = space.nodes[vertex.index].strategies
        seconds = space.node_costs.compute_s(vertex, strategies)
        chosen = [space.node_costs.chosen_compute_s(vertex, strategy) for strategy in strategies]
        assert chosen == pytest.approx(seconds.tolist(), rel=1e-12)
        times.update(chosen)
    assert len(times) > 4
