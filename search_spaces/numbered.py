"""The space of a bare `Problem`: its nodes and strategies are named by their numbers, and a choice means itself."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from cost.base import Problem, load_groups
from cost.evaluation import chosen_costs, evaluate
from cost.validation import validate
from search_spaces.base import Part


class NumberedSpace:
    """A `Problem` as a search space; raises `TypeError` or `ValueError` for one that breaks a rule.

    Attributes:
      problem: as it was given.
      node_names: "0", "1" and so on, `[V]`.
    """

    def __init__(self, problem: Problem):
        validate(problem)
        self.problem = problem
        self.node_names = tuple(str(v) for v in range(len(problem.node_cost)))

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the numbers of one node's strategies as text, `[S_v]`."""
        return tuple(str(s) for s in range(np.size(self.problem.node_cost[node])))

    def decode(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Returns the choice as a tuple of integers.

        Raises:
          ValueError: the choice has the wrong length or an index that its node does not have.
        """
        evaluate(self.problem, choice)
        return tuple(int(s) for s in choice)

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns a part for each node, for each edge (its second node pays) and for the largest load of each group.

        Raises:
          ValueError: as `decode`.
        """
        choice, names = self.decode(choice), self.node_names
        node_s, edge_s, load_s = chosen_costs(self.problem, choice)
        parts = [Part(names[v], "node", v, float(seconds)) for v, seconds in enumerate(node_s)]
        edges = np.asarray(self.problem.edge_nodes, np.int64).reshape(-1, 2).tolist()
        parts += [
            Part(f"{names[u]} to {names[v]}", "edge", v, float(seconds))
            for (u, v), seconds in zip(edges, edge_s, strict=True)
        ]
        if len(load_s):
            largest_s = [float(load_s[group].max()) for group in load_groups(self.problem)]
            parts += [Part(f"the largest load of group {g}", "load", None, s) for g, s in enumerate(largest_s)]
        return tuple(parts)


EXAMPLE = partial(
    NumberedSpace,
    Problem(
        [np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.5]), np.array([2.0, 4.0])],
        np.array([[0, 1], [1, 2]]),
        [np.array([[0.0, 0.5], [2.0, 0.0], [2.0, 2.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])],
        load=[
            np.array([[1.0, 0.0, 0.3], [0.0, 3.0, 0.1], [0.2, 0.1, 0.0]]),
            np.array([[0.5, 0.5, 0.2], [0.1, 2.0, 0.4]]),
            np.ones((2, 3)),
        ],
        load_group=np.array([0, 0, 1]),
    ),
)
"""Makes three nodes in a chain, with loads on two devices, and on a link that counts beside them."""
