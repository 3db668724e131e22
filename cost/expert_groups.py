"""What a step of a mixture of experts costs on groups of workers that hold all experts each.

A group of workers shares all experts: each worker holds some, and tokens travel between the workers of the group
(expert parallelism). Groups are copies of each other (data parallelism) and all-reduce their gradients. A group g of
all groups G takes, in seconds,

    T(g) = γ·[ Σ_x f_x / Σ_{j∈g} F_j + max_{i∈g} Σ_{j∈g, j≠i} η·(α_ij + (d/|g|)·β_ij) ] + 2(|G|-1)·(α* + (d_ar/|G|)·β*)
    γ    = (2 + r)·(L/i)·B/(W·b)

`group_s` is the first summand, `all_reduce_s` the second; α*, β* are those of the link between two groups that takes
longest. A step takes as long as its slowest group. A group whose workers have too little room for all experts cannot
run: T(g) = ∞.

Letters for sizes: W workers, X experts, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Group = tuple[int, ...]
"""The workers of one group, in increasing order."""


@dataclass(frozen=True, eq=False)
class ExpertWorkers:
    """Workers that hold experts, and the links between them.

    Attributes:
      flops_per_s: F, the speed of each worker, `[W]`.
      capacity: m, the experts that each worker has room for, `[W]` integers.
      latency_s: α `[W, W]`, from one worker (row) to another (column); the diagonal is not read.
      s_per_byte: β `[W, W]`, as `latency_s`.
    """

    flops_per_s: np.ndarray
    capacity: np.ndarray
    latency_s: np.ndarray
    s_per_byte: np.ndarray

    @property
    def num_workers(self) -> int:
        """The number of workers, W."""
        return len(self.flops_per_s)


@dataclass(frozen=True)
class ExpertStep:
    """The arithmetic and traffic of a training step of a mixture of experts.

    Attributes:
      expert_flops: f, of each expert for one mini-batch of one layer, `[X]`.
      exchange_bytes: d, the buffer that a worker exchanges with its group.
      num_exchanges: η, exchanges of this buffer in one layer and pass.
      all_reduce_bytes: d_ar, the gradients that the groups reduce once in a step.
      num_layers: L, layers of the model.
      layer_spacing: i, every i-th layer has experts.
      recomputation: r, forward passes that the backward pass makes again: 0 or 1.
      global_batch: B, examples in a step.
      mini_batch: b, examples that one worker computes at once.
    """

    expert_flops: tuple[float, ...]
    exchange_bytes: float
    num_exchanges: float
    all_reduce_bytes: float
    num_layers: int
    layer_spacing: int
    recomputation: float
    global_batch: int
    mini_batch: int

    @property
    def num_experts(self) -> int:
        """The number of experts, X."""
        return len(self.expert_flops)

    def passes(self, num_workers: int) -> float:
        """Returns γ: how often a step passes a layer of experts; both directions count, and every mini-batch."""
        num_expert_layers = self.num_layers / self.layer_spacing
        return (2 + self.recomputation) * num_expert_layers * self.global_batch / (num_workers * self.mini_batch)


def group_s(workers: ExpertWorkers, step: ExpertStep, group: Sequence[int]) -> float:
    """Returns the seconds of one group without the all-reduce; infinite if it has no room for all experts."""
    return float(computing_s(workers, step, group) + exchanging_s(workers, step, group))


def computing_s(workers: ExpertWorkers, step: ExpertStep, groups: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the seconds in which groups compute all experts; infinite where one has no room for them.

    Args:
      workers: W workers.
      step: what a step computes.
      groups: the workers of a group of n, or of many such groups, `[..., n]`; the result is `[...]`.
    """
    members = np.asarray(groups)
    work_s = sum(step.expert_flops) / workers.flops_per_s[members].sum(axis=-1)
    has_room = workers.capacity[members].sum(axis=-1) >= step.num_experts
    return np.where(has_room, step.passes(workers.num_workers) * work_s, np.inf)


def exchanging_s(workers: ExpertWorkers, step: ExpertStep, groups: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the seconds in which a group's slowest worker exchanges its buffers with all others.

    Args:
      workers: W workers and their links.
      step: what a step sends.
      groups: as for `computing_s`.
    """
    members = np.asarray(groups)
    size = members.shape[-1]
    inside = members[..., :, None], members[..., None, :]
    link_s = workers.latency_s[inside] + step.exchange_bytes / size * workers.s_per_byte[inside]
    link_s[..., range(size), range(size)] = 0.0
    return step.passes(workers.num_workers) * step.num_exchanges * link_s.sum(axis=-1).max(axis=-1)


def all_reduce_s(workers: ExpertWorkers, step: ExpertStep, groups: Sequence[Sequence[int]]) -> float:
    """Returns the seconds of the gradients' all-reduce over the slowest link between two groups."""
    owner = np.empty(workers.num_workers, np.int64)
    for index, group in enumerate(groups):
        owner[list(group)] = index
    link_s = all_reduce_link_s(workers, step, len(groups))
    return float(link_s[owner[:, None] != owner[None, :]].max(initial=0.0))


def all_reduce_link_s(workers: ExpertWorkers, step: ExpertStep, num_groups: int) -> np.ndarray:
    """Returns `[W, W]`, the seconds of the all-reduce if a link is the slowest between groups."""
    one_way = workers.latency_s + step.all_reduce_bytes / num_groups * workers.s_per_byte
    return 2 * (num_groups - 1) * one_way


def step_s(workers: ExpertWorkers, step: ExpertStep, groups: Sequence[Sequence[int]]) -> float:
    """Returns the seconds of a step: those of its slowest group."""
    return max(group_s(workers, step, group) for group in groups) + all_reduce_s(workers, step, groups)
