"""Which arrays of the state may wait in the host's memory between their updates, and when each is on the device.

An optimiser's moments are read and written once a step, and by nothing but their own update. So a device needs room for
the few that are updated at a time, and all others stream: an array is copied to the device when the one some places
before it has been updated, what replaces it is copied back, and the link works beside the arithmetic of the backward
pass. Barriers say so, because XLA would otherwise copy whenever it likes.

For that the updates must run in the backward pass. Optimisers are traced as one block behind it: first all moments of
one kind, then all of the next. `early_updates` puts an update where its gradient is ready, some products later so that
there is time to reduce it, and keeps together what one array needs. What waits for all gradients, as after clipping by
their norm, stays at the end, where the step waits for the copies.

Source: J. Ren et al., ZeRO-Offload (arXiv:2101.06840), for the state on the host; there the update runs there as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from cost.base import Hardware
from cost.compute import equation_dtype, equation_flops
from search_spaces.sharding.base import Layout, Node, ShardingStrategy
from search_spaces.sharding.graph import (
    Block,
    Graph,
    Region,
    Step,
    Value,
    Vertex,
    is_contraction,
    leads_to_contraction,
    operations_in,
    values_of,
)

AHEAD = 4
"""How many places before it an array must have been updated until it comes: two weights' worth of adam's moments.

