"""Which values of a graph are really written to memory, from when to when they live, and how many bytes they hold.

A compiler fuses pointwise operations into the ones that read them, so most values of a jaxpr never exist; what a fused
operation reads must then live as long as the fusion that reads it. A fusion writes its result over an operand of the
same size that nobody reads afterwards (`fusion.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cost.memory import memory_profile, numbered_times
from search_spaces.sharding.base import Node, Rule, ShardingStrategy
from search_spaces.sharding.codes import CODES
from search_spaces.sharding.fusion import Fusing, is_pointwise
from search_spaces.sharding.graph import Graph, Value, Vertex, values_of
from search_spaces.sharding.host_state import HostArray, bytes_on
from search_spaces.sharding.scheduling import HeldPositions
from search_spaces.sharding.spec import local_bytes


class Lifetimes(NamedTuple):
    """Indexed by value id.

    Attributes:
      is_written: `[values]` booleans, whether the value exists in memory.
      interval: `[values, 2]` half-open positions at which it lives.
      first_use: `[values]` position of the first operation that reads it.
      last_use: `[values]` position of the last operation that reads it, by itself or through what is fused into it.
    """

    is_written: np.ndarray
    interval: np.ndarray
    first_use: np.ndarray
    last_use: np.ndarray


class Residual(NamedTuple):
    """An array of the forward pass that is read after it.

    Attributes:
      last_forward: the position of the last operation of the forward pass that reads it, by itself or through others.
      first_late: that of the first one after it.
    """

    value: Value
    last_forward: int
    first_late: int


def lifetimes_of(graph: Graph, rules: Sequence[Rule | None], donated: Sequence[bool]) -> Lifetimes:
    """Returns which values are written and when they live.

    Args:
      rules: for each vertex its rule or None.
      donated: for each flat argument whether its memory may be used again.
    """
    consumers = graph.consumers()
    fusing = Fusing(graph, [is_pointwise(v, rules[v.index]) for v in graph.vertices])
    ends = {v.id for v in values_of(graph.outputs)}
    is_needed = _needed(graph)
    is_written = np.array([is_needed[v.vertex] for v in graph.values], bool)
    last_read = np.array([v.last_read_at for v in graph.values], int)
    for value in reversed(graph.values):
        readers = consumers[value.id]
        last_read[value.id] = max(last_read[value.id], graph.stored_until.get(value.id, -1))
        if is_written[value.id] and value.id not in ends and readers and value.id not in graph.stored_until:
            is_written[value.id] = not fusing.fuses(graph.vertices[value.vertex], [r for r, _ in readers])
        for reader, _ in readers:
            if fusing.pointwise[reader.index] and not is_written[reader.results[0].id]:
                last_read[value.id] = max(last_read[value.id], last_read[reader.results[0].id])
    interval = (
        np.stack([[v.made_at for v in graph.values], last_read + 1], axis=1) if graph.values else np.zeros((0, 2), int)
    )
    for overwritten in fusing.overwritten(is_written, last_read):
        interval[overwritten.id, 1] = max(interval[overwritten.id, 1] - 1, overwritten.made_at + 1)
    for vertex, is_reused in (*zip(graph.inputs, donated, strict=True), *((v, False) for v in graph.constants)):
        argument = vertex.results[0].id
        if argument in ends or not (is_reused or argument in graph.stored_until):
            interval[argument, 1] = graph.length + 1
    for vertex in graph.vertices:
        if vertex.kind == "carry":  # one buffer for what the body reads and what the loop leaves
            inside, outside = (r.id for r in vertex.results)
            interval[inside, 1] = max(interval[inside, 1], interval[outside, 1])
            is_written[outside] = False
    share_memory(graph, is_written, interval, last_read)
    interval += 1  # inputs are born at -1
    first = np.array([min((c.position for c, _ in consumers[v.id]), default=v.made_at) for v in graph.values], int)
    return Lifetimes(is_written, interval, first + 1, last_read + 1)


def _needed(graph: Graph) -> list[bool]:
    """Returns for each vertex whether a result or an effect depends on it; a compiler removes the other operations.

    Derivatives leave such operations behind, above all in rematerialised bodies.
    """
    consumers = graph.consumers()
    ends = {v.id for v in values_of(graph.outputs)}
    is_needed = [True] * len(graph.vertices)
    for vertex in reversed(graph.vertices):  # only a loop's carry reads what comes after it, and carries stay
        if vertex.kind == "operation" and vertex.equation is not None and not vertex.equation.effects:
            is_needed[vertex.index] = any(
                value.id in ends or any(is_needed[reader.index] for reader, _ in consumers[value.id])
                for value in vertex.results
            )
    return is_needed


class Usages(NamedTuple):
    """The usages of a problem, K in total.

    Attributes:
      node: `[K]` the node that each belongs to.
      num_bytes: K arrays `[S_v]`, bytes on each device.
      interval: `[K, 2]` half-open positions at which it is live.
      value: `[K]` the id of the value that it holds.
      is_copy: `[K]` whether it is the gathered copy of a value that is stored as well.
    """

    node: list[int]
    num_bytes: list[np.ndarray]
    interval: list[tuple[int, int]]
    value: list[int]
    is_copy: list[bool]


def usages_of(
    graph: Graph,
    nodes: Sequence[Node],
    shared_reshards: Mapping[int, int],
    lifetimes: Lifetimes,
    axis_sizes: tuple[int, ...],
    held: HeldPositions,
    residuals: Mapping[int, Residual],
    residual_bytes: Mapping[int, Sequence[float]],
    host_arrays: Sequence[HostArray],
) -> Usages:
    """Lists the memory that each node's strategies use: a value belongs to its shared reshard, else to its vertex.

    An array that is stored one way and gathered for its readers has two usages: what is stored, for its whole life, and
    the gathered copy from its first reader to its last. So has the gradient of a weight: what is left of its reduction,
    and what was there before it, until the window after the product has ended.

    Args:
      shared_reshards: the index of the node of a value's shared reshard, by the value's id.
      held: from when gathered weights are held, and until when gradients that are not reduced yet.
      residuals: of values that may be kept as codes for the backward pass, by their ids. A value that is has its codes
        for its whole life, and its numbers until the forward pass has read them, and while the backward pass does.
      residual_bytes: `[S_v]` of what the strategies of an operation have not sent of its sums, by its vertex: in memory
        throughout.
      host_arrays: the arrays of the state that may be on the host. One that is takes memory of the device from the
        begin of its copy to its last reader; what replaces it belongs to the argument once it could be on the host.
    """
    usages = Usages([], [], [], [], [])

    def add(node: int, value: Value, num_bytes: Sequence[float], start: int, end: int, *, is_copy: bool) -> None:
        usages.node.append(node)
        usages.num_bytes.append(np.array(num_bytes, float))
        usages.interval.append((start, max(end, start + 1)))
        usages.value.append(value.id)
        usages.is_copy.append(is_copy)

    for vertex, num_bytes in residual_bytes.items():
        add(vertex, graph.vertices[vertex].results[0], num_bytes, 0, graph.length + 2, is_copy=True)
    interval = _add_state(add, graph, nodes, lifetimes, axis_sizes, host_arrays)
    for value in graph.values:
        if not value.shape or not lifetimes.is_written[value.id] or value.is_on_host:
            continue
        start, end = interval[value.id]
        if value.id in held.reduce_until:
            makers = nodes[value.vertex].strategies
            partial = [_bytes_before_reduction(value, s, axis_sizes) for s in makers]
            if any(partial):
                until = max(held.reduce_until[value.id], graph.reduced_until.get(value.id, -1))
                add(value.vertex, value, partial, start, until + 2, is_copy=False)
        shared = shared_reshards.get(value.id)
        node, result = (value.vertex, value.result) if shared is None else (shared, 0)
        strategies = nodes[node].strategies
        if value.id in graph.stored_parts:
            sizes = [value.num_bytes / graph.stored_parts[value.id]] * len(strategies)
            add(node, value, sizes, start, end, is_copy=False)
            continue
        if shared is not None:
            start = min(start, held.fetch_from.get(value.id, int(start)) + 1)  # inputs are born at -1
        stored_specs = [s.unreduced[result] if _is_gathered(s, result) else s.results[result] for s in strategies]
        sizes = [local_bytes(value, spec, axis_sizes) for spec in stored_specs]
        sizes = bytes_on(strategies, sizes, is_host=False)
        add(node, value, np.multiply(sizes, _kept_shares(value, strategies)).tolist(), start, end, is_copy=False)
        if shared is not None and any(s.kept_in for s in strategies):
            residual = residuals[value.id]
            numbers = [size if s.kept_in else 0.0 for size, s in zip(sizes, strategies, strict=True)]
            add(node, value, numbers, start, residual.last_forward + 2, is_copy=True)
            add(node, value, numbers, residual.first_late + 1, end, is_copy=True)
        copy = [
            local_bytes(value, s.results[result], axis_sizes) if _is_gathered(s, result) else 0.0 for s in strategies
        ]
        if any(copy):
            first_use = min(lifetimes.first_use[value.id], held.fetch_from.get(value.id, graph.length) + 1)
            last_use = int(lifetimes.last_use[value.id])
            if value.id in graph.copied_until:
                first_use, last_use = int(start), max(last_use, graph.copied_until[value.id] + 1)
            add(node, value, copy, first_use, last_use + 1, is_copy=True)
    return usages


def _add_state(
    add: Callable[..., None],
    graph: Graph,
    nodes: Sequence[Node],
    lifetimes: Lifetimes,
    axis_sizes: tuple[int, ...],
    host_arrays: Sequence[HostArray],
) -> np.ndarray:
    """Adds what arrays that may be on the host take besides; returns when values live, `[values, 2]`.

    That is the copy on the device of one that is there. What replaces an array lives until it could be on the host;
    from then on it belongs to the argument, and takes no memory of the device if that is on the host.
    """
    interval = lifetimes.interval.copy()
    for array in host_arrays:
        strategies, value, result = nodes[array.vertex].strategies, array.value, array.result
        sizes = [local_bytes(graph.values[value], s.unreduced[0], axis_sizes) for s in strategies]
        copied, staying = (bytes_on(strategies, sizes, is_host=is_host) for is_host in (True, False))
        last = min(int(interval[value, 1]), int(lifetimes.last_use[value]) + 1)
        add(array.vertex, graph.values[value], copied, array.comes_at + 2, last, is_copy=True)
        end = int(interval[result, 1])
        readers = [reader.position for reader, _ in graph.consumers()[result]]
        interval[result, 1] = min(max([array.gone_at, *readers]) + 2, end)
        add(array.vertex, graph.values[result], staying, int(interval[result, 1]), end, is_copy=False)
    return interval


def _kept_shares(value: Value, strategies: Sequence[ShardingStrategy]) -> list[float]:
    """Returns the memory of a value with each strategy, as a share of its own bytes: less where it is kept as codes."""
    return [CODES[s.kept_in].bits / 8 / value.dtype.itemsize if s.kept_in else 1.0 for s in strategies]


def _is_gathered(strategy: ShardingStrategy, result: int) -> bool:
    """Returns whether an array is stored beside its gathered copy."""
    return any(step.kind == "all_gather" for step in strategy.reductions[result])


def _bytes_before_reduction(value: Value, strategy: ShardingStrategy, axis_sizes: tuple[int, ...]) -> float:
    """Returns by how many bytes a partial result is larger than the finished one that takes its place."""
    if not strategy.reductions[value.result]:
        return 0.0
    finished, partial = (spec[value.result] for spec in (strategy.results, strategy.unreduced))
    return max(0.0, local_bytes(value, partial, axis_sizes) - local_bytes(value, finished, axis_sizes))


def share_memory(graph: Graph, is_written: np.ndarray, interval: np.ndarray, last_read: np.ndarray) -> None:
    """Says which arrays are other arrays under another name: results of barriers, slices and stacks of a single trip.

    A compiler runs a scan with one trip as straight code, where they are the arrays outside in another shape.

    Args:
      is_written: as in `memory.Lifetimes`; it is changed, as are the others.
      interval: as there, but with inputs at -1.
      last_read: positions of the operations that read values last.
    """
    for vertex in reversed(graph.vertices):
        is_barrier = vertex.primitive == "optimization_barrier"
        if not is_barrier and not (vertex.kind in ("slice", "stack") and has_one_trip(vertex)):
            continue
        for operand, result in zip(vertex.operands, vertex.results, strict=True):
            if not isinstance(operand, Value) or not is_written[operand.id] or not is_written[result.id]:
                continue
            one, other = (result, operand) if vertex.kind == "stack" else (operand, result)  # the first one stays
            if vertex.kind == "stack" and operand.made_at < result.made_at:
                continue  # it was made before the loop
            is_written[other.id] = False
            start = interval[operand.id, 0]
            interval[one.id] = start, max(interval[one.id, 1], interval[other.id, 1])
            last_read[one.id] = max(last_read[one.id], last_read[other.id])


def has_one_trip(vertex: Vertex) -> bool:
    """Returns whether the loop of a vertex is a scan with one trip."""
    return vertex.params.get("length") == 1


class HeldArray(NamedTuple):
    """An array in memory.

    Attributes:
      is_copy: whether it is the gathered copy of a value that is stored as well.
    """

    value: int
    is_copy: bool
    num_bytes: float


class MemoryUse(NamedTuple):
    """The memory of a device in one step of a choice.

    Attributes:
      times: `[T]` where it changes, as in the intervals of `Usages`: 0 before the first operation, p + 1 at position p.
      num_bytes: `[T]` in use from each of these times until the next.
      at_peak: what is in memory at the first time of the peak, the largest first; together the peak.
    """

    times: np.ndarray
    num_bytes: np.ndarray
    at_peak: tuple[HeldArray, ...]


def memory_use(usages: Usages, choice: Sequence[int]) -> MemoryUse:
    """Returns the memory that a choice uses.

    Args:
      usages: of the space, K in total.
      choice: `[V]` strategy indices.
    """
    pairs = zip(usages.node, usages.num_bytes, strict=True)
    amounts = np.array([num_bytes[choice[node]] for node, num_bytes in pairs], float)
    if not len(amounts):
        return MemoryUse(np.zeros(1, int), np.zeros(1), ())
    times, interval = numbered_times(np.array(usages.interval, int))
    num_bytes = memory_profile(interval, amounts[:, None], len(times))[:, 0]
    peak = int(np.argmax(num_bytes))
    is_held = (interval[:, 0] <= peak) & (peak < interval[:, 1]) & (amounts > 0)
    held = [HeldArray(usages.value[k], usages.is_copy[k], float(amounts[k])) for k in np.flatnonzero(is_held)]
    return MemoryUse(times, num_bytes, tuple(sorted(held, key=lambda array: -array.num_bytes)))
