"""The Lagrangian dual: every node and edge picks its cheapest entry by itself, which can only be cheaper than a choice.

Messages move cost between a node and its edges without changing what any choice costs, and prices add memory and loads
to the nodes; so the sum of all minima is a lower bound for any messages and prices. One iteration of sequential
tree-reweighted message passing raises it, with the nodes of one colour at a time: up the colours, then down. Everything
is NumPy: rows have different lengths, nothing is compiled, and on two cores it is as fast as a compiled sweep.

Source: Kolmogorov, "Convergent Tree-Reweighted Message Passing" (2006), section 3.4, figure 3.
"""

from typing import NamedTuple

import numpy as np

from diffshard.solving.csr import CSRProblem, ragged_positions

# Sizes that sources are padded to, so that edges of about equal size are computed together; chosen by hand: more sizes
# make more calls, fewer waste more entries.
_PADDED_SIZES = np.array(
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768]
)
# Numbers in a temporary array (256 KiB) up to which it is made at once; larger ones would leave the cache and are added
# row by row. Measured on the contest's instances.
_MOST_CACHED_NUMBERS = 1 << 15
# Rows (edge, target strategy) from which on edges of one matrix form a group: fewer are not worth its calls.
_LEAST_EQUAL_ROWS = 2048


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

    def at_source(self, total: np.ndarray, messages: np.ndarray) -> np.ndarray:
        """Returns `[X, n]` the part of the source's cost that each edge is given, without its own message."""
        return total[self.node] * self.share - messages[self.opposite]

    def least_through(self, at_source: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns `[R]` the least over the sources' strategies, above each edge's own least, and their sum."""
        if self.matrix.size < _MOST_CACHED_NUMBERS:
            out = (self.matrix + at_source[:, self.edge]).min(axis=0)
        else:
            out = self.matrix[0] + at_source[0][self.edge]
            scratch = np.empty_like(out)
            for row, at in zip(self.matrix[1:], at_source[1:], strict=True):
                np.add(row, at[self.edge], out=scratch)
                np.minimum(out, scratch, out=out)
        least = np.minimum.reduceat(out, self.first)
        out -= least[self.edge]
        return out, float(least.sum(dtype=np.float64))


class _EqualGroup(NamedTuple):
    """n directed edges from one colour that share one matrix, so that it is stored once; R = n Y rows."""

    matrix: np.ndarray  # [X, Y]
    node: np.ndarray  # [n] where the source's strategies start
    opposite: np.ndarray  # [n] where the reverse message starts
    share: np.ndarray  # [n] of the source's cost
    out: slice  # of the messages
    target_start: np.ndarray  # [n] where the target's strategies start

    def at_source(self, total: np.ndarray, messages: np.ndarray) -> np.ndarray:
        """Returns `[n, X]` the part of the source's cost that each edge is given, without its own message."""
        x = np.arange(len(self.matrix))
        return total[self.node[:, None] + x] * self.share[:, None] - messages[self.opposite[:, None] + x]

    def least_through(self, at_source: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns `[R]` the least over the sources' strategies, above each edge's own least, and their sum."""
        matrix = self.matrix.astype(at_source.dtype)
        out = np.empty((len(at_source), matrix.shape[1]), at_source.dtype)
        step = max(_MOST_CACHED_NUMBERS // matrix.shape[1], 1)
        scratch = np.empty_like(out[:step])
        for begin in range(0, len(out), step):
            part, here = at_source[begin : begin + step], out[begin : begin + step]
            np.add(part[:, :1], matrix[0], out=here)
            for x in range(1, len(matrix)):
                np.minimum(here, np.add(part[:, x : x + 1], matrix[x], out=scratch[: len(here)]), out=here)
        least = out.min(axis=1)
        out -= least[:, None]
        return out.ravel(), float(least.sum(dtype=np.float64))

    @property
    def target(self) -> np.ndarray:
        """`[R]` positions of the targets' strategies."""
        return (self.target_start[:, None] + np.arange(self.matrix.shape[1])).ravel()


class Sweep(NamedTuple):
    """A problem's edges and nodes by colour, laid out once for all sweeps.

    Attributes:
      up: for each colour the groups of edges to later colours.
      down: for each colour the groups of edges to earlier colours.
      nodes: for each colour the positions of its strategies, and where each node starts among them.
      num_messages: M, the sum of the target sizes of all directed edges.
    """

    up: list[list[_Group | _EqualGroup]]
    down: list[list[_Group | _EqualGroup]]
    nodes: list[tuple[np.ndarray, np.ndarray]]
    num_messages: int


def colours(csr: CSRProblem) -> np.ndarray:
    """Returns `[V]` colours, no edge between equal ones: greedily, nodes of many neighbours first."""
    colour = np.full(len(csr.sizes), -1)
    degree = np.diff(csr.first)
    for v in np.argsort(-degree, kind="stable"):
        neighbour_colours = set(colour[csr.target[csr.first[v] : csr.first[v + 1]]].tolist())
        colour[v] = next(c for c in range(len(neighbour_colours) + 1) if c not in neighbour_colours)
    return colour


def lay_out(csr: CSRProblem, dtype: type = np.float32) -> Sweep:
    """Groups the edges by colour, direction and size of the source."""
    colour = colours(csr)
    num_colours = int(colour.max(initial=0)) + 1
    rising = colour[csr.source] < colour[csr.target]
    later = np.bincount(csr.source, rising, len(csr.sizes))
    earlier = np.bincount(csr.source, ~rising, len(csr.sizes))
    share = 1.0 / np.maximum(np.maximum(later, earlier), 1)
    width = _PADDED_SIZES[np.minimum(np.searchsorted(_PADDED_SIZES, csr.sizes), len(_PADDED_SIZES) - 1)]
    width = np.maximum(width, csr.sizes)
    shared = _shared_matrices(csr, colour, rising)
    key = np.lexsort((csr.source, shared, width[csr.source], colour[csr.source], ~rising))
    edge_at = np.empty(len(key), np.int64)
    lengths = csr.sizes[csr.target[key]]
    edge_at[key] = np.cumsum(lengths) - lengths
    up: list[list[_Group | _EqualGroup]] = [[] for _ in range(num_colours)]
    down: list[list[_Group | _EqualGroup]] = [[] for _ in range(num_colours)]
    total = int(lengths.sum())
    forms = np.stack([~rising[key], colour[csr.source[key]], width[csr.source[key]], shared[key]])
    cuts = np.flatnonzero((np.diff(forms, axis=1) != 0).any(axis=0)) + 1
    for edges in np.split(key, cuts) if len(key) else []:
        if shared[edges[0]] >= 0:
            group = _equal_group(csr, edges, edge_at, share, dtype)
        else:
            group = _group(csr, edges, edge_at, share, int(width[csr.source[edges[0]]]), total, dtype)
        (up if rising[edges[0]] else down)[colour[csr.source[edges[0]]]].append(group)
    nodes = []
    for c in range(num_colours):
        members = np.flatnonzero(colour == c)
        starts = np.cumsum(csr.sizes[members]) - csr.sizes[members]
        nodes.append((ragged_positions(csr.start[members], csr.sizes[members]), starts))
    return Sweep(up, down, nodes, total)


def _shared_matrices(csr: CSRProblem, colour: np.ndarray, rising: np.ndarray) -> np.ndarray:
    """Returns `[J]` numbers of the matrices of directed edges where enough edges of one colour share it, else -1."""
    colours_seen = int(colour.max(initial=0)) + 1
    form = (csr.matrix * colours_seen + colour[csr.source]) * 2 + rising
    _, number, count = np.unique(form, return_inverse=True, return_counts=True)
    is_shared = count[number] * csr.sizes[csr.target] >= _LEAST_EQUAL_ROWS
    return np.where(is_shared, number, -1)


def _equal_group(
    csr: CSRProblem, edges: np.ndarray, edge_at: np.ndarray, share: np.ndarray, dtype: type
) -> _EqualGroup:
    source, target = csr.source[edges], csr.target[edges]
    rows, columns = int(csr.sizes[source[0]]), int(csr.sizes[target[0]])
    first, begin = int(csr.matrix[edges[0]]), int(edge_at[edges[0]])
    return _EqualGroup(
        matrix=csr.entries[first : first + rows * columns].reshape(rows, columns),
        node=csr.start[source],
        opposite=edge_at[csr.reverse[edges]],
        share=share[source].astype(dtype),
        out=slice(begin, begin + len(edges) * columns),
        target_start=csr.start[target],
    )


def _group(
    csr: CSRProblem, edges: np.ndarray, edge_at: np.ndarray, share: np.ndarray, width: int, total: int, dtype: type
) -> _Group:
    source, target = csr.source[edges], csr.target[edges]
    rows = csr.sizes[target]
    edge = np.repeat(np.arange(len(edges)), rows)
    column = ragged_positions(np.zeros(len(edges), np.int64), rows)
    x = np.arange(width)[:, None]
    inside = x < csr.sizes[source]
    node = np.where(inside, csr.start[source] + x, csr.start[-1])
    opposite = np.where(inside, edge_at[csr.reverse[edges]] + x, total)
    at = csr.matrix[edges][edge] + x * rows[edge] + column
    matrix = csr.entries[np.where(inside[:, edge], at, 0)].astype(dtype)
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
        target=csr.start[target][edge] + column,
    )


def sweep(layout: Sweep, cost: np.ndarray, messages: np.ndarray) -> tuple[float, np.ndarray]:
    """Makes one iteration, up and down, and changes the messages in place.

    Args:
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


def _send(group: _Group | _EqualGroup, total: np.ndarray, messages: np.ndarray) -> float:
    """Sends new messages along a group's edges; returns the sum of the minima subtracted from them."""
    out, least = group.least_through(group.at_source(total, messages))
    np.add.at(total, group.target, out - messages[group.out])
    messages[group.out] = out
    return least
