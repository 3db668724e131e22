"""Which worker of a group holds which expert, so that the worker that computes longest ends early.

Each expert is a node and each worker a strategy. What a worker computes is a load, J = max_j Σ_{x on j} f_x / F_j, and
its room for experts is a memory limit: an expert uses 1 of it.

Letters for sizes: X experts, W workers.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from cost.evaluation import checked_choice
from search_spaces.base import Part


class DecodedAssignment(NamedTuple):
    """Which worker holds each expert.

    Attributes:
      worker: of each expert, `[X]`.
      busy_s: what each worker computes, `[W]`.
    """

    worker: np.ndarray
    busy_s: np.ndarray


class ExpertAssignmentSpace:
    """All assignments of experts to the workers of a group.

    >>> ExpertAssignmentSpace([6.0, 2.0], [2.0, 1.0], [1, 1]).decode([0, 1]).busy_s
    array([3., 2.])

    Args:
      expert_flops: f, of each expert, `[X]`.
      flops_per_s: F, the speed of each worker, `[W]`.
      capacity: experts that each worker has room for, `[W]`.

    Raises:
      ValueError: there are no experts or no workers, or sizes do not fit.
    """

    def __init__(self, expert_flops: Sequence[float], flops_per_s: Sequence[float], capacity: Sequence[int]):
        self.expert_flops = np.asarray(expert_flops, float)
        self.flops_per_s, self.capacity = np.asarray(flops_per_s, float), np.asarray(capacity)
        if self.expert_flops.ndim != 1 or not len(self.expert_flops):
            raise ValueError(f"`expert_flops` must be `[X]` with X > 0, got shape {self.expert_flops.shape}.")
        if self.flops_per_s.ndim != 1 or not len(self.flops_per_s):
            raise ValueError(f"`flops_per_s` must be `[W]` with W > 0, got shape {self.flops_per_s.shape}.")
        if self.capacity.shape != self.flops_per_s.shape:
            raise ValueError(
                f"`capacity` must have a number for each of {len(self.flops_per_s)} workers, got shape "
                f"{self.capacity.shape}."
            )
        self.node_names = tuple(f"expert {expert}" for expert in range(len(self.expert_flops)))

    @cached_property
    def expert_s(self) -> np.ndarray:
        """The seconds of each expert on each worker, `[X, W]`."""
        return self.expert_flops[:, None] / self.flops_per_s

    @cached_property
    def problem(self) -> Problem:
        """A node for each expert; a load and a memory limit for each worker."""
        num_experts, num_workers = self.expert_s.shape
        return Problem(
            node_cost=[np.zeros(num_workers)] * num_experts,
            edge_nodes=np.zeros((0, 2), np.int64),
            edge_cost=[],
            usage_node=np.arange(num_experts),
            usage=[np.eye(num_workers)] * num_experts,
            usage_interval=np.tile([0, 1], (num_experts, 1)),
            memory_limit=self.capacity.astype(float),
            load=[np.diag(row) for row in self.expert_s],
        )

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the names of the workers, `[W]`; the same for every expert."""
        del node
        return tuple(f"worker {worker}" for worker in range(len(self.flops_per_s)))

    def decode(self, choice: Sequence[int]) -> DecodedAssignment:
        """Returns which worker holds each expert.

        Raises:
          ValueError: the choice has the wrong length or a worker that there is not.
        """
        worker = checked_choice(self.problem, choice)
        own_s = self.expert_s[np.arange(len(worker)), worker]
        return DecodedAssignment(worker, np.bincount(worker, own_s, len(self.flops_per_s)))

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns the experts of the worker that computes longest, with the seconds of each.

        Raises:
          ValueError: as `decode`.
        """
        worker, busy_s = self.decode(choice)
        busiest = int(busy_s.argmax())
        return tuple(
            Part(self.node_names[x], "compute", int(x), float(self.expert_s[x, busiest]))
            for x in np.flatnonzero(worker == busiest)
        )


EXAMPLE = partial(ExpertAssignmentSpace, (3, 3, 3, 2, 2, 3, 2, 3), (42, 56, 68, 22), (1, 5, 1, 3))
