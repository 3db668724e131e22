"""Which workers form the expert-parallel groups of a mixture of experts, for one number of groups.

The cost of a group depends on all of its members, which no sum over pairs of workers expresses. So a strategy is a
whole group: each worker is a node, and its strategies are the candidate groups that it is in. Edges make the members of
a chosen group agree: for each candidate, two members that follow each other in it choose it both or neither, so that
either all of its members are in it or none. The rest of the formula in `cost/expert_groups.py` is

- a load for each worker that is the first of a group: the group's time, so that the cost takes the slowest group;
- an amount of 1 for each worker that is the first of a group, limited by the number of groups, and one for each other
  worker, so that there are not fewer groups either;
- a constant for the all-reduce, over the slowest link of the whole cluster. It is the slowest link between groups in
  every division that cuts that link; where it lies inside a group, `decode` says the exact, smaller time.

Letters for sizes: W workers, C candidates, S_w candidates with worker w.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from cost.evaluation import checked_choice, chosen_costs
from cost.expert_groups import (
    ExpertStep,
    ExpertWorkers,
    Group,
    all_reduce_link_s,
    group_s,
    step_s,
)
from search_spaces.base import Part


class DecodedGroups(NamedTuple):
    """A division of workers into groups.

    Attributes:
      chosen: the group that each worker chooses, `[W]`.
      groups: the different ones of these, by their first workers; they divide the workers if the choice is feasible.
      step_s: of the slowest group, all-reduce included; infinite if the groups do not divide the workers.
    """

    chosen: tuple[Group, ...]
    groups: tuple[Group, ...]
    step_s: float


class ExpertGroupSpace:
    """All divisions of workers into a number of candidate groups.

    Args:
      workers: W workers and their links.
      step: what a training step computes and sends.
      num_groups: how many groups there are.
      candidates: groups of workers, in any order; groups without room for all experts are left out.

    Raises:
      ValueError: a worker is in no candidate that has room for all experts.
    """

    def __init__(self, workers: ExpertWorkers, step: ExpertStep, num_groups: int, candidates: Iterable[Sequence[int]]):
        self.workers, self.step, self.num_groups = workers, step, num_groups
        groups = sorted({tuple(sorted(map(int, group))) for group in candidates})
        times = [group_s(workers, step, group) for group in groups]
        self.candidates = tuple(group for group, own_s in zip(groups, times, strict=True) if np.isfinite(own_s))
        self.candidate_s = np.array([own_s for own_s in times if np.isfinite(own_s)])
        own: list[list[int]] = [[] for _ in range(workers.num_workers)]
        for index, group in enumerate(self.candidates):
            for worker in group:
                own[worker].append(index)
        self.own_candidates = tuple(tuple(indices) for indices in own)
        for worker, indices in enumerate(own):
            if not indices:
                raise ValueError(f"`candidates` has no group with worker {worker} and room for all experts.")
        self.node_names = tuple(f"worker {worker}" for worker in range(workers.num_workers))

    @cached_property
    def problem(self) -> Problem:
        """A node for each worker, an edge between neighbours in a candidate, a load for each first worker."""
        edge_nodes = sorted({pair for group in self.candidates for pair in pairwise(group)})
        leaders = sorted({group[0] for group in self.candidates})
        num_workers = self.workers.num_workers
        leads = [np.array([self.candidates[c][0] == w for c in own]) for w, own in enumerate(self.own_candidates)]
        node_cost = [np.zeros(len(own)) for own in self.own_candidates]
        if self.num_groups > 1:
            link_s = all_reduce_link_s(self.workers, self.step, self.num_groups)
            node_cost[0] = node_cost[0] + link_s[~np.eye(num_workers, dtype=bool)].max()
        return Problem(
            node_cost=node_cost,
            edge_nodes=np.array(edge_nodes, np.int64).reshape(-1, 2),
            edge_cost=[self._agreement(*pair) for pair in edge_nodes],
            load=[self._loads(w, leads[w], leaders) for w in range(num_workers)],
            amount=[np.stack([lead, ~lead], axis=1).astype(float) for lead in leads],
            amount_limit=np.array([self.num_groups, num_workers - self.num_groups], float),
        )

    def _loads(self, worker: int, leads: np.ndarray, leaders: list[int]) -> np.ndarray:
        """Returns `[S_w, D]`, the seconds of the groups that a worker is the first of."""
        own_s = np.where(leads, self.candidate_s[list(self.own_candidates[worker])], 0.0)
        return np.where(np.array(leaders) == worker, own_s[:, None], 0.0)

    def _agreement(self, first: int, second: int) -> np.ndarray:
        """Returns `[S_u, S_v]`, 0 where two workers agree and infinity where one chooses a group without the other.

        Only groups in which they are neighbours count: for others, the workers between them have edges of their own.
        """
        rows, columns = (np.array(self.own_candidates[worker]) for worker in (first, second))
        # In increasing order of workers, those that both are in and nobody between them.
        tied = {
            c
            for c in set(rows.tolist()) & set(columns.tolist())
            if self.candidates[c].index(second) == self.candidates[c].index(first) + 1
        }
        differ = rows[:, None] != columns[None, :]
        concerned = np.isin(rows, list(tied))[:, None] | np.isin(columns, list(tied))[None, :]
        return np.where(differ & concerned, np.inf, 0.0)

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the workers of each candidate that a worker is in, `[S_w]`."""
        return tuple(" ".join(map(str, self.candidates[c])) for c in self.own_candidates[node])

    def choice_of(self, groups: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns the choice `[W]` that means a division into candidates.

        Raises:
          KeyError: a group is not a candidate.
        """
        index = {group: c for c, group in enumerate(self.candidates)}
        choice = np.empty(self.workers.num_workers, np.int64)
        for group in groups:
            candidate = index[tuple(sorted(map(int, group)))]
            for worker in group:
                choice[worker] = self.own_candidates[worker].index(candidate)
        return choice

    def decode(self, choice: Sequence[int]) -> DecodedGroups:
        """Returns the groups of a choice and their exact times.

        Raises:
          ValueError: the choice has the wrong length or an index that its worker does not have.
        """
        strategies = checked_choice(self.problem, choice)
        chosen = tuple(self.candidates[own[s]] for own, s in zip(self.own_candidates, strategies, strict=True))
        groups = tuple(sorted(set(chosen)))
        if sorted(w for group in groups for w in group) != list(range(self.workers.num_workers)):
            return DecodedGroups(chosen, groups, np.inf)
        return DecodedGroups(chosen, groups, step_s(self.workers, self.step, groups))

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns the slowest group, the all-reduce, and what is forbidden where workers disagree.

        Raises:
          ValueError: as `decode`.
        """
        strategies = checked_choice(self.problem, choice)
        node_s, edge_s, load_s = chosen_costs(self.problem, strategies)
        slowest = int(load_s.argmax())
        leaders = sorted({group[0] for group in self.candidates})
        return (
            *(Part("gradients", "all-reduce", v, float(s)) for v, s in enumerate(node_s) if s),
            *(
                Part(f"workers {u} and {v} disagree", "forbidden", int(v), float(s))
                for (u, v), s in zip(self.problem.edge_nodes, edge_s, strict=True)
                if s
            ),
            Part(f"group of worker {leaders[slowest]}", "group", None, float(load_s[slowest])),
        )


def _example() -> ExpertGroupSpace:
    """Makes four workers on two hosts that form two groups."""
    same_host = np.kron(np.eye(2), np.ones((2, 2))) > 0
    workers = ExpertWorkers(
        flops_per_s=np.array([4.0, 2.0, 3.0, 3.0]),
        capacity=np.array([2, 3, 3, 2]),
        latency_s=np.where(same_host, 0.1, 0.3),
        s_per_byte=np.where(same_host, 0.01, 0.05),
    )
    step = ExpertStep((8.0, 4.0, 4.0), 4.0, 4.0, 16.0, 4, 2, 1, 8, 1)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    return ExpertGroupSpace(workers, step, 2, [*pairs, (1,), (2,), (0, 1, 3), (0, 2, 3)])


EXAMPLE = _example
