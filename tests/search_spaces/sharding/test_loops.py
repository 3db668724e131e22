"""What the trips of loops wait for, and which collectives inside of them share a latency, by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from search_spaces.sharding.graph import follows_contraction
from search_spaces.sharding.reshard_costs import CollectiveShares, bytes_of_trips, carries_waited_for, loops_of
from tests.search_spaces.sharding.small_spaces import array, graph_of


def layers(x, ups, downs):
    def layer(x, w):
        up, down = w
        return x + jnp.tanh(x @ up) @ down, None

    return lax.scan(layer, x, (ups, downs))[0]


LAYERS = array(4, 8), array(3, 8, 16), array(3, 16, 8)


def test_layers_wait_for_what_goes_from_one_to_the_next():
    graph = graph_of(layers, *LAYERS)
    (loop,) = loops_of(graph.block.steps)
    (carry,) = loop.carries
    assert carries_waited_for(graph) == {carry.index}
    shares = CollectiveShares(graph, exposed_share=0.25)
    sums = next(v for v in graph.vertices if v.primitive == "add")
    last_product = [v for v in graph.vertices if v.primitive == "dot_general"][-1]
    for vertex in (carry, sums, last_product):
        value = vertex.results[0]
        assert (shares.latency(value), shares.exposed(value)) == (1.0, 1.0)


def test_a_loop_of_one_trip_has_no_next_trip():
    one = [array(1, *w.shape[1:]) for w in LAYERS[1:]]
    assert carries_waited_for(graph_of(layers, LAYERS[0], *one)) == set()


def test_weights_of_a_layer_share_one_latency_in_each_trip():
    graph = graph_of(layers, *LAYERS)
    (loop,) = loops_of(graph.block.steps)
    shares = CollectiveShares(graph, exposed_share=0.25)
    own = [shares.latency(vertex.results[0]) for vertex in loop.slices]
    assert own == [0.5, 0.5]  # both have 8 x 16 numbers; in one call of three layers that is three latencies
    assert [shares.exposed(vertex.results[0]) for vertex in loop.slices] == [0.25, 0.25]
    assert shares.latency(graph.inputs[1].results[0]) == pytest.approx(384 / (32 + 2 * 384))  # outside of the loop


def test_a_loop_over_training_steps_waits_for_the_first_layer_only():
    def steps(first, second, batches):
        def step(params, x):
            loss = lambda first, second: jnp.sum(jnp.tanh(x @ first) @ second)  # noqa: E731
            gradients = jax.grad(loss, (0, 1))(*params)
            return (params[0] - gradients[0], params[1] - gradients[1]), None

        return lax.scan(step, (first, second), batches)[0]

    graph = graph_of(steps, array(8, 16), array(16, 4), array(5, 32, 8))
    (loop,) = loops_of(graph.block.steps)
    assert carries_waited_for(graph) == {loop.carries[0].index}
    shares = CollectiveShares(graph, exposed_share=0.25)
    assert [shares.exposed(carry.results[0]) for carry in loop.carries] == [1.0, 0.25]


def test_sums_of_gradients_wait_for_nothing():
    def accumulate(w, batches):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), None

        return lax.scan(add, jnp.zeros_like(w), batches)[0]

    graph = graph_of(accumulate, array(8, 4), array(5, 32, 8))
    assert carries_waited_for(graph) == set()


def test_residuals_that_a_backward_pass_reads_are_no_weights():
    graph = graph_of(jax.grad(lambda ups, x, downs: jnp.sum(layers(x, ups, downs))), *LAYERS[1::-1], LAYERS[2])
    is_activation = follows_contraction(graph, carries_waited_for(graph))
    of_trip = bytes_of_trips(graph, is_activation)
    for loop in loops_of(graph.block.steps):
        own = sum(v.results[0].num_bytes for v in loop.slices if not is_activation[v.index])
        assert {of_trip[v.index] for v in loop.slices} == {own}
        assert own == 2 * 4 * 8 * 16  # the two weights; what the backward pass reads of tanh follows a product
