"""Seconds of collectives and reshards on the axes of one mesh, as matrices over lists of specs."""

from collections.abc import Sequence

import numpy as np

from cost.collectives import COLLECTIVE_KINDS, collective_latency_s, collective_transfer_s
from cost.hardware import Hardware
from search_spaces.sharding.resharding import Move, Spec, moves


class Prices:
    """What moving arrays costs on a mesh. Reshard matrices are kept, as a model's layers ask for the same ones.

    Args:
      axis_names, axis_sizes: the mesh's.
      hardware: has a link for each axis of more than one device.
    """

    def __init__(self, axis_names: Sequence[str], axis_sizes: tuple[int, ...], hardware: Hardware):
        self.axis_names, self.axis_sizes = tuple(axis_names), axis_sizes
        self._latency, self._slope = {}, {}
        for axis, (name, n) in enumerate(zip(axis_names, axis_sizes, strict=True)):
            for kind in COLLECTIVE_KINDS:
                link = hardware.link(name) if n > 1 else None
                self._latency[kind, axis] = float(collective_latency_s(kind, n, link)) if link else 0.0
                self._slope[kind, axis] = float(collective_transfer_s(kind, 1.0, n, link)) if link else 0.0
        slow = sorted(range(len(axis_sizes)), key=lambda a: -self._slope["all_gather", a])
        self.slow_first = tuple(slow)
        self.dearest_s_per_byte = max(self._slope.values(), default=0.0)
        self._pairs: dict[tuple[Spec, Spec], tuple[float, float]] = {}
        self._grids: dict[tuple[tuple[Spec, ...], tuple[Spec, ...]], tuple[np.ndarray, np.ndarray]] = {}
        self._matrices: dict[tuple, np.ndarray] = {}

    def path(self, source: Spec, target: Spec) -> tuple[Move, ...]:
        """The steps of a reshard on this mesh."""
        return moves(source, target, self.axis_sizes, self.slow_first)

    def latency_and_slope(self, steps: Sequence[Move]) -> tuple[float, float]:
        """Seconds of some collectives, and seconds for each byte of the whole array."""
        latency = slope = 0.0
        for kind, axis, fraction, _ in steps:
            if kind != "slice":
                latency += self._latency[kind, axis]
                slope += self._slope[kind, axis] * fraction
        return latency, slope

    def move_s(self, move: Move, num_bytes: float, latency_share: float = 1.0) -> float:
        """Seconds of one step for an array of so many bytes as a whole."""
        latency, slope = self.latency_and_slope((move,))
        return latency * latency_share + slope * num_bytes

    def reshard_s(
        self,
        sources: tuple[Spec, ...],
        targets: tuple[Spec, ...],
        num_bytes: float,
        latency_share: float,
        weight: float,
    ) -> np.ndarray:
        """The transfer matrix `[sources, targets]`, seconds. Equal requests return the same array.

        Args:
          sources, targets: specs that the producer's and the consumer's strategies have.
          num_bytes: of the whole array.
          latency_share: the part of the latency that is this array's own, where collectives are combined.
          weight: how often a step moves the array.
        """
        key = (sources, targets, num_bytes, latency_share, weight)
        if key not in self._matrices:
            latency, slope = self._grid(sources, targets)
            matrix = weight * (latency * latency_share + slope * num_bytes)
            matrix.flags.writeable = False
            self._matrices[key] = matrix
        return self._matrices[key]

    def _grid(self, sources: tuple[Spec, ...], targets: tuple[Spec, ...]) -> tuple[np.ndarray, np.ndarray]:
        if (sources, targets) not in self._grids:
            rows, columns = {s: i for i, s in enumerate(dict.fromkeys(sources))}, dict.fromkeys(targets)
            columns = {t: j for j, t in enumerate(columns)}
            small = np.array([[self._pair(s, t) for t in columns] for s in rows]).reshape(len(rows), len(columns), 2)
            grid = small[np.ix_([rows[s] for s in sources], [columns[t] for t in targets])]
            self._grids[sources, targets] = np.ascontiguousarray(grid[..., 0]), np.ascontiguousarray(grid[..., 1])
        return self._grids[sources, targets]

    def _pair(self, source: Spec, target: Spec) -> tuple[float, float]:
        if (source, target) not in self._pairs:
            self._pairs[source, target] = self.latency_and_slope(self.path(source, target))
        return self._pairs[source, target]
