"""Divisions of a graph of layers into parts, by the same dynamic program as divisions of a chain.

A part that can be a pipeline stage is the difference of two nested ideals: sets of layers that hold all predecessors of
each of their layers. The ideals of a graph, smaller ones first, take the place of the positions between the layers of a
chain: `best_division` needs only the cost of the part between any two of them, which is infinite where one is not
inside the other. The ideals of a chain are its beginnings, so that a chain is a special case.

Letters for sizes: V layers, E edges, N ideals, K kinds of devices.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (2020), section 5.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.real_numbers import Count, checked_number, whole_number
from diffshard.pipelines.stage_dynamic_program import Submesh, best_division, bottleneck_objective

MAX_IDEALS = 4000
"""The most ideals of a graph that is divided; the costs of their pairs then take 128 MB for each kind of devices."""


class LayerGraph(NamedTuple):
    """Layers, what each device takes for them, and what it takes to send their results.

    A device pays for what a layer sends once, however many layers elsewhere read it, and so does each reading device.

    Attributes:
      num_layers: V.
      edges: `[E, 2]`, the layer that makes a result and the one that reads it; there is no way from a layer to itself.
      layer_s: `[V, K]`, seconds on each kind of devices; infinite where a layer cannot run.
      layer_bytes: `[V]`, what each layer holds.
      sends: for each layer the results that it makes, each as the seconds that sending it takes and the layers that
        read it. Readers need not come after it: in training, gradients go back.
    """

    num_layers: int
    edges: np.ndarray
    layer_s: np.ndarray
    layer_bytes: np.ndarray
    sends: Sequence[Sequence[tuple[float, frozenset[int]]]]


class Part(NamedTuple):
    """The layers of one device.

    Attributes:
      layers: in increasing order.
      kind: the kind of the device.
      load_s: what the device computes and sends.
    """

    layers: tuple[int, ...]
    kind: int
    load_s: float


class GraphDivision(NamedTuple):
    """A division of a graph.

    Attributes:
      parts: each after all parts whose results it reads along edges.
      load_s: the largest load.
    """

    parts: tuple[Part, ...]
    load_s: float


def least_load(
    graph: LayerGraph, devices: Sequence[int], *, pays_transfers: Sequence[bool], memory_bytes: Sequence[float]
) -> GraphDivision | None:
    """Divides a graph over devices so that the largest load of a device is least.

    Args:
      graph: the layers.
      devices: `[K]`, how many devices there are of each kind; some may stay without layers.
      pays_transfers: `[K]`, whether sending and reading results takes time of such a device.
      memory_bytes: `[K]`, what the layers of one device may hold together.

    Returns:
      The best division; None where every one exceeds the memory or puts a layer where it cannot run.

    Raises:
      ValueError: a length does not fit, the edges have a cycle, or the graph has more than `MAX_IDEALS` ideals.
    """
    _check(graph, devices, pays_transfers, memory_bytes)
    members = ideals(graph.num_layers, graph.edges)
    load_s = _part_loads(graph, members, pays_transfers, memory_bytes)
    num_positions = len(members) - 1
    kinds = [kind for kind, count in enumerate(devices) if count]
    division = best_division(
        num_positions,
        devices,
        [Submesh(kind, 1) for kind in kinds],
        lambda _: load_s[..., kinds],
        np.zeros((num_positions, len(kinds), len(kinds))),
        bottleneck_objective(),
        max_stages=sum(devices),
        use_all_devices=False,
    )
    if division is None:
        return None
    parts = []
    for start, end, submesh in division.stages:
        layers = np.flatnonzero(members[end] & ~members[start])
        parts.append(Part(tuple(layers.tolist()), kinds[submesh], float(load_s[start, end, kinds[submesh]])))
    return GraphDivision(tuple(parts), division.value)


def ideals(num_layers: int, edges: np.ndarray) -> np.ndarray:
    """Returns `[N, V]`: which layers are in each ideal of a graph, smaller ones first, from no layers to all layers.

    Raises:
      ValueError: the edges have a cycle, or there are more than `MAX_IDEALS` ideals.
    """
    needed = np.zeros((num_layers, num_layers), bool)  # which layers each one reads
    for source, target in np.asarray(edges, int).reshape(-1, 2):
        needed[target, source] = True
    rows = [np.zeros((1, num_layers), bool)]
    count = 1
    for _ in range(num_layers):
        smaller = rows[-1]
        can_join = ~smaller & ((~smaller).astype(np.int64) @ needed.T == 0)
        which, layer = np.nonzero(can_join)
        larger = smaller[which]
        larger[np.arange(len(layer)), layer] = True
        if not len(larger):
            raise ValueError("`edges` has a cycle; the layers of a graph read each other in some order.")
        rows.append(np.unique(larger, axis=0))
        count += len(rows[-1])
        if count > MAX_IDEALS:
            raise ValueError(
                f"The graph has more than {MAX_IDEALS} ideals, so that it can be cut in too many ways. Merge layers of "
                "parallel branches."
            )
    return np.concatenate(rows)


def _part_loads(
    graph: LayerGraph, members: np.ndarray, pays_transfers: Sequence[bool], memory_bytes: Sequence[float]
) -> np.ndarray:
    """Returns `[N - 1, N, K]`, the load of the layers of a later ideal without those of an earlier one."""
    inside = members.astype(float)
    layer_s = np.where(np.isfinite(graph.layer_s), graph.layer_s, 0.0)
    cannot_run = inside @ np.isinf(graph.layer_s)
    num_bytes = inside @ graph.layer_bytes
    load_s = np.empty((len(members) - 1, len(members), len(pays_transfers)))
    for start in range(len(load_s)):
        is_larger = ~(members[start] & ~members).any(axis=1)
        part = members & ~members[start]
        sent_s = _transfers(graph, part)
        # Sums over the layers of the part, not differences of sums, so that equal loads stay equal.
        load = part.astype(float) @ layer_s + np.where(pays_transfers, sent_s[:, None], 0.0)
        fits = (num_bytes - num_bytes[start])[:, None] <= np.asarray(memory_bytes, float)
        runs = cannot_run - cannot_run[start] == 0
        load_s[start] = np.where(is_larger[:, None] & fits & runs, load, np.inf)
    return load_s


def _transfers(graph: LayerGraph, part: np.ndarray) -> np.ndarray:
    """Returns `[N]`, the seconds of all results that each of N sets of layers `[N, V]` sends or reads."""
    seconds = np.zeros(len(part))
    for layer, results in enumerate(graph.sends):
        for send_s, readers in results:
            reads = part[:, sorted(readers)]
            seconds += send_s * np.where(part[:, layer], ~reads.all(axis=1), reads.any(axis=1))
    return seconds


def _check(
    graph: LayerGraph, devices: Sequence[int], pays_transfers: Sequence[bool], memory_bytes: Sequence[float]
) -> None:
    checked_number("num_layers", graph.num_layers, Count)
    if np.shape(graph.layer_s) != (graph.num_layers, len(devices)):
        raise ValueError(
            f"`layer_s` must have the shape {(graph.num_layers, len(devices))}, not {np.shape(graph.layer_s)}."
        )
    for name, values in (("layer_bytes", graph.layer_bytes), ("sends", graph.sends)):
        if len(values) != graph.num_layers:
            raise ValueError(f"`{name}` must have an entry for each of {graph.num_layers} layers, not {len(values)}.")
    for name, values in (("pays_transfers", pays_transfers), ("memory_bytes", memory_bytes)):
        if len(values) != len(devices):
            raise ValueError(f"`{name}` must have an entry for each of {len(devices)} kinds, not {len(values)}.")
    numbers = [whole_number(count) for count in devices]
    if any(number is None or number < 0 for number in numbers) or not any(numbers):
        raise ValueError(f"`devices` must be whole numbers, one of them positive, not {tuple(devices)}.")
    mentioned = {int(v) for v in np.ravel(graph.edges)} | {v for s in graph.sends for _, r in s for v in r}
    if not mentioned <= set(range(graph.num_layers)):
        raise ValueError(f"`edges` and `sends` must name layers 0 to {graph.num_layers - 1}.")
