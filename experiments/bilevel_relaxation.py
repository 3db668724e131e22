"""Where every choice is exact, does the gradient of the relaxed cost decide? With it, cut and shuffled, beside solvers.

Rows descend the relaxed cost by adam and are rounded to their largest weight, and nothing polishes the result: what is
left is the gradient's own work. Three relaxations: "softmax", an entropy term cools geometrically; "gumbel", rows drawn
anew at each step and the draw's temperature falls; "dual-guided", softmax that starts at the marginals of the smoothed
dual. "shuffled" hands each step's slopes to other strategies by a fixed permutation; "cut" leaves the start as it is.
All methods, solvers too, see the problem with its ties merged and no more: the whole presolve would solve the small
ones by itself.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Problem, num_strategies
from cost.evaluation import evaluate, relaxed_cost
from diffshard.base import Solution
from diffshard.bilevel_search.relaxation import marginal_logits
from diffshard.solving.presolve.pipeline import merge_ties
from diffshard.solving.solve import solve
from experiments.layered import layered_problem
from experiments.solvers import PROBLEMS
from experiments.tables import print_table

SOLVERS = ("gradient", "exact", "mcmc", "greedy", "random")
TEMPERATURES = (1.0, 0.1, 0.01)
"""First ones, in units of a node's mean spread of costs; each falls to a hundredth."""
RESTARTS = (1, 16)
_ADAM = optax.adam(0.1)
_LAYERS = {"layered 1x12": (0, 1, 12), "layered 2x10": (1, 2, 10)}  # seed, layers, width

Change = Callable[[jax.Array], jax.Array]
Relaxation = Literal["softmax", "gumbel", "dual-guided"]


class MethodResult(NamedTuple):
    """The result of a method on a problem: cost in seconds, inf where it broke a limit, and seconds until it ended."""

    problem: str
    method: str
    cost: float
    seconds: float


def problems(quick: bool) -> dict[str, Callable[[], Problem | None]]:
    """Returns generated ones, and sharding problems of real training steps."""
    small: dict[str, Callable[[], Problem | None]] = {
        name: lambda sizes=sizes: layered_problem(*sizes[:2], width=sizes[2], most=6) for name, sizes in _LAYERS.items()
    }
    return (
        {"layered 2x10": small["layered 2x10"]}
        if quick
        else {**small, **{name: PROBLEMS[name] for name in ("mlp 2x2", "gpt 4")}}
    )


