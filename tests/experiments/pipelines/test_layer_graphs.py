"""Divisions of graphs against every way to put the layers of small graphs on devices."""

import itertools

import numpy as np
import pytest

from experiments.pipelines.layer_graphs import LayerGraph, ideals, least_load

DIAMOND = np.array([(0, 1), (0, 2), (1, 3), (2, 3)])


def random_graph(seed, num_layers=6):
    """Edges forwards at random; each layer sends a result along them, and a gradient back to what it read."""
    rng = np.random.default_rng(seed)
    pairs = [(u, v) for u in range(num_layers) for v in range(u + 1, num_layers) if rng.random() < 0.4]
    layer_s = rng.integers(1, 9, (num_layers, 2)).astype(float)
    layer_s[rng.integers(num_layers), rng.integers(2)] = np.inf
    sends = []
    for layer in range(num_layers):
        after, before = (frozenset(v for u, v in ways if u == layer) for ways in (pairs, [(v, u) for u, v in pairs]))
        sends.append([(float(rng.integers(0, 4)), readers) for readers in (after, before) if readers])
    return LayerGraph(num_layers, np.array(pairs).reshape(-1, 2), layer_s, np.ones(num_layers), sends)


def load_of(graph, devices_of_layers, device, kind, pays):
    """What a device computes, and each result that it sends or reads once."""
    own = {v for v, d in enumerate(devices_of_layers) if d == device}
    load = sum(graph.layer_s[v, kind] for v in own)
    for maker, results in enumerate(graph.sends):
        for send_s, readers in results:
            elsewhere = readers - own if maker in own else readers & own
            load += send_s * bool(elsewhere) * pays
    return load


def is_contiguous(graph, devices_of_layers):
    """Whether the devices can be ordered so that no edge goes back: then their parts are differences of ideals."""
    edges = {(devices_of_layers[u], devices_of_layers[v]) for u, v in graph.edges}
    names = sorted(set(devices_of_layers))
    return any(all(order.index(a) <= order.index(b) for a, b in edges) for order in itertools.permutations(names))


@pytest.mark.parametrize("memory", [3, np.inf])
@pytest.mark.parametrize("seed", range(8))
def test_the_least_load_of_all_placements(seed, memory):
    """Two devices of one kind, with memory for some layers, and one of another that does not pay for transfers."""
    graph = random_graph(seed)
    kinds, pays, limits = [0, 0, 1], (True, False), (memory, np.inf)
    loads = [
        max(load_of(graph, placement, d, kinds[d], pays[kinds[d]]) for d in set(placement))
        for placement in itertools.product(range(3), repeat=graph.num_layers)
        if max(placement.count(0), placement.count(1)) <= memory and is_contiguous(graph, placement)
    ]
    division = least_load(graph, (2, 1), pays_transfers=pays, memory_bytes=limits)
    if min(loads) == np.inf:
        assert division is None
        return
    assert division is not None
    assert division.load_s == min(loads)
    assert sorted(v for part in division.parts for v in part.layers) == list(range(graph.num_layers))
    placed = [0] * graph.num_layers
    for device, part in enumerate(division.parts):
        for v in part.layers:
            placed[v] = device
    assert [load_of(graph, placed, d, p.kind, pays[p.kind]) for d, p in enumerate(division.parts)] == [
        part.load_s for part in division.parts
    ]
    assert all(placed[u] <= placed[v] for u, v in graph.edges)


def test_the_ideals_of_a_chain_are_its_beginnings():
    assert ideals(4, np.array([(0, 1), (1, 2), (2, 3)])).tolist() == np.tri(5, 4, -1).astype(bool).tolist()


def test_the_ideals_of_a_diamond():
    sets = ["".join(map(str, np.flatnonzero(row))) for row in ideals(4, DIAMOND)]
    assert sets[0] == ""
    assert sets[1] == "0"
    assert sorted(sets[2:4]) == ["01", "02"]
    assert sets[4:] == ["012", "0123"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": np.array([(0, 1), (1, 0)])}, "`edges` has a cycle"),
        ({"edges": np.array([(0, 9)])}, "must name layers 0 to 3"),
        ({"layer_s": np.ones((4, 2))}, r"`layer_s` must have the shape \(4, 1\)"),
        ({"layer_bytes": np.ones(3)}, "`layer_bytes` must have an entry for each of 4 layers"),
        ({"num_layers": 0}, "`num_layers` must be a whole number"),
    ],
)
def test_wrong_graphs_are_named(change, message):
    graph = LayerGraph(4, DIAMOND, np.ones((4, 1)), np.ones(4), [()] * 4)._replace(**change)
    with pytest.raises(ValueError, match=message):
        least_load(graph, [2], pays_transfers=[True], memory_bytes=[np.inf])


def test_wrong_devices_are_named():
    graph = LayerGraph(4, DIAMOND, np.ones((4, 1)), np.ones(4), [()] * 4)
    with pytest.raises(ValueError, match="`devices` must be whole numbers"):
        least_load(graph, [0], pays_transfers=[True], memory_bytes=[np.inf])
    with pytest.raises(ValueError, match="`memory_bytes` must have an entry for each of 1 kinds"):
        least_load(graph, [1], pays_transfers=[True], memory_bytes=[np.inf, 1])


def test_a_graph_with_too_many_ideals_is_refused():
    with pytest.raises(ValueError, match="more than 4000 ideals"):
        ideals(13, np.zeros((0, 2), int))