Fewer would leave the link idle while a gradient is computed, more take memory.
"""
_PRODUCTS_LATER = 6
"""How many products on which others depend run between a gradient and its update: it is reduced in that time."""
_LEAST_SHARE = 1e-3
"""Of all bytes that could be on the host, an array has at least this part: what is smaller makes no room."""


class HostArray(NamedTuple):
    """An array of the state that may be in the host's memory.

    Attributes:
      vertex: the index of its input.
      value, result: ids of the argument, and of the result that replaces it in the next call.
      comes_with: the id of the value that is made when its copy to the device begins; None for the step's begin.
      after: the id of the result that has left the device by then; None for none.
      comes_at, gone_at: positions at which its copy begins, and by which its own result has left the device.
      is_overlapped: whether products run after its update, beside which it is copied.
    """

    vertex: int
    value: int
    result: int
    comes_with: int | None
    after: int | None
    comes_at: int
    gone_at: int
    is_overlapped: bool


class _Updated(NamedTuple):
    """An array with what replaces it, and the index of the first operation that reads it."""

    reader: int
    argument: Value
    result: Value


def host_arrays(graph: Graph) -> tuple[HostArray, ...]:
    """Returns the arrays of the state that may be on the host, in the order in which they are updated.

    An operation of the function's own steps replaces each, only such read it, and no product depends on it.
    """
    found = _updated(graph)
    if not found:
        return ()
    first, made_at = found[0].reader, [value.made_at for value in graph.values]
    start = _last_product_before(graph, first)
    last_product = max((v.index for v in graph.operations() if is_contraction(v)), default=-1)
    arrays = []
    for number, (reader, argument, result) in enumerate(found):
        earlier = found[number - AHEAD].result.id if number >= AHEAD else start
        after = found[number - 2 * AHEAD].result.id if number >= 2 * AHEAD else None
        comes_at = -1 if earlier is None else made_at[earlier]
        is_followed = number + AHEAD < len(found)
        gone_at = found[number + AHEAD].result.made_at if is_followed else graph.length
        ends = argument.vertex, argument.id, result.id
        arrays.append(HostArray(*ends, earlier, after, comes_at, gone_at, reader < last_product))
    return tuple(arrays)


def _updated(graph: Graph) -> list[_Updated]:
    own = {step.index for step in graph.block.steps if isinstance(step, Vertex)}
    ids = [output.id if isinstance(output, Value) else -1 for output in graph.outputs]
    consumers, leads, found = graph.consumers(), leads_to_contraction(graph), []
    for output, number in zip(graph.outputs, graph.feedback, strict=True):
        if number is None or not isinstance(output, Value) or graph.feedback.count(number) > 1:
            continue
        (argument,) = graph.inputs[number].results
        readers = [reader.index for reader, _ in consumers[argument.id]]
        is_number = bool(argument.shape) and jnp.issubdtype(argument.dtype, jnp.number)
        is_updated = output.vertex in own and ids.count(output.id) == 1 and argument.id not in ids
        if is_number and is_updated and readers and own.issuperset(readers) and not leads[argument.vertex]:
            found.append(_Updated(min(readers), argument, output))
    least_bytes = _LEAST_SHARE * sum(one.argument.num_bytes for one in found)
    return sorted((x for x in found if x.argument.num_bytes >= least_bytes), key=lambda x: (x.reader, x.argument.id))


def _last_product_before(graph: Graph, vertex: int) -> int | None:
    """Returns the id of the last array before an operation from which the backward pass goes on; None without one."""
    leads, consumers, found = leads_to_contraction(graph), graph.consumers(), None
    for step in graph.block.steps:
        if isinstance(step, Vertex) and step.index >= vertex:
            break
        if isinstance(step, Region) or leads[step.index]:
            read = [value.id for value in step.results if value.shape and consumers[value.id]]
            found = read[-1] if read else found
    return found


def with_host_strategies(nodes: Sequence[Node], arrays: Sequence[HostArray]) -> list[Node]:
    """Returns nodes of which those of arrays that may be on the host have their strategies again, for there.

    What is gathered as soon as it is on the device, for several readers, stays there.
    """
    result, made = list(nodes), {}
    for array in arrays:
        strategies = nodes[array.vertex].strategies
        if id(strategies) not in made:
            again = (s._replace(on_host=True) for s in strategies if s.results[0] == s.unreduced[0])
            made[id(strategies)] = (*strategies, *again)
        result[array.vertex] = nodes[array.vertex]._replace(strategies=made[id(strategies)])
    return result


def host_s_per_byte(
    graph: Graph, arrays: Sequence[HostArray], hardware: Hardware, num_devices: int
) -> dict[int, float]:
    """Returns the seconds that a step waits for each byte of a device's part on the host, by the input's index.

    An array is copied in and back. Copies beside products are waited for at the hardware's exposed share, unless
    products take less time than the link has for all of them: then for the share that is left if every such array is on
    the host, evenly split. Of fewer arrays this is too much, as a chord of a convex function is above it. What is
    updated after the last product is waited for in full.
    """
    if hardware.host_memory_bytes_per_s is None or not arrays:
        return {}
    copy_s_per_byte = 2 / hardware.host_memory_bytes_per_s
    overlapped = [array for array in arrays if array.is_overlapped]
    link_s = copy_s_per_byte * sum(graph.values[array.value].num_bytes for array in overlapped) / num_devices
    begins = min((array.comes_at for array in overlapped), default=0)
    products_s = sum(
        vertex.weight * equation_flops(vertex.equation) / hardware.reached_flops_per_s(equation_dtype(vertex.equation))
        for vertex in graph.operations()
        if is_contraction(vertex) and vertex.equation is not None and vertex.position >= begins
    )
    left = 1 - products_s / num_devices / link_s if link_s else 0.0
    share = max(hardware.exposed_share, left)
    return {array.vertex: copy_s_per_byte * (share if array.is_overlapped else 1.0) for array in arrays}


class HostCopies(NamedTuple):
    """The arrays of a layout that are on the host.

    Attributes:
      coming: those whose copy to the device begins when a value is made, by its id; under None those at the begin.
      of_argument, of_result: each by the ids of its argument and of its result.
    """

    coming: Mapping[int | None, Sequence[HostArray]]
    of_argument: Mapping[int, HostArray]
    of_result: Mapping[int, HostArray]


def host_copies(graph: Graph, strategies: Sequence[ShardingStrategy]) -> HostCopies:
    """Returns the arrays that the strategies of vertices leave on the host."""
    if not any(strategies[vertex.index].on_host for vertex in graph.inputs):
        return HostCopies({}, {}, {})
    arrays = [array for array in host_arrays(graph) if strategies[array.vertex].on_host]
    coming: dict[int | None, list[HostArray]] = {}
    for array in arrays:
        coming.setdefault(array.comes_with, []).append(array)
    return HostCopies(coming, {array.value: array for array in arrays}, {array.result: array for array in arrays})


def on_host(layout: Layout, arguments: Sequence[bool], graph: Graph) -> Layout:
    """Returns a layout whose flat arguments are on the host as they say."""
    places = {vertex.index: is_on_host for vertex, is_on_host in zip(graph.inputs, arguments, strict=True)}
    strategies = (s._replace(on_host=places.get(i, False)) for i, s in enumerate(layout.strategies))
    return layout._replace(strategies=tuple(strategies))


def early_updates(graph: Graph) -> Graph:
    """Returns a graph whose steps behind the last product run as soon as their operands are there, each with its own.

    Only the order of the function's own steps is changed, so the graph is to be traced again for positions.
    """
    steps = graph.block.steps
    leads = leads_to_contraction(graph)
    products = [[v.index for v in operations_in([step]) if is_contraction(v)] for step in steps]
    num_head = max((n + 1 for n, own in enumerate(products) if own), default=0)
    if not num_head:
        return graph
    head, rest = steps[:num_head], steps[num_head:]
    needed = np.cumsum([sum(bool(leads[i]) for i in own) for own in products[:num_head]])
    place = {value.id: i for i, step in enumerate(head) for value in step.results}
    maker = {value.id: n for n, step in enumerate(rest) for value in step.results}
    reads = [[v.id for v in values_of(step.operands)] for step in rest]
    ready: list[int] = []
    for ids in reads:
        ready.append(max((ready[maker[i]] if i in maker else place.get(i, -1) for i in ids), default=-1))

    def due(output: int) -> int:
        before = needed[ready[maker[output]]] if ready[maker[output]] >= 0 else 0
        return min(int(np.searchsorted(needed, before + _PRODUCTS_LATER)), len(head) - 1)

    outputs = [v.id for v in values_of(graph.outputs) if v.id in maker]
    behind: dict[int, list[Step]] = {}
    done: set[int] = set()
    for output in sorted(outputs, key=due):
        behind.setdefault(due(output), []).extend(rest[n] for n in _unmade(maker[output], reads, maker, done))
    ordered = [step for i, step in enumerate(head) for step in (step, *behind.get(i, ()))]
    ordered += [step for n, step in enumerate(rest) if n not in done]
    return replace(graph, block=Block(graph.block.inputs, ordered, graph.block.outputs))


def _unmade(root: int, reads: Sequence[Sequence[int]], maker: Mapping[int, int], done: set[int]) -> list[int]:
    """Returns a step with those it needs that are not done, each behind what it reads, and adds them to the done."""
    order, stack = [], [(root, False)]
    while stack:
        n, is_ready = stack.pop()
        if n in done:
            continue
        if is_ready:
            done.add(n)
            order.append(n)
            continue
        stack.append((n, True))
        stack += [(maker[i], False) for i in reversed(reads[n]) if i in maker]
    return order


def bytes_on(strategies: Sequence[ShardingStrategy], sizes: Sequence[float], *, is_host: bool) -> list[float]:
    """Returns the bytes of an array's strategies that are on the host, or else on the device."""
    return [size if s.on_host == is_host else 0.0 for s, size in zip(strategies, sizes, strict=True)]
