"""The smoothed dual as one JAX function of messages and prices, whose gradient is a relaxed choice, beside the sweeps.

    python -m experiments.jax_dual [--layers 2 25 250] [--instances B G K] [--seconds 10]

Both maximise the same dual of the presolved problem in the same processor time: the library's sweeps in NumPy, and Adam
along `jax.grad` of `dual_value`, compiled once for each problem. Edges are padded to sizes that are powers of two and
lie in dense arrays by size, so that the gradient of an edge needs no scatter. Compilation is told apart; with JAX's
persistent cache a second run of the same shapes reads the program.
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Problem
from diffshard.solving import contest
from diffshard.solving.csr import CSRProblem, group_sizes, to_csr, with_ceiling
from diffshard.solving.dual.ascent import Ascent, initial_prices
from diffshard.solving.presolve.pipeline import presolve
from experiments.iopddl import INSTANCES
from experiments.layered import layered_problem
from experiments.tables import print_table

_TEMPERATURES = 0.3, 1e-3  # first and last, in the bound's cost per node, as those of the sweeps
_STEPS_PER_CHECK = 20  # of the bound at temperature 0


class EdgeGroup(NamedTuple):
    """n edges whose matrices are padded to the same size.

    Attributes:
      matrix: `[n, X, Y]`, infinite where it is padded.
      first, second: `[n, X]` and `[n, Y]` positions of the strategies at both ends, N where padded.
    """

    matrix: jax.Array
    first: jax.Array
    second: jax.Array


class DualProblem(NamedTuple):
    """A problem for the dual, costs in units of a typical one.

    Attributes:
      cost: `[N]`.
      node: `[N]` the node of each strategy.
      groups: the edges by size.
      usage: values and their strategies and usages; `interval` and `slack` as in `CSRProblem`.
      load: `[N, R]`.
    """

    cost: jax.Array
    node: jax.Array
    groups: tuple[EdgeGroup, ...]
    usage: tuple[jax.Array, jax.Array, jax.Array]
    interval: jax.Array
    slack: jax.Array
    load: jax.Array


Messages = tuple[tuple[jax.Array, jax.Array], ...]


def dual_problem(csr: CSRProblem, unit: float) -> DualProblem:
    """Returns a problem in dense groups of edges, in float32."""
    forward = np.flatnonzero(csr.source < csr.target)
    width = 1 << np.ceil(np.log2(np.maximum(csr.sizes, 1))).astype(int)
    shape = np.stack([width[csr.source[forward]], width[csr.target[forward]]], axis=1)
    groups = []
    for x, y in np.unique(shape, axis=0).tolist() if len(forward) else ():
        edges = forward[(shape == (x, y)).all(axis=1)]
        rows, columns = csr.sizes[csr.source[edges]], csr.sizes[csr.target[edges]]
        s, t = np.arange(x)[None, :, None], np.arange(y)[None, None]
        inside = (s < rows[:, None, None]) & (t < columns[:, None, None])
        at = np.where(inside, csr.matrix[edges][:, None, None] + s * columns[:, None, None] + t, 0)
        ends = [
            np.where(np.arange(size) < count[:, None], csr.start[node][:, None] + np.arange(size), csr.start[-1])
            for size, count, node in ((x, rows, csr.source[edges]), (y, columns, csr.target[edges]))
        ]
        matrix = np.where(inside, csr.entries[at] / unit, np.inf).astype(np.float32)
        groups.append(EdgeGroup(jnp.asarray(matrix), *map(jnp.asarray, ends)))
    usage = csr.usage.tocoo()
    devices = max(csr.base.shape[1], 1)
    limit = np.where(np.isfinite(csr.limit) & (csr.limit > 0), csr.limit, 1.0)
    is_finite = np.isfinite(csr.limit)
    data = np.where(is_finite[usage.coords[1] % devices], usage.data / limit[usage.coords[1] % devices], 0.0)
    return DualProblem(
        jnp.asarray(csr.cost / unit, jnp.float32),
        jnp.asarray(np.repeat(np.arange(len(csr.sizes)), csr.sizes)),
        tuple(groups),
        (jnp.asarray(data, jnp.float32), jnp.asarray(usage.coords[0]), jnp.asarray(usage.coords[1])),
        jnp.asarray(csr.interval),
        jnp.asarray(np.where(is_finite, (csr.limit - csr.base) / limit, 0.0), jnp.float32),
        jnp.asarray(csr.load / unit, jnp.float32),
    )


def dual_value(
    problem: DualProblem, num_nodes: int, messages: Messages, memory: jax.Array, load: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Returns the dual of any messages and prices; 0 is the temperature of the bound itself."""
    data, strategy, column = problem.usage
    cost = problem.cost + problem.load @ load
    if memory.size:
        below = jnp.concatenate([jnp.zeros_like(memory[:1]), jnp.cumsum(memory, axis=0)])
        each = (below[problem.interval[:, 1]] - below[problem.interval[:, 0]]).ravel()
        cost = cost.at[strategy].add(data * each[column])
    cost = jnp.append(cost, 0.0)
    total = jnp.zeros(())
    for group, (to_first, to_second) in zip(problem.groups, messages, strict=True):
        cost = cost.at[group.first].add(to_first).at[group.second].add(to_second)
        left = group.matrix - to_first[:, :, None] - to_second[:, None, :]
        total += jnp.sum(_softmin(left.reshape(len(left), -1), temperature))
    least = jax.ops.segment_min(jax.lax.stop_gradient(cost[:-1]), problem.node, num_nodes, indices_are_sorted=True)
    if_cold = jax.ops.segment_min(cost[:-1], problem.node, num_nodes, indices_are_sorted=True)
    t = jnp.maximum(temperature, 1e-12)
    weights = jnp.exp((least[problem.node] - cost[:-1]) / t)
    sums = jax.ops.segment_sum(weights, problem.node, num_nodes, indices_are_sorted=True)
    nodes = jnp.where(temperature > 0, least - t * jnp.log(sums), if_cold)
    return total + jnp.sum(nodes) - jnp.sum(memory * problem.slack)


