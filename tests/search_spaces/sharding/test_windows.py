"""Windows of straight lines beside their definition, computed with lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.sharding.graph import Vertex, is_contraction, leads_to_contraction
from search_spaces.sharding.schedule import straight_lines, windows_around
from tests.search_spaces.sharding.small_spaces import EXAMPLES, array, graph_of


def chain(x, *weights):
    """Products with other operations between them; the third one's result is used by no other product."""
    aside = 0.0
    for i, w in enumerate(weights):
        y = jnp.tanh(x @ w)
        if i == 2:
            aside = y.sum()
        else:
            x = y + 1.0
    return x, aside


def rematerialised(x, *weights):
    """A line with regions that lie flat in it, and a loop."""
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)
    for w in weights[:3]:
        x = layer(x, w)
    x = jax.lax.scan(lambda y, _: (jnp.tanh(y @ weights[3] @ weights[4]), None), x, length=3)[0]
    return jax.grad(lambda x: layer(layer(x, weights[0]) @ weights[5], weights[1]).sum())(x)


CASES = {"chain": (chain, [array(8, 8)] * 8), "rematerialised": (rematerialised, [array(8, 8)] * 7)} | EXAMPLES


def windows_of(line, seconds, is_needed, least_s):
    """Returns the steps of each window of a line, as lists."""
    windows, busy_s = [[]], 0.0
    for place, (step, _) in enumerate(line):
        windows[-1].append(step)
        if not (isinstance(step, Vertex) and is_contraction(step)):
            continue
        busy_s += seconds[step.index]
        followers = [other for other, _ in line[place + 1 : place + 2]]
        if busy_s >= least_s and is_needed[step.index] and followers and isinstance(followers[0], Vertex):
            windows.append([])
            busy_s = 0.0
    return windows


@pytest.mark.parametrize("name", CASES)
def test_where_the_windows_around_each_vertex_begin_and_end(name):
    fn, arguments = CASES[name]
    graph = graph_of(fn, *arguments)
    rng = np.random.default_rng(0)
    seconds, is_needed = rng.integers(1, 4, len(graph.vertices)).astype(float), leads_to_contraction(graph)
    counts = set()
    for least_s in (1.0, 3.0, 6.0):
        for num_after in (1, 2, 3):
            expected = np.array([[vertex.position] * 2 for vertex in graph.vertices])
            for line in straight_lines(graph.block):
                windows = windows_of(line, seconds, is_needed, least_s)
                counts.add(len(windows))
                for number, window in enumerate(windows):
                    first = windows[number - 1][0] if number else None
                    end = min(number + num_after, len(windows) - 1)
                    last = windows[end][-1] if end > number else None
                    for step in window:
                        if isinstance(step, Vertex):
                            own = step.position
                            expected[step.index, 0] = first.position if isinstance(first, Vertex) else own
                            expected[step.index, 1] = last.position if isinstance(last, Vertex) else own
            found = windows_around(graph, seconds, least_s, num_after)
            np.testing.assert_array_equal(found, expected, err_msg=f"{least_s} s, {num_after} after")
    assert max(counts) > 3 or name in EXAMPLES
