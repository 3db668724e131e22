"""Random functions with random plans, run by every executor and compared with one device.

A plan is one random layout, or the best that the solver "greedy" finds, for shardings of the arguments that are random
as well. Everything is in float64, so that a difference above 1e-9 is no rounding. On one device the function runs
operation by operation, because XLA's joint simplification of several of them may be what is wrong.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import diffshard
from cost.base import Problem
from diffshard.base import NumbersError, PlanError, Proposal
from diffshard.plans.base import Executor
from experiments.fuzzing.outcomes import HELD, REFUSED, error_outcome
from experiments.fuzzing.random_functions import RandomFunction
from experiments.host_devices import host_mesh
from experiments.tables import print_table

MESHES = ((8,), (2, 4), (2, 2, 2))
EXECUTORS: tuple[Executor, ...] = get_args(Executor)
EQUAL, WRONG = "equal", "wrong"
_TOLERANCE = 1e-9
"""Of the largest magnitude: sums of float64 differ by 1e-15 for each operation, which random functions amplify."""


def one_random_choice(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the first of some random choices that has nothing forbidden in it."""
    del time_limit_s
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    for _ in range(100):
        choice = np.array([rng.integers(len(costs)) for costs in problem.node_cost])
        cost = sum(costs[s] for costs, s in zip(problem.node_cost, choice, strict=True)) + sum(
            matrix[choice[u], choice[v]] for (u, v), matrix in zip(problem.edge_nodes, problem.edge_cost, strict=True)
        )
        if np.isfinite(cost):
            yield Proposal(choice)
            return


class FunctionRuns:
    """Functions that were run, and what came of them.

    Attributes:
      counts: by mesh, executor and verdict.
    """

    def __init__(self):
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def outcome(self, seed: int) -> str:
        """Runs the function of a seed by every executor; returns `HELD` unless a result is wrong and nobody says so."""
        shape = MESHES[seed // 2 % len(MESHES)]
        mesh = host_mesh(shape)
        with jax.enable_x64(True):
            function = RandomFunction.of(seed)
            try:
                expected = [np.asarray(leaf) for leaf in jax.tree.leaves(function(*function.args))]
                plan = _search(function, mesh).plan(*function.args)
            except Exception as error:  # whatever it is, it is counted
                return error_outcome(error, seed)
            verdicts = {executor: _verdict(function, plan, executor, expected) for executor in EXECUTORS}
        name = "x".join(map(str, shape))
        self.counts.update((name, executor, verdict) for executor, verdict in verdicts.items())
        faults = [f"{e} on {name}: {v}, seed {seed}" for e, v in verdicts.items() if v not in (EQUAL, REFUSED)]
        return "; ".join(faults) or HELD

    def print(self) -> None:
        """Prints how many results were right, by mesh and executor."""
        verdicts = sorted({verdict for *_, verdict in self.counts}, key=lambda v: (v != EQUAL, v))
        rows = sorted({row[:2] for row in self.counts})
        cells = [[*row, *(self.counts[*row, verdict] for verdict in verdicts)] for row in rows]
        print_table("Random functions by every executor against one device", ("mesh", "executor", *verdicts), cells)


def _search(function: RandomFunction, mesh: Mesh) -> diffshard.plans.PlannedFunction[diffshard.Plan]:
    rng = np.random.default_rng(function.seed)
    links = {axis: diffshard.Link(1e-9, 1e-7) for axis in mesh.shape}
    return diffshard.search(
        function,
        mesh,
        hardware=diffshard.Hardware("slow", 1e7, 1e9, np.inf, links),
        in_shardings=tuple(_random_spec(rng, np.ndim(array), mesh) for array in function.args),
        solver=one_random_choice if function.seed % 3 else "greedy",
        key=function.seed,
        progress="none",
    )


def _verdict(function: RandomFunction, plan: diffshard.Plan, executor: Executor, expected: Sequence[Any]) -> str:
    """Returns the outcome of a plan by an executor; a wrong one is run as users do, so that it may be refused."""
    args = plan.shard(*function.args)
    try:
        planned = plan.apply(function, executor=executor)
        results = planned.lower(*args).compile()(*args)  # is not held against the program
        close = [
            np.abs(a - b).max() <= _TOLERANCE * max(1.0, np.abs(b).max())
            for a, b in zip(results, expected, strict=True)
        ]
        if all(close):
            return EQUAL
        planned(*args)
    except (NumbersError, PlanError):
        return REFUSED
    except Exception as error:  # whatever it is, it is counted
        return error_outcome(error, function.seed)
    return WRONG


def _random_spec(rng: np.random.Generator, rank: int, mesh: Mesh) -> PartitionSpec | None:
    """Returns a random spec; None, which leaves the array free, in a third of the cases."""
    if rng.random() < 1 / 3:
        return None
    places = rng.integers(-1, rank, len(mesh.shape))
    return PartitionSpec(
        *(tuple(a for a, p in zip(mesh.axis_names, places, strict=True) if p == d) or None for d in range(rank))
    )
