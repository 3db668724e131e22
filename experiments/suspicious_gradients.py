"""Training with faulty replicas: plain mean, median and Zeno beside training without faults.

    python -m experiments.suspicious_gradients [--tasks gpt classifier] [--faults sign NaN] [--faulty 1 2 3 5]
    python -m experiments.suspicious_gradients --held-out

Eight replicas train a small model on real data, and at each step some of them send something else than their gradient.
The tables have the held-out loss over that of the same training without faults. The task "autoencoder" and the fault
"poison" are for `--held-out`, after everything was chosen.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import diffshard
from experiments.suspicious_tasks import FAULT_NAMES, HELD_OUT_FAULT, HELD_OUT_TASK, POISON, TASKS, Task, with_faults
from experiments.tables import print_table

NUM_REPLICAS = 8
METHODS = ("mean", "median", "zeno", "zeno with memory")
MEMORY = 0.95
_DIVERGED = 100.0  # times the loss without faults; all from there on are the same failure


@partial(jax.jit, static_argnames=("task", "method", "num_dropped", "num_steps"))
def train(
    task: Task, method: str, fault: jax.Array, num_faulty: jax.Array, num_dropped: int, num_steps: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Trains a model with faulty replicas.

    Returns:
      The held-out loss after training, and how many replicas were kept at each step, `[num_steps]`.
    """
    init_key, data_key, fault_key = jax.random.split(key, 3)
    params = task.init(init_key)

    def step(state: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        params, optimizer_state, standings = state
        batch_key, check_key = jax.random.split(jax.random.fold_in(data_key, number))
        batch, check = task.draw(batch_key, NUM_REPLICAS * task.per_replica), task.draw(check_key, task.per_replica)
        is_bad = jnp.arange(NUM_REPLICAS * task.per_replica) < num_faulty * task.per_replica
        is_bad &= fault == FAULT_NAMES.index(POISON)
        batch = jax.tree.map(partial(_where, is_bad), task.poison(batch), batch)
        _, by_replica = diffshard.robust_gradients.replica_gradients(task.loss, NUM_REPLICAS)(params, batch)
        received = with_faults(by_replica, fault, num_faulty, jax.random.fold_in(fault_key, number))
        kept = jnp.ones(NUM_REPLICAS, bool)
        if method.startswith("zeno"):
            options = {"num_dropped": num_dropped, "step_size": task.step_size, "memory": MEMORY * (method != "zeno")}
            gradients, report = diffshard.robust_gradients.zeno_mean(
                task.loss, params, received, check, standings, **options
            )
            kept, standings = report.kept, report.standings
        else:
            combine = jnp.median if method == "median" else jnp.mean
            gradients = jax.tree.map(lambda g: combine(g, axis=0), received)
        updates, optimizer_state = task.optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state, standings), jnp.sum(kept)

    start = params, task.optimizer.init(params), jnp.zeros(NUM_REPLICAS)
    (params, _, _), num_kept = jax.lax.scan(step, start, jnp.arange(num_steps))
    return task.loss(params, task.held_out), num_kept


def _where(is_bad: jax.Array, bad: jax.Array, good: jax.Array) -> jax.Array:
    """Returns some examples of bad data and the others of good data, `[B, ...]`."""
    return jnp.where(is_bad.reshape(-1, *[1] * (good.ndim - 1)), bad, good)


def ratio_text(ratio: float) -> str:
    """Returns a loss over the one without faults as text."""
    return f"{ratio:.3f}" if ratio < _DIVERGED else "fails"


def rows_of(name: str, faults: Sequence[str], faulty: Sequence[int], num_steps: int, seeds: int) -> list[list[str]]:
    """Trains a task in all ways; returns a row for each fault and number of faulty replicas."""
    task = TASKS[name]()

    def losses(method: str, fault: str, num_faulty: int, num_dropped: int) -> list[float]:
        numbers = jnp.int32(FAULT_NAMES.index(fault)), jnp.int32(num_faulty)
        run = partial(train, task, method, *numbers, num_dropped, num_steps)
        return [float(run(jax.random.key(seed))[0]) for seed in range(seeds)]

    free = losses("mean", "none", 0, 0)
    rows = [[name, "none", "0", *("1.000" if m == "mean" else _ratios(losses(m, "none", 0, 3), free) for m in METHODS)]]
    print(f"{name} without faults: " + " ".join(f"{loss:.4f}" for loss in free), flush=True)
    print(" | ".join(rows[-1]), flush=True)
    for fault in faults:
        for q in faulty:
            dropped = {m: q if m.startswith("zeno") else 0 for m in METHODS}
            rows.append([name, fault, str(q), *(_ratios(losses(m, fault, q, dropped[m]), free) for m in METHODS)])
            print(" | ".join(rows[-1]), flush=True)
    return rows


def _ratios(losses: Sequence[float], free: Sequence[float]) -> str:
    """Returns the worst ratio of all seeds."""
    ratios = [loss / other for loss, other in zip(losses, free, strict=True)]
    finite = [ratio if ratio == ratio else float("inf") for ratio in ratios]
    return ratio_text(max(finite))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[t for t in TASKS if t != HELD_OUT_TASK])
    shown = [fault for fault in FAULT_NAMES if fault not in ("none", HELD_OUT_FAULT)]
    parser.add_argument("--faults", nargs="+", choices=FAULT_NAMES, default=shown)
    parser.add_argument("--faulty", nargs="+", type=int, default=[1, 2, 3, 5], help="faulty replicas of eight")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each row, of which the worst is shown")
    parser.add_argument("--held-out", action="store_true", help="the task and the fault that were kept aside")
    options = parser.parse_args(argv)
    pairs = [(task, options.faults) for task in options.tasks]
    if options.held_out:
        pairs = [(HELD_OUT_TASK, [*options.faults, HELD_OUT_FAULT]), *((t, [HELD_OUT_FAULT]) for t in options.tasks)]
    rows = [r for t, faults in pairs for r in rows_of(t, faults, options.faulty, options.steps, options.seeds)]
    print_table("held-out loss over that without faults", ("task", "fault", "faulty of 8", *METHODS), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
