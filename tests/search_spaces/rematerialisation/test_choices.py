"""For each price of memory the minimum cut is the cheapest of all choices."""

import itertools

import numpy as np
import pytest

from search_spaces.rematerialisation.choices import Network
from search_spaces.rematerialisation.passes import passes_of
from tests.search_spaces.rematerialisation.differentiated_steps import STEPS, arguments, graph_of


def small_network(seed, name="layers"):
    """Returns a network in which all but a few steps are too expensive to run again."""
    graph, rng = graph_of(STEPS[name], arguments()), np.random.default_rng(seed)
    seconds = rng.uniform(1, 10, len(graph.vertices))
    num_bytes = rng.uniform(1, 10, len(graph.values))
    every = Network(graph, passes_of(graph), lambda v: seconds[v.index], lambda v: num_bytes[v.id], lambda v: True)
    for key in sorted(every.steps)[10:]:
        every.steps[key] = 1e6
    return every, sorted(every.steps)[:10]


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_the_cheapest_choice(seed):
    network, cheap = small_network(seed)
    for price in (0.3, 1.0, 3.0):
        found = network.cheapest(price)
        subsets = itertools.chain.from_iterable(itertools.combinations(cheap, n) for n in range(len(cheap) + 1))
        costs = [c.seconds + price * c.kept_bytes for c in (network.candidate(frozenset(s)) for s in subsets)]
        assert found.seconds + price * found.kept_bytes == pytest.approx(min(costs), rel=1e-4)


def test_candidates_keep_less_for_more_seconds():
    network, _ = small_network(0)
    candidates = network.candidates()
    assert candidates[0].recomputed == frozenset()
    assert len(candidates) > 3
    for before, after in itertools.pairwise(candidates):
        assert after.kept_bytes < before.kept_bytes
        assert after.seconds > before.seconds


def test_the_inputs_of_layers_are_a_narrow_place():
    graph = graph_of(STEPS["layers"], arguments())
    (passes,) = passes_of(graph)
    network = Network(graph, [passes], lambda v: 1.0, lambda v: float(v.num_bytes), lambda v: True)
    between_layers = 2 * 16 * 8 * 4.0  # the results of the first two of three layers, 16 rows of 8 numbers in float32
    kept = [sorted(graph.values[v].shape for v in c.kept) for c in network.at_narrow_places(passes)]
    assert [(16, 8)] * 2 in [[shape for shape in shapes if shape == (16, 8)] for shapes in kept]
    assert any(between_layers <= c.kept_bytes <= 1.5 * between_layers for c in network.at_narrow_places(passes))
