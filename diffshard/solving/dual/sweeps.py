"""The Lagrangian dual: every node and edge picks its cheapest entry by itself, which can only be cheaper than a choice.

Messages move cost between a node and its edges without changing what any choice costs, and prices add memory and loads
to the nodes; so the sum of all minima is a lower bound for any messages and prices. One iteration of sequential
tree-reweighted message passing raises it, with the nodes of one colour at a time: up the colours, then down. Everything
is NumPy: rows have different lengths, nothing is compiled, and on two cores it is as fast as a compiled sweep.

Source: Kolmogorov, "Convergent Tree-Reweighted Message Passing" (2006), section 3.4, figure 3.
"""

from typing import NamedTuple

import numpy as np

from diffshard.solving.flat import Flat, ragged_positions

# Sizes that sources are padded to, so that edges of about equal size are computed together; chosen by hand: more sizes
# make more calls, fewer waste more entries.
_PADDED_SIZES = np.array(
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768]
)
# Numbers in a temporary array (256 KiB) up to which it is made at once; larger ones would leave the cache and are added
# row by row. Measured on the contest's instances.
_MOST_CACHED_NUMBERS = 1 << 15


class _Group(NamedTuple):
    """n directed edges from one colour, whose sources have about equal size X; R rows (edge, target strategy)."""

    matrix: np.ndarray  # [X, R]
    node: np.ndarray  # [X, n] positions of the source's strategies in arrays of length N + 1
    opposite: np.ndarray  # [X, n] positions of the reverse message in arrays of length M + 1
    share: np.ndarray  # [n] of the source's cost
    edge: np.ndarray  # [R] which of the n
    first: np.ndarray  # [n] where each edge's rows start
    out: slice  # of the messages
    target: np.ndarray  # [R] positions of the target's strategies


class Sweep(NamedTuple):
    """What sweeps need of a problem, laid out once.

    Attributes:
      up: for each colour the groups of edges to later colours.
      down: for each colour the groups of edges to earlier colours.
      nodes: for each colour the positions of its strategies, and where each node starts among them.
      num_messages: M, the sum of the target sizes of all directed edges.
      num_strategies: N.
      edge_at: `[J]` where each directed edge's messages start.
    """

    up: list[list[_Group]]
    down: list[list[_Group]]
    nodes: list[tuple[np.ndarray, np.ndarray]]
    num_messages: int
    num_strategies: int
    edge_at: np.ndarray


def colours(flat: Flat) -> np.ndarray:
    """Returns `[V]` colours, no edge between equal ones: greedily, nodes of many neighbours first."""
    colour = np.full(len(flat.sizes), -1)
    degree = np.diff(flat.first)
    for v in np.argsort(-degree, kind="stable"):
        neighbour_colours = set(colour[flat.target[flat.first[v] : flat.first[v + 1]]].tolist())
        colour[v] = next(c for c in range(len(neighbour_colours) + 1) if c not in neighbour_colours)
    return colour


def lay_out(flat: Flat, dtype: type = np.float32) -> Sweep:
    """Groups the edges by colour, direction and size of the source."""
    colour = colours(flat)
    num_colours = int(colour.max(initial=0)) + 1
    rising = colour[flat.source] < colour[flat.target]
    later = np.bincount(flat.source, rising, len(flat.sizes))
    earlier = np.bincount(flat.source, ~rising, len(flat.sizes))
    share = 1.0 / np.maximum(np.maximum(later, earlier), 1)
    width = _PADDED_SIZES[np.minimum(np.searchsorted(_PADDED_SIZES, flat.sizes), len(_PADDED_SIZES) - 1)]
    width = np.maximum(width, flat.sizes)
    key = np.lexsort((flat.source, width[flat.source], colour[flat.source], ~rising))
    edge_at = np.empty(len(key), np.int64)
    lengths = flat.sizes[flat.target[key]]
    edge_at[key] = np.cumsum(lengths) - lengths
    up: list[list[_Group]] = [[] for _ in range(num_colours)]
    down: list[list[_Group]] = [[] for _ in range(num_colours)]
    total = int(lengths.sum())
    forms = np.stack([~rising[key], colour[flat.source[key]], width[flat.source[key]]])
    cuts = np.flatnonzero((np.diff(forms, axis=1) != 0).any(axis=0)) + 1
    for edges in np.split(key, cuts) if len(key) else []:
        group = _group(flat, edges, edge_at, share, int(width[flat.source[edges[0]]]), total, dtype)
        (up if rising[edges[0]] else down)[colour[flat.source[edges[0]]]].append(group)
    nodes = []
    for c in range(num_colours):
        members = np.flatnonzero(colour == c)
        starts = np.cumsum(flat.sizes[members]) - flat.sizes[members]
        nodes.append((ragged_positions(flat.start[members], flat.sizes[members]), starts))
    return Sweep(up, down, nodes, total, int(flat.start[-1]), edge_at)


