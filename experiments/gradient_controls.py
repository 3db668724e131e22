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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from cost.base import Hardware, Link, Problem
from cost.evaluation import Evaluator, evaluate
from cost.quantities import Quantity, with_weights
from diffshard.base import InfeasibleError, Solution
from diffshard.sharding_search.options import Options, hardware_for
from diffshard.sharding_search.step_objective import STEP_QUANTITIES, RelaxedStep, seconds_of, user_objective
from diffshard.sharding_search.tracing import space_of, trace_function
from diffshard.solving.objectives.minimise import minimise
from diffshard.solving.objectives.mixtures import Descent
from diffshard.solving.objectives.objective import Objective, PricedObjective
from diffshard.solving.solve import solve
from experiments.models import gpt
from experiments.models.model import abstract_arguments
from experiments.tables import print_table
from search_spaces.sharding.space import ShardingSpace

MOST_RANDOM = 1000
_CONTROLS_GAP = 1e-4


class Setting(NamedTuple):
    """A problem with an objective.

    Attributes:
      name: what is made small, and of what.
      problem: the linear part.
      objective: the rest.
      start: `[V]` a feasible choice.
    """

    name: str
    problem: Problem
    objective: Objective
    start: np.ndarray


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


def step_settings(batches: Sequence[int] = (512, 2048, 4096)) -> Iterator[Setting]:
    """Yields steps of a two-layer network on slow links, for seconds, and of a GPT on H100s, for energy."""
    for batch in batches:
        links = {axis: Link(1e-9, i * 2e-9) for i, axis in enumerate("xyz", 1)}
        hardware = Hardware("slow links", 1e12, 1e12, 1e12, links, exposed_share=0.01)
        shapes = (512, 512), (512, 2048), (batch, 512)
        *weights, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
        space = _space(_mlp_step, (2, 2, 2), "xyz", hardware, (weights, x))
        quantities = {name: space.quantities[name] for name in STEP_QUANTITIES}
        yield _step_setting(f"seconds, two layers, batch {batch}", space, Objective(seconds_of, quantities))
    shapes = (8192, 32768), (32768, 8192), (16384, 8192)
    *weights, x = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    model = gpt.make(batch=16, layers=2, width=512, heads=8, sequence=256, vocabulary=4096)
    space = _space(_mlp_step, (2, 8), ("hosts", "gpus"), "h100", (weights, x))
    yield _step_setting("energy, two wide layers", space, user_objective(space, energy_j))
    space = _space(model.step, (2, 4), ("data", "model"), "h100", abstract_arguments(model))
    yield _step_setting("seconds and peak memory, GPT", space, user_objective(space, seconds_and_memory))


def energy_j(step: RelaxedStep) -> jax.Array:
    """Returns joules of a device: power that is always there, power of arithmetic, and energy of what is sent."""
    sent_s = jnp.asarray(sum(step.link_s.values()))
    return 250.0 * step.seconds + 450.0 * step.compute_s + 15.0 * sent_s


def seconds_and_memory(step: RelaxedStep) -> jax.Array:
    """Returns milliseconds of a step, of which a gigabyte at the peak counts as ten."""
    return 1e3 * step.seconds + 10 * step.peak_bytes / 1e9


