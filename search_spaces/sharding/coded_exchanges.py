"""Exchanges of activations as codes: tokens go to experts and back in a half or a quarter of the bytes.

An all-to-all or a permute moves numbers as they are. So a device can encode its block, send the codes with their
scales as one array of bytes, and decode what it gets. Scales are those of rows, in blocks of 128 numbers of the last
dimension. A reshard that splits rows further or joins them sends no codes; so a value has the same numbers however it
is exchanged, unless its rows are split. A value is exchanged once, for all that read it: on its way to its shared
reshard, or to its only reader.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from search_spaces.communication.collectives import decode, encode, encoded_bytes
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.codes import CODES
from search_spaces.sharding.graph import Graph, Value, Vertex, follows_contraction, is_contraction, leads_to_contraction
from search_spaces.sharding.local_blocks import Blocks
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import divides, parts_of

_KINDS = ("all_to_all", "collective_permute")
_MOVES = ("gather", "scatter", "scatter-add")
"""Operations besides contractions that bring tokens to experts and back, or look them up."""


def exchangeable(graph: Graph) -> list[Vertex]:
    """Returns the operations whose result may be exchanged as codes, in program order.

    These are activations and their gradients at the ends of contractions, gathers and scatters: what lies between can
    as well be exchanged there. Results of the function stay as they are.
    """
    follows, leads, consumers = follows_contraction(graph), leads_to_contraction(graph), graph.consumers()
    outputs = {output.id for output in graph.outputs if isinstance(output, Value)}
    found = []
    for vertex in graph.operations():
        if len(vertex.results) == 1 and leads[vertex.index]:
            (value,) = vertex.results
            is_read = follows[vertex.index] and any(is_contraction(reader) for reader, _ in consumers[value.id])
            is_end = is_read or is_contraction(vertex) or vertex.primitive in _MOVES
            if is_end and len(value.shape) > 1 and 0 not in value.shape and value.id not in outputs:
                found.append(vertex)
    return found


def is_exchange(path: Paths, value: Value, source: IndexedSpec, target: IndexedSpec) -> bool:
    """Returns whether a reshard of a value can send codes: it exchanges even blocks, whose rows it leaves as they are.

    Where some of its steps gather, they gather codes as well.
    """
    key = "exchange", value.shape, source, target
    if key not in path.messages:
        sizes = path.axis_sizes
        parts = [parts_of(spec, sizes)[-1] for spec in (source, target)]
        is_even = parts[0] == parts[1] and all(divides(spec, value.shape, sizes) for spec in (source, target))
        path.messages[key] = is_even and any(
            step.kind in _KINDS and sizes[step.axis] > 1 for step in path(source, target)
        )
    return path.messages[key]


def exchange_bytes(value: Value, name: str) -> float:
    """Returns the bytes of a whole value as codes with the scales of whole rows."""
    return float(prod(value.shape[:-1]) * encoded_bytes(CODES[name], value.shape[-1]))


def exchanged_specs(graph: Graph, layout: Layout, vertex: Vertex) -> tuple[IndexedSpec, IndexedSpec] | None:
    """Returns the specs between which a layout would exchange the only result of an operation; None if it would not.

    A product in a format rounds what it reads to that format instead.
    """
    (value,) = vertex.results
    made, kept = layout.strategies[vertex.index].results[0], layout.value_specs[value.id]
    if made != kept:
        return made, kept
    readers = graph.consumers()[value.id]
    strategies = [(layout.strategies[reader.index], position) for reader, position in readers]
    if len(strategies) != 1 or strategies[0][0].format:
        return None
    return made, strategies[0][0].operands[strategies[0][1]]


def with_used_exchanges(path: Paths, graph: Graph, layout: Layout) -> Layout:
    """Returns the layout without the formats of what it does not exchange."""
    strategies = list(layout.strategies)
    for i, strategy in enumerate(strategies):
        if strategy.exchanged_in:
            specs = exchanged_specs(graph, layout, graph.vertices[i])
            if specs is None or not is_exchange(path, graph.vertices[i].results[0], *specs):
                strategies[i] = strategy._replace(exchanged_in="")
    return layout._replace(strategies=tuple(strategies))


def run_exchange(
    blocks: Blocks, block: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], name: str
) -> Any:
    """Returns the block of a value after some steps, which move codes of it."""
    precision, row = CODES[name], block.shape[-1]
    codes = encode(block, precision)
    of_row = codes.shape[block.ndim - 1 :]
    num_bytes = prod(of_row) * parts_of(source, blocks.axis_sizes)[-1]
    packed = codes.reshape(*block.shape[:-1], prod(of_row))
    moved = blocks.reshard(packed, (*value.shape[:-1], num_bytes), source, steps)
    return decode(moved.reshape(*moved.shape[:-1], *of_row), precision, row).astype(block.dtype)
