"""What the gradient of an objective is worth: the search with it, without it, and with other weights in its place.

    python -m experiments.gradient_controls

Every search starts from the same choice, solves tangents with the same solver, and descends from what these find by
exact prices of single changes and pairs, until it has solved as many problems as the search with the gradient, or used
its processor time:

- `gradient`: mixtures and their mean tangents, as `diffshard.solving.objectives` does;
- `one-hot`: the gradient at the best choice so far, and at the choice that its tangent leads to, without mixtures;
- `first tangent`: the gradient at the start only, as if the objective were a sum;
- `shuffled`: the gradient with its entries in another order;
- `cut`: no gradient, so that only the descent from the start is left;
- `random`: the best of random weights of the quantities, log-uniform over three decades, up to 1,000 of them.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from cost.evaluation import Evaluator, evaluate
from cost.quantities import with_weights
from diffshard.base import InfeasibleError, Solution
from diffshard.solving.objectives.minimise import minimise
from diffshard.solving.objectives.mixtures import Descent
from diffshard.solving.objectives.objective import PricedObjective
from diffshard.solving.solve import solve
from experiments.objective_settings import (
    Setting,
    expert_setting,
    group_setting,
    loss_setting,
    pipeline_setting,
    step_settings,
    table_setting,
)
from experiments.tables import print_table

MOST_RANDOM = 1000
_CONTROLS_GAP = 1e-4


class Outcome(NamedTuple):
    """The best price of one search.

    Attributes:
      price: of the best choice.
      lower_bound: -inf without one.
      num_problems: that were solved.
      cpu_s: processor seconds.
    """

    price: float
    lower_bound: float
    num_problems: int
    cpu_s: float


class Oracle:
    """The solver of tangents, which counts them."""

    def __init__(self):
        self.num_problems = 0

    def __call__(self, problem: Problem, start: np.ndarray | None, stop_gap: float = _CONTROLS_GAP) -> Solution:
        """Solves a problem to a relative gap.

        Raises:
          InfeasibleError: nothing within the memory limit was found.
        """
        self.num_problems += 1
        solution = solve(problem, start=start, stop_gap=stop_gap)
        if not solution.feasible:
            raise InfeasibleError("The solver found no choice within the memory limit.")
        return solution


def with_gradient(setting: Setting, most_problems: int) -> Outcome:
    """Minimises an objective by its gradient."""
    oracle, begin_s = Oracle(), time.process_time()
    found = minimise(
        setting.problem, setting.objective, oracle, setting.start, stop_gap=1e-4, most_problems=most_problems
    )
    return Outcome(found.cost, found.lower_bound, oracle.num_problems, time.process_time() - begin_s)


Weights = Callable[[PricedObjective, np.ndarray, int], np.ndarray | None]
"""`weights(priced, amounts, round)`: the weights of quantities `[N]` for the next problem; None ends the search."""


def with_weights_of(setting: Setting, weights_of: Weights, most_problems: int, cpu_s: float) -> Outcome:
    """Solves problems of weights, each at the choice of the last one, within a number of them and processor time."""
    priced, oracle, begin_s = PricedObjective(setting.objective, setting.problem), Oracle(), time.process_time()
    price, evaluator = partial(_price, setting, priced), Evaluator(setting.problem)
    descend = partial(Descent(setting.problem, priced, evaluator), nodes=np.arange(len(setting.start)))
    choice, best = setting.start, price(descend(setting.start))
    while oracle.num_problems < most_problems and time.process_time() - begin_s < cpu_s:
        weights = weights_of(priced, priced.amounts(choice), oracle.num_problems)
        if weights is None:
            break
        problem = with_weights(setting.problem, setting.objective.quantities, priced.by_name(weights))
        try:
            found = np.asarray(oracle(problem, None).choice)
        except InfeasibleError:
            continue
        choice = found
        if evaluator(found).feasible:
            best = min(best, price(descend(found)))
    return Outcome(best, -np.inf, oracle.num_problems, time.process_time() - begin_s)


def _price(setting: Setting, priced: PricedObjective, choice: np.ndarray) -> float:
    return float(evaluate(setting.problem, choice).cost) + priced.price(priced.amounts(choice))


def controls(seed: int) -> dict[str, tuple[Weights, bool]]:
    """Returns the weights of each control, and whether it may solve `MOST_RANDOM` problems in the time."""
    generator = np.random.default_rng(seed)

    def one_hot(priced: PricedObjective, amounts: np.ndarray, number: int) -> np.ndarray:
        return priced.tangent(amounts).affine.gradient

    def first(priced: PricedObjective, amounts: np.ndarray, number: int) -> np.ndarray | None:
        return None if number else priced.tangent(amounts).affine.gradient

    def shuffled(priced: PricedObjective, amounts: np.ndarray, number: int) -> np.ndarray:
        return generator.permutation(priced.tangent(amounts).affine.gradient)

    def cut(priced: PricedObjective, amounts: np.ndarray, number: int) -> np.ndarray | None:
        return None if number else np.zeros_like(amounts)

    def random(priced: PricedObjective, amounts: np.ndarray, number: int) -> np.ndarray:
        size = np.abs(priced.tangent(amounts).affine.gradient).max()
        return size * 10 ** generator.uniform(-3, 0, len(amounts))

    return {
        "one-hot": (one_hot, False),
        "first tangent": (first, False),
        "shuffled": (shuffled, False),
        "cut": (cut, False),
        "random": (random, True),
    }


def run(setting: Setting, most_problems: int, seed: int) -> dict[str, Outcome]:
    """Returns the outcome of each search on a setting."""
    outcomes = {"gradient": with_gradient(setting, most_problems)}
    whole = outcomes["gradient"]
    for name, (weights_of, is_long) in controls(seed).items():
        most = MOST_RANDOM if is_long else max(whole.num_problems, 1)
        outcomes[name] = with_weights_of(setting, weights_of, most, whole.cpu_s)
    return outcomes


KINDS: dict[str, Callable[[int], Iterable[Setting]]] = {
    "steps": lambda seeds: step_settings(),
    "loss": lambda seeds: map(loss_setting, range(seeds)),
    "pipelines": lambda seeds: map(pipeline_setting, range(seeds)),
    "tables": lambda seeds: map(table_setting, range(seeds)),
    "experts": lambda seeds: map(expert_setting, range(seeds)),
    "groups": lambda seeds: map(group_setting, range(seeds)),
}
"""Makes the settings of each kind, given how many random ones."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints, for each setting, the price of each search as a ratio to that with the gradient."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most-problems", type=int, default=16, help="tangents that the search may solve")
    parser.add_argument("--seeds", type=int, default=3, help="random problems of each kind")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of problems")
    arguments = parser.parse_args(argv)
    rows = []
    for kind in arguments.only:
        for seed, setting in enumerate(KINDS[kind](arguments.seeds)):
            outcomes = run(setting, arguments.most_problems, seed)
            own = outcomes["gradient"]
            ratios = [f"{other.price / own.price:.3f}" for name, other in outcomes.items() if name != "gradient"]
            gap = f"{(own.price - own.lower_bound) / own.price:.2%}"
            rows.append((setting.name, f"{own.price:.4g}", gap, own.num_problems, f"{own.cpu_s:.1f}", *ratios,
                         outcomes["random"].num_problems))  # fmt: skip
            print(*rows[-1], sep="  ", flush=True)
    columns = ("objective", "gradient", "gap", "problems", "CPU s", *controls(0), "random problems")
    print_table("Ratios of prices to those of the search by the gradient", columns, rows)


if __name__ == "__main__":
    main()