def _group(
    flat: Flat, edges: np.ndarray, edge_at: np.ndarray, share: np.ndarray, width: int, total: int, dtype: type
) -> _Group:
    source, target = flat.source[edges], flat.target[edges]
    rows = flat.sizes[target]
    edge = np.repeat(np.arange(len(edges)), rows)
    column = ragged_positions(np.zeros(len(edges), np.int64), rows)
    x = np.arange(width)[:, None]
    inside = x < flat.sizes[source]
    node = np.where(inside, flat.start[source] + x, flat.start[-1])
    opposite = np.where(inside, edge_at[flat.reverse[edges]] + x, total)
    at = flat.matrix[edges][edge] + x * rows[edge] + column
    matrix = flat.entries[np.where(inside[:, edge], at, 0)].astype(dtype)
    first = np.cumsum(rows) - rows
    begin = int(edge_at[edges[0]])
    return _Group(
        matrix=matrix,
        node=node,
        opposite=opposite,
        share=share[source].astype(dtype),
        edge=edge,
        first=first,
        out=slice(begin, begin + len(edge)),
        target=flat.start[target][edge] + column,
    )


def sweep(layout: Sweep, cost: np.ndarray, messages: np.ndarray) -> tuple[float, np.ndarray]:
    """Makes one iteration, up and down, and changes the messages in place.

    Args:
      layout: of the problem.
      cost: `[N]` node costs with prices.
      messages: `[M + 1]`, the last a zero that pads; overwritten.

    Returns:
      The bound of these costs, and the costs with all messages absorbed `[N]`: small entries are good strategies.
    """
    ceiling = np.finfo(cost.dtype).max / 1e6
    total = np.append(cost, ceiling).astype(cost.dtype)
    for group_list in (layout.up, layout.down):
        for groups in group_list:
            for group in groups:
                np.add.at(total, group.target, messages[group.out])
    for groups in layout.up:  # constants taken from these messages come back on the way down
        for group in groups:
            _send(group, total, messages)
    bound = 0.0
    for groups, (members, starts) in zip(reversed(layout.down), reversed(layout.nodes), strict=True):
        bound += _normalise(total, members, starts)
        for group in groups:
            bound += _send(group, total, messages)
    return bound, total[:-1]


def _normalise(total: np.ndarray, members: np.ndarray, starts: np.ndarray) -> float:
    if not len(members):
        return 0.0
    rows = total[members]
    least = np.minimum.reduceat(rows, starts)
    total[members] = rows - np.repeat(least, np.diff(np.append(starts, len(members))))
    return float(least.sum(dtype=np.float64))


def _send(group: _Group, total: np.ndarray, messages: np.ndarray) -> float:
    """Sends new messages along a group's edges; returns the sum of the minima subtracted from them."""
    at_source = total[group.node] * group.share - messages[group.opposite]
    if group.matrix.size < _MOST_CACHED_NUMBERS:
        out = (group.matrix + at_source[:, group.edge]).min(axis=0)
    else:
        out = group.matrix[0] + at_source[0][group.edge]
        scratch = np.empty_like(out)
        for row, at in zip(group.matrix[1:], at_source[1:], strict=True):
            np.add(row, at[group.edge], out=scratch)
            np.minimum(out, scratch, out=out)
    least = np.minimum.reduceat(out, group.first)
    out -= least[group.edge]
    np.add.at(total, group.target, out - messages[group.out])
    messages[group.out] = out
    return float(least.sum(dtype=np.float64))
