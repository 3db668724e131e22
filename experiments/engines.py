"""Engines of their own beside the shared search for objectives, on the same problems: placements of embedding tables.

    python -m experiments.engines [--tasks 10] [--devices 4 8] [--time-limit 5]

A step of a recommendation model takes the longest lookups of a device and the longest rest of a device. As an objective
that is `max(forward_s) + max(rest_s)` of two quantities. The search for objectives solves its tangents, mixes, descends
and branches; the engine of `diffshard.tables.shard_tables` anneals chains of placements and has bounds of its own. In a
last column the shared search begins with the tangent at one choice, in place of the mean of those at random ones.
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem
from cost.quantities import Quantity, with_weights
from diffshard.base import Solution
from diffshard.solving.objectives.objective import Objective, PricedObjective
from diffshard.solving.solve import solve
from diffshard.tables.solving import solve_space
from experiments.embedding_tables.tasks import generated, mlperf
from experiments.tables import print_table
from search_spaces.embedding_tables.space import EmbeddingTableSpace


class Comparison(NamedTuple):
    """Both engines on one task.

    Attributes:
      name: of the task.
      num_strategies: of all tables together.
      own, shared: what each found; a placement whose arrays are longer than the memory is not feasible.
      own_cpu_s, shared_cpu_s: processor seconds.
      one_tangent: what the shared search finds from the tangent at one choice.
    """

    name: str
    num_strategies: int
    own: Solution
    own_cpu_s: float
    shared: Solution
    shared_cpu_s: float
    one_tangent: Solution


def step_s(amounts: dict[str, jax.Array]) -> jax.Array:
    """Returns the seconds of a step from the seconds of each device."""
    return jnp.max(amounts["forward_s"]) + jnp.max(amounts["rest_s"])


def as_objective(space: EmbeddingTableSpace) -> tuple[Problem, Objective]:
    """Returns the memory of a space's placements as a problem, and their seconds as an objective."""
    quantities = {
        "forward_s": Quantity([price.forward_s for price in space.prices]),
        "rest_s": Quantity([price.rest_s for price in space.prices]),
    }
    return space.problem._replace(load=()), Objective(step_s, quantities, name="step_s")


def compare(name: str, space: EmbeddingTableSpace, time_limit_s: float) -> Comparison:
    """Returns both engines' placements of a task."""
    begin_s = time.process_time()
    own = solve_space(space, key=0)
    own_s = time.process_time() - begin_s
    problem, objective = as_objective(space)
    begin_s = time.process_time()
    shared = solve(problem, objective=objective, time_limit_s=time_limit_s, key=0)
    shared_s = time.process_time() - begin_s
    one = _from_one_tangent(problem, objective, time_limit_s)
    fitting = [s._replace(feasible=s.feasible and not space.arrays.excess(s.choice)) for s in (shared, one)]
    return Comparison(name, sum(map(len, space.strategies)), own, own_s, fitting[0], shared_s, fitting[1])


def _from_one_tangent(problem: Problem, objective: Objective, time_limit_s: float) -> Solution:
    """Returns what the search finds that begins with the tangent at the choice of all first strategies."""
    priced = PricedObjective(objective, problem)
    gradient = priced.tangent(priced.amounts(np.zeros(len(problem.node_cost), np.int64))).affine.gradient
    tangent = with_weights(problem, objective.quantities, priced.by_name(gradient))
    first = solve(tangent, time_limit_s=0.5 * time_limit_s, stop_gap=1e-3, key=0)
    if not first.feasible:
        return first
    return solve(problem, objective=objective, start=first.choice, time_limit_s=0.5 * time_limit_s, key=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both engines' steps, gaps and seconds for each task, and the mean ratio of steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10, help="generated tasks of 4 devices")
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8], help="devices for the tables of MLPerf")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds of the shared search for each task")
    options = parser.parse_args(argv)
    tasks = [(f"generated {seed}", generated(seed)) for seed in range(options.tasks)]
    tasks += [(f"MLPerf, {number} devices", mlperf(number)) for number in options.devices]
    rows, ratios = [], []
    for name, (tables, devices) in tasks:
        found = compare(name, EmbeddingTableSpace(tables, devices), options.time_limit)
        both = [s.cost / found.own.cost if s.feasible else math.nan for s in (found.shared, found.one_tangent)]
        ratios.append(both)
        ratio, one_ratio = (f"{ratio:.3f}" if math.isfinite(ratio) else "does not fit" for ratio in both)
        rows.append((
            name, len(tables), found.num_strategies, f"{1e3 * found.own.cost:.3f}", f"{found.own.gap:.1%}",
            f"{found.own_cpu_s:.1f}", ratio, f"{found.shared.gap:.1%}", f"{found.shared_cpu_s:.1f}", one_ratio,
        ))  # fmt: skip
    columns = (
        "task",
        "tables",
        "strategies",
        "own, ms",
        "gap",
        "CPU s",
        "shared / own",
        "gap",
        "CPU s",
        "from one tangent",
    )
    print_table("Embedding tables by their own engine and by the shared search for objectives", columns, rows)
    means = np.exp(np.nanmean(np.log(ratios), axis=0))
    print(f"Geometric means of the ratios where placements fit: {means[0]:.3f}, and {means[1]:.3f} from one tangent")


if __name__ == "__main__":
    main()
