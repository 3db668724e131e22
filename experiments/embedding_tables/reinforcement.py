"""Policies that place one table after another, trained by reinforcement: AutoShard and DreamShard, described anew.

    python -m experiments.embedding_tables.reinforcement [--tasks 100] [--updates 200]

Tables come in the order of what they take alone. For each of them a policy scores all devices by the table, the sum of
the tables that a device has, and its costs so far; only devices with room are drawn. Sums make it serve any number of
devices and tables. REINFORCE takes what an episode's placement costs, beside the mean of all episodes of its task.

AutoShard knows what tables cost on devices. DreamShard does not: a network learns it from placements that its policy
makes and that are priced, and between two such rounds the policy learns from episodes that the network judges. Both
place whole tables only. Of a task 32 placements are drawn, the first one greedily, and each takes its best by its own
judgement.

Letters for sizes: N tasks, T tables (filled up), F features, D devices, E numbers of a representation, P placements.

Source: Zha et al., "AutoShard" (KDD 2022) and "DreamShard" (NeurIPS 2022). The networks' sizes are DreamShard's.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.embedding_tables import access_share
from diffshard.tables.solving import solve_space
from experiments.embedding_tables import tasks
from experiments.embedding_tables.baselines import SCORES, greedy_s, whole
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.space import EmbeddingTableSpace

AUTO, DREAM, OURS = "AutoShard", "DreamShard", "diffshard"
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of a table's first rows, whose lookups are features
_SIZE, _WIDE, _EPISODES, _TASKS_AT_ONCE, _DRAWN = 32, 128, 8, 8, 32
_LEARNING_RATE, _ENTROPY = 2e-3, 1e-3
_POOL_SEEDS, _MOST_TABLES, _TRAINING_DEVICES = range(1000, 1012), 60, 4
_ROUNDS, _PRICED, _COST_STEPS, _COST_BATCH = 10, 32, 150, 64
_FRESH = ((2, 30), (4, 100), (8, 60), (8, 120), (16, 120))  # devices and tables of tasks unlike those of training


class Task(NamedTuple):
    """Tables in the order in which they are placed; those beyond the last one are zeros.

    Attributes:
      features: `[T, F]`.
      costs_ms: forward lookups and the rest of each table alone, `[T, 2]`.
      num_bytes: of each table, as a part of what a device has room for, `[T]`.
      is_table: `[T]`.
    """

    features: Any
    costs_ms: Any
    num_bytes: Any
    is_table: Any


def task_of(tables: Sequence[EmbeddingTable], devices: TableDevices, size: int) -> tuple[Task, np.ndarray]:
    """Returns a task of alike devices, filled up to a number of tables, and the index of the table at each place."""
    parts = [whole(table, index, devices) for index, table in enumerate(tables)]
    order = sorted(range(len(tables)), key=lambda i: -parts[i].cost_s)
    limit = min(devices.memory_limit_bytes)
    filler = ((0, size - len(tables)), (0, 0))
    return Task(
        np.pad(np.array([features_of(tables[i]) for i in order], np.float32), filler),
        np.pad(np.array([(1e3 * parts[i].forward_s, 1e3 * parts[i].rest_s) for i in order], np.float32), filler),
        np.pad(np.array([parts[i].num_bytes / limit for i in order], np.float32), filler[0]),
        np.arange(size) < len(tables),
    ), np.array(order)


def features_of(table: EmbeddingTable) -> list[float]:
    """Returns the features of a table: logarithms of sizes and of lookups, and the lookups of its first rows."""
    access = None if table.access is None else np.array(table.access)
    shares = [float(access_share(access, table.rows, 0, share * table.rows)) for share in _SHARES]
    sizes = math.log2(table.dimension) / 7, math.log10(table.rows) / 7, math.log10(table.num_bytes) / 9
    return [*sizes, math.log2(1 + table.pooling_factor) / 7, table.dimension * table.pooling_factor / 1e4, *shares]


class CostNetwork(nn.Module):
    """The milliseconds of the tables of a device, from the sum of their representations."""

    def setup(self) -> None:
        """Names the layers."""
        self.table = nn.Sequential([nn.Dense(_WIDE), nn.relu, nn.Dense(_SIZE)])
        self.device = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(2)])

    def encode(self, features: jax.Array) -> jax.Array:
        """Returns representations of tables, `[.., E]`."""
        return self.table(features)

    def costs(self, sums: jax.Array) -> jax.Array:
        """Returns milliseconds of forward lookups and of the rest, `[.., 2]`."""
        return nn.softplus(self.device(sums))

    def __call__(self, features: jax.Array) -> jax.Array:
        """Makes all parameters."""
        return self.costs(self.encode(features))


class Policy(nn.Module):
    """Scores devices for a table."""

    def setup(self) -> None:
        """Names the layers."""
        self.table = nn.Sequential([nn.Dense(_WIDE), nn.relu, nn.Dense(_SIZE)])
        self.device_costs = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(_SIZE)])
        self.score = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(1)])

    def encode(self, features: jax.Array) -> jax.Array:
        """Returns representations of tables, `[T, E]`."""
        return self.table(features)

    def scores(self, sums: jax.Array, table: jax.Array, state: jax.Array) -> jax.Array:
        """Returns a score for each device, `[D]`, from its tables `[D, E]`, the next table `[E]` and costs `[D, 4]`."""
        table = jnp.broadcast_to(table, sums.shape)
        return self.score(jnp.concatenate([sums, table, self.device_costs(state)], axis=-1))[:, 0]

    def __call__(self, features: jax.Array, state: jax.Array) -> jax.Array:
        """Makes all parameters."""
        tables = self.encode(features)
        return self.scores(jnp.zeros((len(state), _SIZE)), tables[0], state)


class Judge(NamedTuple):
    """The predicted costs of tables: representations of tables that add up, and the costs of a sum.

    Attributes:
      tables: `[T, E]`.
      costs: of sums `[.., E]`, `[.., 2]`.
    """

    tables: jax.Array
    costs: Callable[[jax.Array], jax.Array]


class Episode(NamedTuple):
    """One placement.

    Attributes:
      devices: of each table, `[T]`.
      log_weight: of the draws together.
      entropy: of the draws, on average.
      step: by the judge, as a part of a step whose work is spread evenly.
      fits: whether each table found a device with room.
    """

    devices: jax.Array
    log_weight: jax.Array
    entropy: jax.Array
    step: jax.Array
    fits: jax.Array


def episode(parameters: Any, task: Task, judge: Judge, key: jax.Array, heat: Any, num_devices: int) -> Episode:
    """Places the tables of a task one after another; `heat` 0 takes the device of the best score, 1 draws."""
    policy: Any = Policy()
    tables = policy.apply(parameters, task.features, method=Policy.encode)
    alone = jnp.where(task.is_table[:, None], judge.costs(judge.tables), 0.0)
    even = alone.sum(0) / num_devices
    noise = heat * jax.random.gumbel(key, (len(task.is_table), num_devices))

    def place(carry: Any, inputs: Any) -> tuple[Any, Any]:
        sums, judged, filled = carry
        table, own, cost, num_bytes, is_table, own_noise = inputs
        state = jnp.concatenate([judge.costs(judged) / even, jnp.broadcast_to(cost / even, (num_devices, 2))], axis=1)
        scores = policy.apply(parameters, sums, table, state, method=Policy.scores)
        has_room = filled + num_bytes <= 1
        scores = jnp.where(has_room | ~has_room.any(), scores, -1e9)
        chosen = jnp.argmax(scores + own_noise)
        log_weights = jax.nn.log_softmax(scores)
        entropy = -(jnp.exp(log_weights) * log_weights).sum()
        put = (jnp.arange(num_devices) == chosen) * is_table
        carry = sums + put[:, None] * table, judged + put[:, None] * own, filled + put * num_bytes
        return carry, (chosen, is_table * log_weights[chosen], is_table * entropy, has_room.any() | ~is_table)

    empty = jnp.zeros((num_devices, _SIZE)), jnp.zeros((num_devices, judge.tables.shape[1])), jnp.zeros(num_devices)
    inputs = tables, judge.tables, alone, task.num_bytes, task.is_table, noise
    (_, judged, _), (devices, log_weights, entropies, fits) = jax.lax.scan(place, empty, inputs)
    step = judge.costs(judged).max(0).sum() / even.sum()
    return Episode(devices, log_weights.sum(), entropies.sum() / task.is_table.sum(), step, fits.all())


def true_judge(task: Task, _: Any = None) -> Judge:
    """Returns the judge that knows what tables cost: seconds of a device are sums over its tables."""
    return Judge(task.costs_ms, lambda sums: sums)


def learned_judge(task: Task, parameters: Any) -> Judge:
    """Returns the judge that a cost network is."""
    network: Any = CostNetwork()
    tables = network.apply(parameters, task.features, method=CostNetwork.encode)
    return Judge(tables, lambda sums: network.apply(parameters, sums, method=CostNetwork.costs))


def _loss(parameters: Any, of_tasks: Task, keys: jax.Array, judge_of: Any, cost: Any, num_devices: int) -> jax.Array:
    """Returns REINFORCE's loss over episodes of several tasks; those that do not fit count as twice as slow."""

    def one(task: Task, key: jax.Array) -> jax.Array:
        run = functools.partial(episode, parameters, task, judge_of(task, cost), heat=1.0, num_devices=num_devices)
        found = jax.vmap(lambda own: run(key=own))(jax.random.split(key, _EPISODES))
        step = jax.lax.stop_gradient(jnp.where(found.fits, found.step, 2 * found.step))
        advantage = step.mean() - step
        return -(advantage * found.log_weight).mean() - _ENTROPY * found.entropy.mean()

    return jax.vmap(one)(of_tasks, keys).mean()


