"""Damaged instances of the IOPDDL contest: each is refused with a clear error, or is a problem that can be solved."""

import json
import warnings
from typing import Any

from cost.evaluation import violations
from diffshard.solving import contest
from diffshard.solving.solve import solve
from experiments.fuzzing.damage import Damage
from experiments.fuzzing.outcomes import REFUSED, TAKEN, error_outcome


def whole_instance() -> dict[str, Any]:
    """Returns the instance that is damaged: forbidden entries, parallel edges, a loop, and memory that can run out."""
    return {
        "problem": {
            "name": "small",
            "nodes": {
                "intervals": [[0, 4], [1, 3], [2, 6], [5, 5]],
                "costs": [[15, 55], [45, 50, 10**18], [7], [3, 10**18 - 1]],
                "usages": [[10, 25], [10, 15, 5], [4], [2**62, 2**62 + 1]],
            },
            "edges": {
                "nodes": [[0, 1], [1, 0], [2, 1], [0, 0]],
                "costs": [[1, 2, 3, 4, 5, 10**18], [1, 2, 3, 4, 5, 6], [9, 8, 7], [5, 99, 99, 6]],
            },
            "usage_limit": 36,
        }
    }


class InstanceDamage:
    """Damaged copies of an instance, and what becomes of them."""

    def __init__(self):
        self.damage = Damage(whole_instance())

    def outcome(self, seed: int) -> str:
        """Returns the outcome of a case: `REFUSED`, `TAKEN`, or an error and where it came from."""
        document = json.loads(json.dumps(self.damage.document_of(seed)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    problem = contest.parse(document)
                except ValueError:
                    return REFUSED
                solution = solve(problem)
                _ = violations(problem, solution.choice)
        except Exception as error:  # whatever it is, it is counted
            return error_outcome(error, seed)
        return TAKEN