def descend(
    problem: Problem, relaxation: Relaxation, temperature: float, restarts: int, steps: int, change: Change, seed: int
) -> float:
    """Returns the least exact cost of rounded rows after descents from random starts; inf if none keeps the limits."""
    reduction = merge_ties(problem)
    sizes = num_strategies(reduction.problem)
    ends, scale = np.cumsum(sizes)[:-1].tolist(), _spread(reduction.problem)
    node, count = np.repeat(np.arange(len(sizes)), sizes), len(sizes)  # a program of one length for any number of nodes

    def weights_of(logits: jax.Array) -> jax.Array:
        weights = jnp.exp(logits - jax.ops.segment_max(logits, node, count)[node])
        return weights / jax.ops.segment_sum(weights, node, count)[node]

    def cost(weights: jax.Array) -> jax.Array:
        return relaxed_cost(reduction.problem, weights) / scale

    def energy(logits: jax.Array, heat: jax.Array, key: jax.Array) -> jax.Array:
        if relaxation == "gumbel":
            return cost(weights_of((logits + jax.random.gumbel(key, logits.shape)) / heat))
        rows = weights_of(logits)
        return cost(rows) + heat * jnp.sum(rows * jnp.log(jnp.maximum(rows, 1e-30)))

    def step(carried: tuple[jax.Array, optax.OptState], at: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        logits, moments = carried
        updates, moments = _ADAM.update(change(jax.grad(energy)(logits, *at)), moments)
        return (optax.apply_updates(logits, updates), moments), None

    guide = jnp.concatenate(marginal_logits(reduction.problem)) if relaxation == "dual-guided" else jnp.zeros(())

    def run(key: jax.Array) -> jax.Array:
        logits = guide + 0.1 * jax.random.normal(key, (int(sizes.sum()),))
        heats, keys = temperature * jnp.logspace(0, -2, steps), jax.random.split(jax.random.fold_in(key, 1), steps)
        return jax.lax.scan(step, (logits, _ADAM.init(logits)), (heats, keys))[0][0]

    keys = jax.random.split(jax.random.key(seed), restarts)
    final_logits = np.asarray(jax.jit(jax.vmap(run))(keys))
    choices = [[int(row.argmax()) for row in np.split(logits, ends)] for logits in final_logits]
    priced = [evaluate(problem, reduction.expand(np.array(choice, np.int64))) for choice in choices]
    return min((float(p.cost) for p in priced if p.feasible), default=np.inf)


def main(quick: bool, seeds: int, steps: int, seconds: float) -> list[MethodResult]:
    """Prints the table; returns its rows: costs are medians over seeds."""
    rows: list[MethodResult] = []
    for name, make in problems(quick).items():
        problem = make()
        assert problem is not None  # none of these needs a file
        size = int(num_strategies(merge_ties(problem).problem).sum())
        order = np.random.default_rng(0).permutation(size)
        temperatures = TEMPERATURES[1:2] if quick else TEMPERATURES
        methods: list[tuple[str, Relaxation, float, int, Change]] = [
            (f"{relaxation}, temperature {t:g}, {r} starts", relaxation, t, r, lambda slope: slope)
            for relaxation in get_args(Relaxation)
            for t in temperatures
            for r in RESTARTS
        ]
        controls: dict[str, Change] = {"shuffled": lambda slope, order=order: slope[order], "cut": jnp.zeros_like}
        methods += [
            (f"{relaxation} {name}, {RESTARTS[-1]} starts", relaxation, temperatures[0], RESTARTS[-1], change)
            for relaxation in get_args(Relaxation)[::2]  # those whose rows are the logits' own
            for name, change in controls.items()
        ]
        for method, relaxation, temperature, restarts, change in methods:
            start = time.perf_counter()
            costs = [descend(problem, relaxation, temperature, restarts, steps, change, seed) for seed in range(seeds)]
            rows.append(MethodResult(name, method, float(np.median(costs)), (time.perf_counter() - start) / seeds))
        for solver in SOLVERS:
            start = time.perf_counter()
            solutions = [_solve(problem, solver, seconds, seed) for seed in range(seeds)]
            costs = [float(solution.cost) if solution.feasible else np.inf for solution in solutions]
            rows.append(MethodResult(name, solver, float(np.median(costs)), (time.perf_counter() - start) / seeds))
        best = min(row.cost for row in rows if row.problem == name)
        exact = next(row.cost for row in rows if row.problem == name and row.method == "exact")
        print_table(
            f"{name}: {size} strategies; {seeds} seeds, {steps} steps of descent, {seconds:g} s at most",
            ("method", "cost ms", "above exact", "seconds"),
            [
                (r.method, f"{1e3 * r.cost:.6g}", f"{r.cost / exact - 1:+.2%}", f"{r.seconds:.2f}")
                for r in rows
                if r.problem == name
            ],
        )
        if best < exact:
            print(f"exact did not finish in time: the least cost is {1e3 * best:.6g} ms.")
    return rows


def _solve(problem: Problem, solver: str, seconds: float, seed: int) -> Solution:
    return solve(problem, solver=solver, time_limit_s=seconds, key=seed, reduce=merge_ties)


def _spread(problem: Problem) -> float:
    """Returns the mean over nodes of the cost's standard deviation when all strategies are drawn at random."""
    rng = np.random.default_rng(0)
    draws = [float(evaluate(problem, rng.integers(num_strategies(problem))).cost) for _ in range(64)]
    deviation = float(np.std(draws)) / len(problem.node_cost) ** 0.5
    return deviation if deviation > 0 else 1.0