def pipeline_setting(seed: int, num_layers: int = 32, num_stages: int = 8, num_microbatches: int = 16) -> Setting:
    """Returns layers in stages: a step takes all stages once and the slowest one for each further micro-batch."""
    generator = np.random.default_rng(seed)
    seconds = generator.lognormal(0, 0.6, num_layers)
    nodes = [np.diag(np.full(num_stages, s)) for s in seconds]
    after = np.triu(np.ones((num_stages, num_stages), bool))  # a layer is in the stage of the one before, or later
    sent = 0.3 * generator.lognormal(0, 0.6, num_layers - 1)
    edges = [np.einsum("uv,d->uvd", ~np.eye(num_stages, dtype=bool) * s, np.zeros(num_stages)) for s in sent]
    for edge, s in zip(edges, sent, strict=True):
        for u, v in zip(*np.triu_indices(num_stages, 1), strict=True):
            edge[u, v, v] = s  # the receiving stage waits for it
    problem = Problem(
        [np.zeros(num_stages)] * num_layers,
        np.array([[i, i + 1] for i in range(num_layers - 1)]),
        [np.where(after, 0.0, np.inf)] * (num_layers - 1),
    )

    def step_s(amounts: dict[str, jax.Array]) -> jax.Array:
        stages = amounts["stages"]
        return jnp.sum(stages) + (num_microbatches - 1) * jnp.max(stages)

    start = np.sort(np.arange(num_layers) * num_stages // num_layers)
    return Setting(f"pipeline, {num_layers} layers in {num_stages} stages", problem,
                   Objective(step_s, {"stages": Quantity(nodes, edges)}), start)  # fmt: skip


def table_setting(seed: int, num_tables: int = 40, num_devices: int = 4) -> Setting:
    """Returns tables on devices: the busiest device of the lookups, and that of the exchange, one after the other."""
    generator = np.random.default_rng(seed)
    lookup, sent = (generator.lognormal(0, 1, num_tables) for _ in range(2))
    problem = Problem([np.zeros(num_devices)] * num_tables, np.zeros((0, 2), int), [])
    quantities = {
        "lookup_s": Quantity([np.diag(np.full(num_devices, s)) for s in lookup]),
        "sent_s": Quantity([np.diag(np.full(num_devices, s)) for s in sent]),
    }

    def step_s(amounts: dict[str, jax.Array]) -> jax.Array:
        return jnp.max(amounts["lookup_s"]) + jnp.max(amounts["sent_s"])

    return Setting(f"{num_tables} tables on {num_devices} devices", problem, Objective(step_s, quantities),
                   np.arange(num_tables) % num_devices)  # fmt: skip


def run(setting: Setting, most_problems: int, seed: int) -> dict[str, Outcome]:
    """Returns the outcome of each search on a setting."""
    outcomes = {"gradient": with_gradient(setting, most_problems)}
    whole = outcomes["gradient"]
    for name, (weights_of, is_long) in controls(seed).items():
        most = MOST_RANDOM if is_long else max(whole.num_problems, 1)
        outcomes[name] = with_weights_of(setting, weights_of, most, whole.cpu_s)
    return outcomes


def _step_setting(name: str, space: ShardingSpace, objective: Objective) -> Setting:
    first = solve(space.problem, alike=space.alike)
    return Setting(name, space.preference_problem, objective, np.asarray(first.choice))


def _mlp_step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def _space(
    fn: Callable[..., Any],
    sizes: Sequence[int],
    axes: Sequence[str],
    hardware: Hardware | str,
    arguments: Sequence[Any],
) -> ShardingSpace:
    mesh = AbstractMesh(tuple(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))
    hardware = hardware_for(hardware, mesh)
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes)
    return space_of(options, trace_function(options, arguments))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints, for each setting, the price of each search as a ratio to that with the gradient."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most-problems", type=int, default=16, help="tangents that the search may solve")
    parser.add_argument("--seeds", type=int, default=3, help="random problems of each kind")
    parser.add_argument("--only", choices=["steps", "pipelines", "tables"], help="one kind of problem")
    arguments = parser.parse_args(argv)
    kinds = {
        "steps": lambda: list(step_settings()),
        "pipelines": lambda: [pipeline_setting(seed) for seed in range(arguments.seeds)],
        "tables": lambda: [table_setting(seed) for seed in range(arguments.seeds)],
    }
    rows = []
    for kind, settings in kinds.items():
        if arguments.only in (None, kind):
            for seed, setting in enumerate(settings()):
                outcomes = run(setting, arguments.most_problems, seed)
                own = outcomes["gradient"]
                ratios = [f"{other.price / own.price:.3f}" for name, other in outcomes.items() if name != "gradient"]
                gap = f"{(own.price - own.lower_bound) / own.price:.2%}"
                rows.append((setting.name, f"{own.price:.4g}", gap, own.num_problems, f"{own.cpu_s:.1f}", *ratios,
                             outcomes["random"].num_problems))  # fmt: skip
    columns = ("objective", "gradient", "gap", "problems", "CPU s", *controls(0), "random problems")
    print_table("Ratios of prices to those of the search by the gradient", columns, rows)


if __name__ == "__main__":
    main()
