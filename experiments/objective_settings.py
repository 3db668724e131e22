"""Problems with objectives that are not sums: steps, pipelines, tables, experts, groups of workers, number formats."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from cost.base import Hardware, Link, Problem
from cost.expert_groups import ExpertStep
from cost.quantities import Quantity
from diffshard.bilevel_search.objective import MaxLossIncrease
from diffshard.experts.divisions import candidate_groups, equal_runs
from diffshard.sharding_search.number_formats import product_groups
from diffshard.sharding_search.options import Options, hardware_for
from diffshard.sharding_search.step_objective import STEP_QUANTITIES, RelaxedStep, seconds_of, user_objective
from diffshard.sharding_search.tracing import space_of, trace_function
from diffshard.solving.objectives.objective import Objective, split_loads
from diffshard.solving.solve import solve
from experiments import expert_groups
from experiments.models import gpt
from experiments.models.model import abstract_arguments
from search_spaces.expert_assignment import ExpertAssignmentSpace
from search_spaces.expert_groups import ExpertGroupSpace
from search_spaces.sharding.space import ShardingSpace


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
    problem = Problem(
        [np.zeros(num_devices)] * num_tables, np.zeros((0, 2), int), [],
        load=[np.kron([a, b], np.eye(num_devices)) for a, b in zip(lookup, sent, strict=True)],
        load_group=np.repeat([0, 1], num_devices),
    )  # fmt: skip
    return Setting(f"{num_tables} tables on {num_devices} devices", *split_loads(problem),
                   np.arange(num_tables) % num_devices)  # fmt: skip


def expert_setting(seed: int, num_experts: int = 16, num_workers: int = 4) -> Setting:
    """Returns experts on workers of three speeds, with room for some: the worker that computes longest counts."""
    generator = np.random.default_rng(seed)
    fair = num_experts // num_workers
    space = ExpertAssignmentSpace(
        generator.uniform(1, 4, num_experts).tolist(),
        generator.choice([1.0, 2.0, 4.0], num_workers).tolist(),
        generator.integers(fair, 2 * fair + 1, num_workers).tolist(),
    )
    return Setting(f"{num_experts} experts on {num_workers} workers", *split_loads(space.problem),
                   np.arange(num_experts) % num_workers)  # fmt: skip


def group_setting(seed: int, num_workers: int = 24, num_groups: int = 4) -> Setting:
    """Returns unequal workers in groups that hold all experts each: the slowest group counts."""
    workers = expert_groups.irregular_cluster(num_workers, seed)
    step = ExpertStep((expert_groups.EXPERT_FLOPS,) * 16, global_batch=16 * num_workers, **expert_groups.STEP)
    in_order = np.arange(num_workers)
    known = min(equal_runs(workers, step, in_order, num_groups), key=lambda division: division.step_s)
    space = ExpertGroupSpace(workers, step, num_groups, candidate_groups(in_order, num_groups, known))
    return Setting(f"{num_workers} workers in {num_groups} groups", *split_loads(space.problem),
                   space.choice_of(known.groups))  # fmt: skip


def loss_setting(seed: int, num_layers: int = 6, width: int = 8192) -> Setting:
    """Returns a step whose products may be in float8, for its seconds and what a rise of the loss beyond a limit costs.

    What each product adds to the loss is random; the limit is a third of what all of them add. The penalty is that of
    `MaxLossIncrease` with a multiplier of 0, in seconds of the step without float8.
    """
    generator = np.random.default_rng(seed)
    shapes = [(width, width)] * (num_layers + 1)
    *weights, x = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    space = _space(_mlp_step, (2, 4), ("data", "model"), "h100", (weights, x))
    groups = product_groups(space, ["float8"])
    added = generator.lognormal(0, 1, len(groups))
    added /= added.sum() / 3
    free = space.with_formats({m: 0.0 for group in groups for m in sorted(group.members)})
    priced = space.with_formats(
        {m: a / len(group.vertices) for group, a in zip(groups, added, strict=True) for m in group.members}
    )
    increase = [a - b for a, b in zip(priced.problem.node_cost, free.problem.node_cost, strict=True)]
    exact = solve(space.problem, tied=space.tied)
    penalty_s = exact.cost * MaxLossIncrease.penalty / 2

    def rise_s(amounts: dict[str, jax.Array]) -> jax.Array:
        return penalty_s * jnp.square(jnp.maximum(amounts["increase"] - 1.0, 0.0))

    return Setting(f"seconds and loss, {num_layers} layers", free.problem,
                   Objective(rise_s, {"increase": Quantity(increase)}), np.array(exact.choice))  # fmt: skip


def _step_setting(name: str, space: ShardingSpace, objective: Objective) -> Setting:
    first = solve(space.problem, tied=space.tied)
    return Setting(name, space.preference_problem, objective, np.asarray(first.choice))


def _mlp_step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def output(weights: list[jax.Array]) -> jax.Array:
        return functools.reduce(lambda x, weight: jnp.tanh(x @ weight), weights, x).sum()

    gradients = jax.grad(output)(weights)
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
