"""Chooses what a function computes again, and bounds all such choices from below.

The bound is over all choices of what is kept and what is computed again, and all shardings of both. Whatever runs again
only adds work and memory to the steps of the function as it was traced. So the function's own problem, made easier in
all that a choice could change, bounds them all: where a value goes from the forward pass to a step of the backward
pass, that step may take it from nowhere. It then reads no bytes, waits for no reshard, and nothing is in memory between
the two passes. What is left is the cost of every step once, with the kernels that the forward pass has if none of its
values need be written for the backward pass.

For a price of memory the cheapest choice is a minimum cut. For each value v of the forward pass N_v says whether the
backward pass needs it, and for each step e of the forward pass R_e whether it runs again. With a price of λ seconds for
each byte, the cost of a choice is

    Σ_e c_e·R_e + λ·Σ_v b_v·N_v·(1 - R_step(v))

with N_v = 1 for what the backward pass reads, and R_e ≤ N_u for all u that e reads: running a step again takes c_e
seconds, and a value that is needed but not made again is kept, which takes b_v bytes. All terms are submodular, so that
the minimum is that of a cut. Over all prices the minima are the lower convex hull of seconds against bytes, found by
trying the price at which two neighbours cost the same.

Source: J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems" (1976), for the network;
M. J. Eisner and D. G. Severance, "Mathematical techniques for efficient record segmentation in large shared databases"
(1976), for the prices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from cost.base import Problem
from search_spaces.rematerialisation.passes import (
    Passes,
    backward_reads,
    made_by,
    step_key,
    vertices_of,
)
from search_spaces.sharding.edge_costs import EdgeCosts, transfer_matrices
from search_spaces.sharding.graph import Graph, Operand, Region, Step, Value, Vertex, values_of
from search_spaces.sharding.kernels import kernels_of
from search_spaces.sharding.memory import Lifetimes, lifetimes_of
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.reshard_costs import CollectiveShares
from search_spaces.sharding.space import ShardingSpace

_CAPACITIES = 2**26
"""The largest finite capacity of a network in whole numbers; the flow library counts with 32 bits."""
_FOREVER = 2**30
"""The capacity of what must not be cut: more than all finite ones of a cut that is used."""


class RematChoice(NamedTuple):
    """A choice of what is computed again.

    Attributes:
      recomputed: the steps that run again, by the numbers that the choices give them.
      kept: the values that go from forward to backward in memory.
      seconds: that the steps take.
      kept_bytes: that the values take on one device.
      offloaded: (value, gone before, back from) of what waits in the host's memory (`offloading.Offload`).
      host_bytes: of these on one device.
    """

    recomputed: frozenset[int]
    kept: frozenset[int]
    seconds: float
    kept_bytes: float
    offloaded: tuple[tuple[int, int, int], ...] = ()
    host_bytes: float = 0.0


class Choices:
    """Values and steps by their numbers, of which some values are needed.

    Attributes:
      steps: the seconds of each step that can run again.
      bytes: of each value if it is kept.
      maker: the step that makes a value, where it can run again.
      needed: the values that the backward pass reads.
      operands: the values that a step reads.
      inside_readers: steps that run again in their readers anyway, unless they read what runs again.
    """

    def __init__(self):
        self.steps: dict[int, float] = {}
        self.bytes: dict[int, float] = {}
        self.maker: dict[int, int] = {}
        self.needed: set[int] = set()
        self.operands: dict[int, list[int]] = {}
        self.inside_readers: set[int] = set()

    def candidates(self, most: int = 24) -> list[RematChoice]:
        """Returns the choices of least cost for all prices of memory, from those that keep the most to the least."""
        low, high = self.cheapest(0.0), self.cheapest(np.inf)
        found = {low.recomputed: low, high.recomputed: high}
        intervals = [(low, high)]
        while intervals and len(found) < most:
            a, b = intervals.pop(0)
            if a.kept_bytes <= b.kept_bytes or b.seconds <= a.seconds:
                continue
            between = self.cheapest((b.seconds - a.seconds) / (a.kept_bytes - b.kept_bytes))
            if between.recomputed not in found:
                found[between.recomputed] = between
                intervals += [(a, between), (between, b)]
        return sorted(found.values(), key=lambda c: (-c.kept_bytes, c.seconds))

    def cheapest(self, price: float) -> RematChoice:
        """Returns the cheapest choice where a byte that is kept costs `price` seconds."""
        values, keys = sorted(self.bytes), sorted(self.steps)
        value_node = {v: 2 + i for i, v in enumerate(values)}
        step_node = {k: 2 + len(values) + i for i, k in enumerate(keys)}
        finite = np.array([b for b in self.bytes.values() if np.isfinite(b)] or [0.0])
        if price == np.inf:  # bytes first, seconds break ties
            price = 1e3 * (sum(self.steps.values()) + 1e-12) / max(float(finite[finite > 0].min(initial=1.0)), 1.0)
        least = 1e-9 * max(sum(self.steps.values()), 1e-12)  # of equally cheap choices the one that keeps
        seconds = {k: s + least for k, s in self.steps.items()}
        scale = _CAPACITIES / max(max(seconds.values(), default=0.0), price * float(finite.max()), 1e-30)
        rows, columns, capacities = [], [], []

        def edge(a: int, b: int, capacity: float) -> None:
            if capacity > 0:
                rows.append(a)
                columns.append(b)
                capacities.append(int(min(np.ceil(capacity * scale), _FOREVER)))

        for value in values:
            cost = price * self.bytes[value] if np.isfinite(self.bytes[value]) else np.inf
            target = step_node[self.maker[value]] if value in self.maker else 1
            edge(value_node[value], target, min(cost, _FOREVER / scale))
            if value in self.needed:
                edge(0, value_node[value], _FOREVER / scale)
        for key in keys:
            edge(step_node[key], 1, seconds[key])
            for value in set(self.operands[key]):
                edge(step_node[key], value_node[value], _FOREVER / scale)
        size = 2 + len(values) + len(keys)
        network = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(size, size))
        network.sum_duplicates()
        flow = maximum_flow(network, 0, 1).flow
        residual = network - flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, 0, return_predecessors=False).tolist())
        return self.candidate(frozenset(k for k in keys if step_node[k] in reached))

    def candidate(self, recomputed: frozenset[int]) -> RematChoice:
        """Returns the cost of a choice; steps whose results the backward pass does not need are left out."""
        needed, runs, kept = list(self.needed), set(), set()
        seen = set(needed)
        while needed:
            value = needed.pop()
            key = self.maker.get(value)
            if key is None or key not in recomputed:
                kept.add(value)
                continue
            if key in runs:
                continue
            runs.add(key)
            new = [v for v in self.operands[key] if v not in seen]
            seen.update(new)
            needed += new
        kept_bytes = sum(b for v in kept if np.isfinite(b := self.bytes[v]))
        again: set[int] = set()
        for key in (k for k in self.steps if k in runs):  # in program order
            reads_again = any(self.maker.get(v) in again for v in self.operands[key])
            if reads_again or key not in self.inside_readers:
                again.add(key)
        return RematChoice(frozenset(again), frozenset(kept), sum(self.steps[k] for k in again), kept_bytes)


_MOST_WIDTHS = 64
"""Different widths of the narrowest places that are tried; each takes about a millisecond."""
_REGIONS = ("scan", "cond", "remat2", "checkpoint", "remat")


class Network(Choices):
    """The choices of a function, with what they cost.

    Args:
      graph: the traced function.
      passes: its forward and backward passes.
      step_s: returns the seconds that a vertex takes in one step, its collectives included.
      kept_bytes: returns the bytes of a value of one trip on one device.
      is_written: tells whether a value exists in memory in the function as it is; others are computed in their readers.

    Attributes:
      step_s: returns the seconds of a vertex in one step.
      freeable: ids of the values that some choice does not keep on the device.
    """

    def __init__(
        self,
        graph: Graph,
        passes: Sequence[Passes],
        step_s: Callable[[Vertex], float],
        kept_bytes: Callable[[Value], float],
        is_written: Callable[[Value], bool],
    ):
        super().__init__()
        self.graph, self.step_s, self._kept_bytes, self._is_written = graph, step_s, kept_bytes, is_written
        self.freeable: set[int] = set()
        pairs = [one.pair for one in passes if one.pair is not None]
        pieces = [piece for pair in pairs for piece in pair.forward.slices]
        self._stack = {p.results[0].id: o for p in pieces if isinstance(o := p.operands[0], Value)}
        self._made = {value for one in passes for value in made_by(one.forward)}
        self._made |= {carry.results[0].id for pair in pairs for carry in pair.forward.carries}
        paired = {step_key(pair.forward) for pair in pairs}
        linked = {
            o.id
            for pair in pairs
            for piece in pair.backward.slices
            if piece.results[0].id in pair.aliases and isinstance(o := piece.operands[0], Value)
        }
        for one in passes:
            self._add_steps(one, paired)
            reads = [self._stack.get(value.id, value).id for _, value in backward_reads(one)]
            self.needed |= {value for value in reads if value in self._made and value not in linked}
        # What is only computed inside of its readers runs again there anyway, unless it reads what runs again.
        written = {key for v, key in self.maker.items() if np.isfinite(self.bytes[v]) and graph.values[v].shape}
        self.inside_readers = set(self.steps) - written
        self.freeable |= set(self.maker)
        for value, num_bytes in self.bytes.items():
            if not graph.values[value].shape or (not np.isfinite(num_bytes) and value not in self.maker):
                self.bytes[value] = 0.0

    def _add_steps(self, passes: Passes, paired: set[int]) -> None:
        """Adds the steps of a forward pass, and what keeping their results takes."""
        for step in passes.forward:
            key = step_key(step)
            results = step.results
            if can_run_again(step) and key not in paired and not {v.id for v in results} & passes.pinned:
                self.steps[key] = sum(self.step_s(v) for v in vertices_of(step))
                read = [self._stack.get(v.id, v).id for v in values_of(step.operands)]
                self.operands[key] = [v for v in read if v in self._made]
                self.maker.update((v.id, key) for v in results)
            for value in results:
                is_inside = passes.pair is None and not self._is_written(value)
                num_bytes = np.inf if is_inside else passes.length * self._kept_bytes(value)
                self.bytes[value.id] = 0.0 if value.id in passes.pinned else num_bytes
        if passes.pair is not None:
            for carry in passes.pair.forward.carries:
                self.bytes[carry.results[0].id] = passes.length * self._kept_bytes(carry.results[0])

    def between(self, more: RematChoice, less: RematChoice) -> list[RematChoice]:
        """Returns choices between two neighbours, of which `more` keeps more.

        A price treats equal layers alike, so that all of them change from one neighbour to the other, and where the
        inputs of layers are no longer kept, all layers are computed again at once. In between, every second, third or
        fourth value that changes is kept, or those of a part of the layers only.
        """
        changed = sorted(v for v in more.kept - less.kept if self.maker.get(v) in less.recomputed)
        count = len(changed)
        kept = [changed[start::period] for period in (2, 3, 4) for start in (0, period - 1)]
        kept += [changed[count * part // 4 :] for part in (1, 2, 3)]
        found = {self.candidate(less.recomputed - {self.maker[v] for v in values}) for values in kept if values}
        return [c for c in found if c.recomputed not in (more.recomputed, less.recomputed)]

    def at_narrow_places(self, passes: Passes) -> list[RematChoice]:
        """Returns choices that keep what goes through the narrowest places of a forward pass, such as layers' inputs.

        Everything between two kept places runs again at once.
        """
        if passes.pair is not None or not passes.forward:
            return []
        made = {v.id: i for i, step in enumerate(passes.forward) for v in step.results if v.id in self.maker}
        read = {v.id: i for i, step in enumerate(passes.forward) for v in values_of(step.operands)}
        spans = [(v, made[v], read[v], self._kept_bytes(self.graph.values[v])) for v in made if v in read]
        change = np.zeros(len(passes.forward) + 1)
        for _, start, end, num_bytes in spans:
            change[start] += num_bytes
            change[end] -= num_bytes
        crossing = np.cumsum(change)[:-1]
        found = []
        for width in np.unique(crossing[crossing > 0])[:_MOST_WIDTHS]:
            is_narrow = np.concatenate([[False], crossing <= width, [False]])
            edges = np.flatnonzero(np.diff(is_narrow.astype(int)))
            places = [a + int(np.argmin(crossing[a:b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            kept = {v for v, start, end, _ in spans if any(start <= place < end for place in places)}
            found.append(self.candidate(frozenset(self.steps) - {self.maker[v] for v in kept}))
        return list({c.recomputed: c for c in found}.values())


def can_run_again(step: Step) -> bool:
    """Returns whether a step of the forward pass may run a second time: it has no effects and a known length."""
    if isinstance(step, Region):
        return step.equation.primitive.name in _REGIONS and not step.equation.effects
    return step.kind == "operation" and step.equation is not None and not step.equation.effects


def relaxed_problem(space: ShardingSpace, passes: Sequence[Passes], network: Network) -> Problem:
    """Returns a problem of a space's own choices that costs no more than any choice of what is computed again.

    Args:
      space: of the function as it was traced.
      passes: its forward and backward passes.
      network: what can be computed again.
    """
    taken = _taken(space.graph, passes, network)
    cut = _without(space.graph, taken)
    rules = [*space.rules, *[None] * (len(cut.vertices) - len(space.rules))]
    kernels = kernels_of(cut, rules, space.donated)
    for vertex, operand in taken:
        kernels.reads[vertex][operand] = kernels.copies[vertex][operand] = 0.0
    shares = CollectiveShares(space.graph, space.hardware.exposed_share)
    costs = NodeCosts(space.axis_sizes, space.hardware, space.reshard_costs, shares, kernels, space.forms)
    edges = [edge for edge in space.edges if (edge.reader, edge.operand) not in taken]
    matrices = transfer_matrices(edges, space.nodes, EdgeCosts(space.reshard_costs, shares))
    usages = space.usages_with(_shorter(lifetimes_of(cut, rules, space.donated), space.graph, passes, network))
    node_cost = list(map(np.minimum, space.problem.node_cost, costs.all_s(space.nodes)))
    return space.problem_with(node_cost, matrices, usages)


def _taken(graph: Graph, passes: Sequence[Passes], network: Network) -> frozenset[tuple[int, int]]:
    """Returns (vertex, operand) of everything that reads what could be computed again, in a backward pass or for it."""
    taken: set[tuple[int, int]] = set()
    free_stacks = {stack.id for one in passes for stack in _stacks_and_slices(one, network)}
    for one in passes:
        own = {v.id for step in one.forward for v in step.results} & network.freeable
        for step in one.backward:
            for vertex in vertices_of(step):
                taken |= {(vertex.index, i) for i, o in enumerate(vertex.operands) if _id(o) in own | free_stacks}
    taken |= {(v.index, 0) for v in graph.vertices if v.kind == "stack" and v.results[0].id in free_stacks}
    return frozenset(taken)


def _stacks_and_slices(passes: Passes, network: Network) -> list[Value]:
    """Returns the stacked arrays of a pair of scans that could be left out, and their slices in the backward body."""
    values: list[Value] = []
    if passes.pair is not None:
        for piece in passes.pair.backward.slices:
            inner = passes.pair.aliases.get(piece.results[0].id)
            if inner is not None and inner.id in network.freeable:
                values += values_of(piece.operands) + piece.results
    return values


def _without(graph: Graph, taken: frozenset[tuple[int, int]]) -> Graph:
    """Returns a graph in which these operands are arguments of their own; only its vertices and values are changed."""
    values, vertices, others = list(graph.values), list(graph.vertices), []
    for index, position in taken:
        vertex = vertices[index]
        operand = vertex.operands[position]
        assert isinstance(operand, Value)
        number = len(vertices) + len(others)
        value = replace(operand, id=len(values), vertex=number, result=0, made_at=-1)
        values.append(value)
        others.append(Vertex(number, "input", None, [], [], [value], 1.0, -1))
        operands = [value if i == position else o for i, o in enumerate(vertex.operands)]
        vertices[index] = replace(vertex, operands=operands)
    cut = replace(graph, vertices=[*vertices, *others], values=values)
    outputs, consumers = {_id(o) for o in graph.outputs}, cut.consumers()
    for value in {_id(graph.vertices[v].operands[i]) for v, i in taken} - outputs:
        assert value is not None
        last = max((reader.position for reader, _ in consumers[value]), default=values[value].made_at)
        values[value] = replace(values[value], last_read_at=last)
    return cut


def _shorter(lifetimes: Lifetimes, graph: Graph, passes: Sequence[Passes], network: Network) -> Lifetimes:
    """Returns lifetimes of a graph's own values, without the stacks of what could be computed again."""
    size = len(graph.values)
    is_written = lifetimes.is_written[:size].copy()
    is_written[[v.id for one in passes for v in _stacks_and_slices(one, network)]] = False
    return Lifetimes(is_written, lifetimes.interval[:size], lifetimes.first_use[:size], lifetimes.last_use[:size])


def _id(operand: Operand) -> int | None:
    return operand.id if isinstance(operand, Value) else None
