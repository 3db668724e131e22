"""Which values to keep and which steps to run again: for a price of memory the cheapest choice is a minimum cut.

For each value v of the forward pass N_v says whether the backward pass needs it, and for each step e of the forward
pass R_e whether it runs again. With a price of λ seconds for each byte, the cost of a choice is

    Σ_e c_e·R_e + λ·Σ_v b_v·N_v·(1 - R_step(v))

with N_v = 1 for what the backward pass reads, and R_e ≤ N_u for all u that e reads: running a step again takes c_e
seconds, and a value that is needed but not made again is kept, which takes b_v bytes. All terms are submodular, so that
the minimum is that of a cut. Over all prices the minima are the lower convex hull of seconds against bytes, found by
trying the price at which two neighbours cost the same.

Source: J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems" (1976), for the network;
M. J. Eisner and D. G. Severance, "Mathematical techniques for efficient record segmentation in large shared databases"
(1976), for the prices.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

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
        """Returns what a choice costs; steps whose results the backward pass does not need are left out."""
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