def _softmin(rows: jax.Array, temperature: jax.Array) -> jax.Array:
    t = jnp.maximum(temperature, 1e-12)
    return jnp.where(temperature > 0, -t * jax.nn.logsumexp(-rows / t, axis=1), jnp.min(rows, axis=1))


class AscentResult(NamedTuple):
    """The result of an ascent of the dual.

    Attributes:
      bound: the best one at temperature 0.
      steps: sweeps, or steps along the gradient.
      compile_s, cpu_s: processor seconds of compiling and of everything else.
    """

    bound: float
    steps: int
    compile_s: float
    cpu_s: float


def ascend_by_sweeps(csr: CSRProblem, seconds: float) -> AscentResult:
    """Returns the bound that the library's sweeps reach."""
    begin = time.process_time()
    ascent, steps = Ascent(csr), 0
    while (progress := (time.process_time() - begin) / seconds) < 1:
        ascent.step(progress)
        steps += 1
    return AscentResult(ascent.certified_bound(), steps, 0.0, time.process_time() - begin)


def ascend_by_gradient(csr: CSRProblem, seconds: float, rate: float) -> AscentResult:
    """Returns the bound that Adam along the gradient reaches; prices of memory and loads follow it as with sweeps."""
    begin = time.process_time()
    unit = float(np.abs(csr.cost).sum()) / max(len(csr.sizes), 1) or 1.0
    problem, prices = dual_problem(csr, unit), initial_prices(csr)
    messages = tuple((jnp.zeros(g.first.shape), jnp.zeros(g.second.shape)) for g in problem.groups)
    memory, load = jnp.asarray(prices.memory, jnp.float32), jnp.asarray(prices.load, jnp.float32)
    step, state, cold = _compiled(problem, len(csr.sizes), csr, messages, memory, load)
    compile_s = time.process_time() - begin
    best, steps, begin_ascent = -np.inf, 0, time.process_time()
    while (progress := (time.process_time() - begin_ascent) / seconds) < 1:
        per_node = max(abs(best) if np.isfinite(best) else 1.0, 1e-3) / len(csr.sizes)
        first, last = _TEMPERATURES
        temperature = per_node * first * (last / first) ** progress
        messages, memory, load, state = step(problem, messages, memory, load, state, temperature, rate * temperature)
        if steps % _STEPS_PER_CHECK == 0:
            best = max(best, float(cold(problem, messages, memory, load)))
        steps += 1
    best = max(best, float(cold(problem, messages, memory, load)))
    return AscentResult(best * unit, steps, compile_s, time.process_time() - begin_ascent)


