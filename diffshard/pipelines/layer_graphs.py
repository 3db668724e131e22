"""Divisions of a graph of layers into parts, by the same programme as divisions of a chain.

A part that can be a pipeline stage is the difference of two nested ideals: sets of layers that hold all predecessors of
each of their layers. The ideals of a graph, smaller ones first, take the place of the positions between the layers of a
chain: `best_division` needs only the cost of the part between any two of them, which is infinite where one is not
inside the other. The ideals of a chain are its beginnings, so that a chain is a special case.

Letters for sizes: V layers, E edges, N ideals, K kinds of devices.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (2020), section 5.1.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cost.real_numbers import Count, checked_number, whole_number
from diffshard.pipelines.cutting import UncutStep, cut_step
from diffshard.pipelines.stage_programme import Submesh, best_division, bottleneck_objective
from search_spaces.pipelines.residuals import Cut, CutCandidate
from search_spaces.pipelines.stage_labels import LabelledStep, StageEquation
from search_spaces.pipelines.step_parts import num_bytes
from search_spaces.replay import user_source

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


_NEIGHBOURS = 8
"""A cut sends no more bytes than those at so many candidates on either side."""


@dataclass(frozen=True)
class LayerChain:
    """Layers of a step, each one all equations between two possible cuts.

    Attributes:
      cuts: `[L - 1]`, where layers 1 to L - 1 begin.
      state_bytes: `[L]`, of the arguments that a layer keeps.
      sent_bytes: `[L]`, of activations that go into a layer; 0 for the first.
      returned_bytes: `[L]`, of gradients that come back out of a layer; 0 for the first.
      signatures: `[L]`, equal for layers of equal equations.
      sources: `[L]`, the first of the user's lines in a layer.
    """

    cuts: tuple[Cut, ...]
    state_bytes: np.ndarray
    sent_bytes: np.ndarray
    returned_bytes: np.ndarray
    signatures: tuple[Hashable, ...]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def cuts_before(self, layers: Iterable[int]) -> list[Cut]:
        """Returns the cuts with which some layers begin; the first layer and the end of the last have none."""
        return [self.cuts[layer - 1] for layer in layers if 0 < layer < len(self)]


def layer_chain(step: UncutStep, most_layers: int) -> LayerChain:
    """Finds where a step may be cut well: where fewer bytes of activations are live than around.

    Args:
      most_layers: of more layers neighbours with the least arithmetic are joined.

    Raises:
      ValueError: the step cannot be cut.
    """
    candidates = step.candidates()
    at = _least_bytes(candidates)
    work = list(np.diff([0.0, *(candidates[i].flops_before for i in at), candidates[-1].flops_before])) if at else []
    while len(work) > most_layers:
        least = int(np.argmin(np.add(work[1:], work[:-1])))
        at.pop(least)
        work[least : least + 2] = [work[least] + work[least + 1]]
    cuts = [candidates[i].cut for i in at]
    cut = cut_step(step, cuts)
    labelled = LabelledStep(cut.parts, cut.cuts)
    state = np.zeros(len(cuts) + 1)
    for i in cut.parts.inputs:
        key = ("value", i)
        if i not in cut.parts.batch and key in labelled.avals:
            state[labelled.homes.get(key, 0)] += num_bytes(labelled.avals[key])
    sent = np.array([0, *(candidates[i].bytes_sent for i in at)], float)
    layers = _layers(labelled)
    sources = tuple(next(filter(None, (user_source(e.equation) for e in layer)), "") for layer in layers)
    returned = _returned_bytes(labelled)
    return LayerChain(tuple(cuts), state, sent, returned, tuple(map(_signature, layers)), sources)


def _least_bytes(candidates: Sequence[CutCandidate]) -> list[int]:
    """Returns the candidates that send no more than those around them, the first of such in a row.

    All trips of a scan over layers are among them: each trip is a layer.
    """
    num_bytes = np.array([candidate.bytes_sent for candidate in candidates])
    found: list[int] = []
    last = -len(candidates)  # the last one that is no trip
    for at, candidate in enumerate(candidates):
        around = num_bytes[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS + 1]
        is_row = at - last <= _NEIGHBOURS // 2
        if candidate.cut.trip:
            found.append(at)
        elif num_bytes[at] == around.min() and num_bytes[at] and not is_row:
            found.append(at)
            last = at
    return found


def _layers(step: LabelledStep) -> list[list[StageEquation]]:
    """Returns the equations of each layer."""
    layers: list[list[StageEquation]] = [[] for _ in range(step.num_stages)]
    for equation in step.equations:
        if equation.label is not None:
            layers[equation.label.stage].append(equation)
    return layers


def _returned_bytes(step: LabelledStep) -> np.ndarray:
    """Returns the bytes that the backward pass of each layer and of those after it make for earlier ones, `[L]`."""
    first = {}  # the earliest layer whose backward pass reads an array
    for equation in step.equations:
        if equation.label is not None and equation.label.kind == "backward":
            for key in equation.reads:
                first[key] = min(first.get(key, step.num_stages), equation.label.stage)
    returned = np.zeros(step.num_stages)
    for equation in step.equations:
        if equation.label is not None and equation.label.kind == "backward":
            for key in equation.makes:
                returned[first.get(key, step.num_stages) + 1 : equation.label.stage + 1] += num_bytes(step.avals[key])
    return returned


def _signature(layer: Sequence[StageEquation]) -> Hashable:
    """Returns the operations of a layer and the shapes of their results."""
    return hash(tuple((e.equation.primitive.name, tuple(str(v.aval) for v in e.equation.outvars)) for e in layer))