def pool_of_tables() -> list[EmbeddingTable]:
    """Returns the tables that training tasks are drawn from, none of which is in the tasks that are judged."""
    return [table for seed in _POOL_SEEDS for table in tasks.generated(seed)[0]]


def drawn_task(
    pool: Sequence[EmbeddingTable], num_tables: int, num_devices: int, rng: np.random.Generator
) -> tuple[list[EmbeddingTable], TableDevices]:
    """Returns tables of a pool, none twice, and devices that have as much memory as those of generated tasks."""
    tables = [pool[i] for i in rng.choice(len(pool), num_tables, replace=False)]
    devices = tasks.alike_devices("v100", num_devices, tasks.DEVICE_BYTES)
    return tasks.fitting(tables, num_devices), devices


class Trained(NamedTuple):
    """A policy, the parameters of its cost network (AutoShard has none), and the processor seconds of training."""

    policy: Any
    cost: Any
    seconds: float


def train(name: str, training: Task, num_updates: int, seed: int) -> Trained:
    """Trains a policy on tasks, `Task` of arrays `[N, ..]`."""
    begin, rng, key = time.process_time(), np.random.default_rng(seed), jax.random.key(seed)
    num_tasks, _, num_features = training.features.shape
    policy = Policy().init(key, jnp.zeros((1, num_features)), jnp.zeros((_TRAINING_DEVICES, 4)))
    cost = CostNetwork().init(key, jnp.zeros((1, num_features)))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(_LEARNING_RATE))
    judge_of = true_judge if name == AUTO else learned_judge
    state, cost_state = optimiser.init(policy), optimiser.init(cost)

    @jax.jit
    def update(policy: Any, state: Any, of_tasks: Task, key: jax.Array, cost: Any) -> Any:
        keys = jax.random.split(key, _TASKS_AT_ONCE)
        gradients = jax.grad(_loss)(policy, of_tasks, keys, judge_of, cost, _TRAINING_DEVICES)
        changes, state = optimiser.update(gradients, state)
        return optax.apply_updates(policy, changes), state

    @jax.jit
    def placements(policy: Any, of_tasks: Task, key: jax.Array, cost: Any) -> jax.Array:
        def one(task: Task, key: jax.Array) -> jax.Array:
            return episode(policy, task, judge_of(task, cost), key, 1.0, _TRAINING_DEVICES).devices

        return jax.vmap(one)(of_tasks, jax.random.split(key, len(of_tasks.is_table)))

    @jax.jit
    def learn_costs(cost: Any, cost_state: Any, of_tasks: Task, devices: jax.Array) -> Any:
        gradients = jax.grad(_cost_loss)(cost, of_tasks, devices)
        changes, cost_state = optimiser.update(gradients, cost_state)
        return optax.apply_updates(cost, changes), cost_state

    def some(count: int) -> tuple[np.ndarray, Task]:
        chosen = rng.integers(num_tasks, size=count)
        return chosen, jax.tree.map(lambda array: array[chosen], training)

    priced_tasks, priced_devices = np.zeros(0, int), np.zeros((0, training.features.shape[1]), int)
    for done in range(num_updates):
        key, own = jax.random.split(key)
        if name == DREAM and done % max(num_updates // _ROUNDS, 1) == 0:
            chosen, of_tasks = some(_PRICED)
            priced_tasks = np.concatenate([priced_tasks, chosen])
            priced_devices = np.concatenate([priced_devices, placements(policy, of_tasks, own, cost)])
            for _ in range(_COST_STEPS):
                batch = rng.integers(len(priced_tasks), size=_COST_BATCH)
                own_tasks = jax.tree.map(lambda array, at=priced_tasks[batch]: array[at], training)
                cost, cost_state = learn_costs(cost, cost_state, own_tasks, priced_devices[batch])
        policy, state = update(policy, state, some(_TASKS_AT_ONCE)[1], own, cost)
    jax.block_until_ready(policy)
    return Trained(policy, cost, time.process_time() - begin)


def loads_of(values: jax.Array, devices: jax.Array, num_devices: int) -> jax.Array:
    """Returns sums over the tables of each device, `[D, ..]`, of what tables have, `[T, ..]`."""
    return jax.ops.segment_sum(values, devices, num_devices)


def _cost_loss(cost: Any, of_tasks: Task, devices: jax.Array) -> jax.Array:
    """Returns the mean squared error of the costs of devices, as parts of a task's even share."""

    def one(task: Task, devices: jax.Array) -> jax.Array:
        judge = learned_judge(task, cost)
        own = jnp.where(task.is_table[:, None], judge.tables, 0.0)
        found = judge.costs(loads_of(own, devices, _TRAINING_DEVICES))
        true = loads_of(task.costs_ms, devices, _TRAINING_DEVICES)
        return jnp.square((found - true) / true.mean()).mean()

    return jax.vmap(one)(of_tasks, devices).mean()


@functools.partial(jax.jit, static_argnums=(0, 5))
def _draw(name: str, policy: Any, cost: Any, task: Task, key: jax.Array, num_devices: int) -> Episode:
    judge = (true_judge if name == AUTO else learned_judge)(task, cost)

    def one(key: jax.Array, heat: jax.Array) -> Episode:
        return episode(policy, task, judge, key, heat, num_devices)

    return jax.vmap(one)(jax.random.split(key, _DRAWN), jnp.arange(_DRAWN) > 0)


def place(name: str, trained: Trained, tables: Sequence[EmbeddingTable], devices: TableDevices) -> list[Piece] | None:
    """Returns the whole tables on devices that a policy finds; None where none of its placements fits."""
    size = max(_MOST_TABLES, -(-len(tables) // _MOST_TABLES) * _MOST_TABLES)
    task, order = task_of(tables, devices, size)
    found = _draw(name, trained.policy, trained.cost, task, jax.random.key(0), devices.num_devices)
    best = int(np.where(found.fits, found.step, np.inf).argmin())
    if not found.fits[best]:
        return None
    chosen = np.asarray(found.devices[best])
    return [Piece(int(i), int(chosen[at]), 0, tables[i].rows, 0, tables[i].dimension) for at, i in enumerate(order)]


def step_of(pieces: list[Piece] | None, tables: Sequence[EmbeddingTable], devices: TableDevices) -> float:
    """Returns the seconds of a step by the cost that all ways are judged by; inf where nothing fits."""
    if pieces is None:
        return math.inf
    loads = np.zeros((2, devices.num_devices))
    for piece in pieces:
        part = whole(tables[piece.table], piece.table, devices)
        loads[:, piece.device] += part.forward_s, part.rest_s
    return float(loads.max(1).sum())


class WholeTablesSpace(EmbeddingTableSpace):
    """The placements that these policies have: whole tables on devices."""

    @functools.cached_property
    def strategies(self) -> Any:
        """The strategies of each table, T sequences of S_t."""
        return tuple(type(own)(own.kinds[:1]) for own in super().strategies)


def compared(tables: Sequence[EmbeddingTable], devices: TableDevices, trained: dict[str, Trained]) -> dict[str, Any]:
    """Returns the step's seconds and the processor seconds of each way on one task."""
    found = {}

    def run(name: str, step: Callable[[], float]) -> None:
        begin = time.process_time()
        step_s = step()
        found[name] = step_s, time.process_time() - begin

    for name in ("greedy, dimension", "greedy, lookups"):
        run(name, lambda name=name: greedy_s(tables, devices, SCORES[name]))
    for name, own in trained.items():
        run(name, lambda name=name, own=own: step_of(place(name, own, tables, devices), tables, devices))

    def solved(kind: type[EmbeddingTableSpace]) -> float:
        solution = solve_space(kind(tables, devices), key=0)
        return float(solution.cost) if solution.feasible else math.inf

    run("diffshard, whole tables", lambda: solved(WholeTablesSpace))
    run(OURS, lambda: solved(EmbeddingTableSpace))
    return found


def _rows(label: str, results: Sequence[dict[str, Any]], trained: dict[str, Trained]) -> list[tuple[str, ...]]:
    rows = []
    ours = np.array([result[OURS][0] for result in results])
    lookups = np.array([result["greedy, lookups"][0] for result in results])
    for name in results[0]:
        steps, seconds = np.array([result[name] for result in results]).T
        fits, both = np.isfinite(steps), np.isfinite(steps) & np.isfinite(lookups)
        ratios, gains = steps[fits] / ours[fits], 1 - steps[both] / lookups[both]
        shown = (f"{ratios.mean():.3f}", f"{ratios.max():.3f}") if fits.any() else ("none", "none")
        gain = f"{gains.mean():.1%}" if both.any() else "none"
        training = f"{trained[name].seconds:.0f}" if name in trained else "0"
        rows.append((label, name, f"{fits.sum()}/{len(steps)}", *shown, gain, f"{np.median(seconds):.3f}", training))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains both policies, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--fresh", type=int, default=2, help="tasks of each number of devices and tables")
    parser.add_argument("--training-tasks", type=int, default=150)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, pool = np.random.default_rng(options.seed), pool_of_tables()
    drawn = [
        drawn_task(pool, int(rng.integers(10, _MOST_TABLES + 1)), _TRAINING_DEVICES, rng)
        for _ in range(options.training_tasks)
    ]
    training: Any = jax.tree.map(lambda *own: np.stack(own), *(task_of(*one, _MOST_TABLES)[0] for one in drawn))
    trained = {name: train(name, training, options.updates, options.seed) for name in (AUTO, DREAM)}
    results = [compared(*tasks.generated(seed), trained) for seed in range(options.tasks)]
    columns = ("tasks", "way", "fits", "mean/diffshard", "most", "less than greedy", "s", "training s")
    if results:
        print_table("Generated tasks, step time as a ratio", columns, _rows("generated", results, trained))
    rows = []
    others = [table for seed in range(2000, 2006) for table in tasks.generated(seed)[0]] if options.fresh else []
    for num_devices, num_tables in _FRESH if options.fresh else ():
        fresh = [drawn_task(others, num_tables, num_devices, rng) for _ in range(options.fresh)]
        rows += _rows(f"{num_tables} tables on {num_devices}", [compared(*one, trained) for one in fresh], trained)
    if rows:
        print_table("Fresh tables, and numbers of tables and devices that no policy was trained on", columns, rows)


if __name__ == "__main__":
    main()