def _compiled(
    problem: DualProblem, num_nodes: int, csr: CSRProblem, messages: Messages, memory: jax.Array, load: jax.Array
) -> tuple[Callable[..., Any], Any, Callable[..., Any]]:
    """Returns a step, its first state, and the bound, all compiled."""
    adam = optax.scale_by_adam()
    value = functools.partial(dual_value, num_nodes=num_nodes)
    sizes = group_sizes(csr)
    group = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))

    @functools.partial(jax.jit, donate_argnums=(1, 4))
    def step(problem, messages, memory, load, state, temperature, rate):
        gradient, excess, loads = jax.grad(
            lambda m, p, q: value(problem, messages=m, memory=p, load=q, temperature=temperature), argnums=(0, 1, 2)
        )(messages, memory, load)
        updates, state = adam.update(gradient, state)
        messages = jax.tree.map(lambda m, u: m + rate * u, messages, updates)
        least = 1e-5 * jnp.abs(problem.cost).mean() * num_nodes
        risen = jnp.maximum(memory, least) * jnp.exp(3.0 * jnp.clip(excess, -0.1, 0.3))
        memory = jnp.where(risen <= least, 0.0, risen)
        if load.size:
            most = jax.ops.segment_max(loads, group, len(sizes))[group]
            load = load * jnp.exp((loads - most) / jnp.maximum(jnp.abs(most), 1e-30))
            load = load / jax.ops.segment_sum(load, group, len(sizes))[group]
        return messages, memory, load, state

    cold = jax.jit(lambda problem, m, p, q: value(problem, messages=m, memory=p, load=q, temperature=jnp.zeros(())))
    state, scalar = adam.init(messages), jax.ShapeDtypeStruct((), jnp.float32)
    arguments = problem, messages, memory, load
    return step.lower(*arguments, state, scalar, scalar).compile(), state, cold.lower(*arguments).compile()


def problems(instances: Sequence[str], layers: Sequence[int]) -> Mapping[str, Callable[[], Problem]]:
    """Returns contest instances and generated layers, by name."""
    of_contest = {name: functools.partial(contest.read, INSTANCES / f"{name}.json.gz") for name in instances}
    generated = {f"{40 * n} layered nodes": functools.partial(layered_problem, 0, n, binding=0.7) for n in layers}
    return generated | of_contest


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both ascents of each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 25, 250], help="of generated problems")
    parser.add_argument("--instances", nargs="*", default=["B", "G", "K"], help="of the contest")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the processor for each ascent")
    parser.add_argument("--rate", type=float, default=1.0, help="of Adam, in temperatures")
    options = parser.parse_args(argv)
    rows = []
    for name, make in problems(options.instances, options.layers).items():
        csr = with_ceiling(to_csr(presolve(make()).problem))
        sweeps = ascend_by_sweeps(csr, options.seconds)
        descent = ascend_by_gradient(csr, options.seconds, options.rate)
        rows.append((
            name, len(csr.sizes), int(len(csr.source) / 2), f"{sweeps.bound:.6g}", sweeps.steps,
            f"{1e3 * sweeps.cpu_s / max(sweeps.steps, 1):.2f}", f"{descent.bound:.6g}", descent.steps,
            f"{1e3 * descent.cpu_s / max(descent.steps, 1):.2f}", f"{descent.compile_s:.1f}",
        ))  # fmt: skip
        print(*rows[-1], flush=True)
    columns = (
        "problem", "nodes", "edges", "bound of sweeps", "sweeps", "ms each", "bound by gradient", "steps", "ms each",
        "compile s",
    )  # fmt: skip
    print_table(f"The dual in NumPy and in JAX, {options.seconds:g} processor s each", columns, rows)


if __name__ == "__main__":
    main()
