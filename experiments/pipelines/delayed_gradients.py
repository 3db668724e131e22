"""What gradients of the weights of one step ago bring and cost: seconds of a step, memory, and validation loss.

    python -m experiments.pipelines.delayed_gradients [--searched]

The first table simulates pipelines of equal stages with 1F1B, eager 1F1B and "2bw". The second trains a small language
model without the delay, with it, and with gradients of predicted weights, at several learning rates and with several
seeds; a delay is chosen where the mean validation loss rises by no more than is allowed. With `--searched` pipelines
are searched on described devices, too.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffshard
from cost.pipeline_schedules import Schedule
from cost.pipeline_steps import overlapped_lower_bound_s, pipeline_step
from cost.pipeline_times import StageTimes
from diffshard.pipelines.plans.consistency import simulated
from experiments.tables import print_table

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager", "2bw")
WORDS, CONTEXT, WIDTH, BATCH = 32, 4, 32, 64
WAYS = ("exact", "delayed", "predicted 0.5", "predicted 1", "smoothed")
"""Gradients of the weights now, of those of one step ago, of predicted ones, and as PipeMare predicts them."""
DECAY = math.exp(-2)
"""The weight of older changes in PipeMare's prediction (Yang et al., 2021, section 3.2), for a delay of one step."""
ALLOWED_INCREASE = 0.01
"""Nats of validation loss that the delay may cost."""


def simulated_rows(settings: Sequence[tuple[int, int, float, float]]) -> list[list[Any]]:
    """Returns a row for each setting: S, M, seconds of a transfer and of the end; a micro-batch takes 1 + 2 s."""
    rows = []
    for num_stages, count, send_s, end_s in settings:
        sends, ends = [send_s] * (num_stages - 1), [end_s] * num_stages
        times = StageTimes([1.0] * num_stages, [2.0] * num_stages, sends, sends)
        steps = [pipeline_step(times, schedule, count, ends) for schedule in SCHEDULES]
        bound_s = overlapped_lower_bound_s(times, count, ends)
        seconds, bubbles = [f"{step.step_s:.1f}" for step in steps], [f"{step.bubble:.1%}" for step in steps]
        in_flight = ", ".join(str(int(steps[i].simulation.in_flight[0])) for i in range(len(steps)))
        rows.append([num_stages, count, send_s, end_s, *seconds, f"{bound_s:.1f}", *bubbles[::2], in_flight])
    return rows


def validation_losses(
    make_optimizer: Callable[[Any], optax.GradientTransformation], rate: Any, key: jax.Array, num_steps: int
) -> jax.Array:
    """Trains a small model in each of `WAYS`; returns the validation losses, `[len(WAYS)]`."""
    optimizer = make_optimizer(rate)
    data_key, params_key, val_key, key = jax.random.split(key, 4)
    table = jax.random.dirichlet(data_key, jnp.full(WORDS, 0.1), (WORDS, WORDS))  # the next word by the last two

    def batch_of(key: jax.Array, size: int) -> jax.Array:
        first, key = jax.random.randint(key, (2, size), 0, WORDS), jax.random.split(key)[1]

        def word(last: Any, key: jax.Array) -> Any:
            found = jax.random.categorical(key, jnp.log(table[last[0], last[1]] + 1e-9))
            return (last[1], found), found

        _, words = jax.lax.scan(word, (first[0], first[1]), jax.random.split(key, CONTEXT + 1))
        return words.T

    def loss_fn(params: Any, words: jax.Array) -> jax.Array:
        h = params["embedding"][words[:, :CONTEXT]].reshape(len(words), -1) @ params["in"]
        h, _ = jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w["up"]) @ w["down"], None), h, params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], words[:, CONTEXT]).mean()

    def step(state: Any, words: jax.Array) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, words)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    keys = jax.random.split(params_key, 5)
    params = {
        "embedding": jax.random.normal(keys[0], (WORDS, WIDTH)),
        "in": jax.random.normal(keys[1], (CONTEXT * WIDTH, WIDTH)) / (CONTEXT * WIDTH) ** 0.5,
        "layers": {
            "up": jax.random.normal(keys[2], (4, WIDTH, 2 * WIDTH)) / WIDTH**0.5,
            "down": jax.random.normal(keys[3], (4, 2 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
        },
        "out": jax.random.normal(keys[4], (WIDTH, WORDS)) / WIDTH**0.5,
    }
    state, first = (params, optimizer.init(params)), batch_of(key, BATCH)
    val_words = batch_of(val_key, 4096)

    def trained_loss(step: Callable[..., Any], state: Any) -> jax.Array:
        state, _ = jax.lax.scan(
            lambda state, key: step(state, batch_of(key, BATCH)), state, jax.random.split(key, num_steps)
        )
        return loss_fn(diffshard.pipelines.current_version(state)[0], val_words)

    def smoothed_step(state: Any, words: jax.Array) -> Any:
        """Gradients of W(t - 1) and the mean of its changes, of which older ones have less weight."""
        (current, opt_state), previous, older, change = state
        change = jax.tree.map(lambda c, w, o: DECAY * c + (1 - DECAY) * (w - o), change, previous, older)
        read = jax.tree.map(jnp.add, previous, change)
        loss, gradients = jax.value_and_grad(loss_fn)(read, words)
        updates, opt_state = optimizer.update(gradients, opt_state, current)
        return ((optax.apply_updates(current, updates), opt_state), current, previous, change), loss

    losses = [trained_loss(step, state)]
    for predicted_steps in (0.0, 0.5, 1.0):
        late = diffshard.pipelines.delayed(step, predicted_steps=predicted_steps)
        losses.append(trained_loss(late, late.with_versions(state, first)[0][0]))
    smoothed, _ = jax.lax.scan(
        lambda state, key: smoothed_step(state, batch_of(key, BATCH)),
        (state, params, params, jax.tree.map(jnp.zeros_like, params)),
        jax.random.split(key, num_steps),
    )
    return jnp.stack([*losses, loss_fn(smoothed[0][0], val_words)])


def loss_rows(settings: Sequence[tuple[str, float]], num_steps: int, num_seeds: int) -> list[list[Any]]:
    """Returns a row for each optimiser and learning rate: the loss, its increases, and which way is chosen."""
    make = {"sgd": optax.sgd, "momentum": functools.partial(optax.sgd, momentum=0.9), "adamw": optax.adamw}
    keys, rows = jax.random.split(jax.random.key(0), num_seeds), []
    for name in dict.fromkeys(name for name, _ in settings):
        rates = [rate for other, rate in settings if other == name]
        train = jax.vmap(lambda rate, key, make=make[name]: validation_losses(make, rate, key, num_steps), (None, 0))
        losses = np.asarray(jax.jit(jax.vmap(train, (0, None)))(jnp.array(rates), keys))
        rows += [_loss_row(name, rate, found) for rate, found in zip(rates, losses, strict=True)]
    return rows


def _loss_row(name: str, rate: float, losses: np.ndarray) -> list[Any]:
    """Returns the row of an optimiser and rate from its losses, `[seeds, len(WAYS)]`.

    Of the delays whose mean increase is allowed the first one is chosen, which has the least memory; "smoothed" is not
    of the library. A loss that is no number has diverged.
    """
    if not np.isfinite(losses[:, 0]).all():
        return [name, rate, "diverged", *[""] * len(WAYS)]
    increases = np.where(np.isfinite(losses), losses, np.nan)[:, 1:] - losses[:, :1]
    means, errors = increases.mean(axis=0), increases.std(axis=0) / max(1, len(losses) - 1) ** 0.5
    words = [f"{m:+.4f} ± {e:.4f}" if np.isfinite(m) else "diverged" for m, e in zip(means, errors, strict=True)]
    allowed = [way for way, mean in zip(WAYS[1:-1], means, strict=False) if mean <= ALLOWED_INCREASE]
    return [name, rate, f"{losses[:, 0].mean():.4f}", *words, (*allowed, "exact")[0]]


def searched_rows(num_layers: int, width: int, batch_size: int, count: int) -> list[list[Any]]:
    """Returns a row for 1F1B, "2bw" and "2bw" with prediction: two stages found for scanned layers on two V100s."""
    layers = {"up": jax.ShapeDtypeStruct((num_layers, width, 4 * width), jnp.float32)}
    layers["down"] = jax.ShapeDtypeStruct((num_layers, 4 * width, width), jnp.float32)
    examples = jax.ShapeDtypeStruct((batch_size, width), jnp.float32)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def sgd_step(weights: Any, batch: Any) -> Any:
        x, y = batch
        loss_fn = lambda weights: jnp.mean((jax.lax.scan(layer, x, weights)[0] - y) ** 2)  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    rows = []
    ways: list[tuple[str, Schedule, float]] = [
        ("1f1b", "1f1b", 0.0),
        ("2bw", "2bw", 0.0),
        ("2bw, predicted", "2bw", 1.0),
    ]
    for name, schedule, predicted_steps in ways:
        pipeline = diffshard.Pipeline(
            microbatches=count, schedules=(schedule,), max_stages=2, predicted_steps=predicted_steps
        )
        cluster = diffshard.Cluster([diffshard.Hosts(2, devices=1, hardware="v100")])
        step = diffshard.search(sgd_step, cluster, pipeline=pipeline, donate_argnums=0)
        plan = step.plan(layers, (examples, examples))
        sizes = ", ".join(str(stage.last_layer - stage.first_layer + 1) for stage in plan.stages)
        peaks = ", ".join(f"{stage.peak_bytes / 2**20:.1f}" for stage in plan.stages)
        seconds = plan.step_s, simulated(plan).call_s, plan.lower_bound_s
        numbers = *(f"{1e3 * s:.2f}" for s in seconds), f"{plan.bubble:.1%}", peaks
        rows.append([name, *numbers, sizes])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", nargs="+", help="such as sgd:0.1 adamw:0.01; kinds are sgd, momentum and adamw")
    parser.add_argument("--searched", action="store_true", help="search pipelines for scanned layers, too")
    options = parser.parse_args(arguments)
    given = options.rates or [
        *(f"sgd:{rate}" for rate in (0.1, 0.3)),
        *(f"momentum:{rate}" for rate in (0.01, 0.03, 0.1)),
        *(f"adamw:{rate}" for rate in (0.001, 0.003, 0.01, 0.03)),
    ]
    settings = [(s, m, c, 1.0) for s, m in ((4, 8), (4, 32), (8, 8), (8, 32)) for c in (0.0, 0.5)]
    head = ["S", "M", "transfer s", "end s", *(f"{name} s" for name in SCHEDULES), "2bw bound s"]
    head += ["1f1b bubble", "2bw bubble", "in flight"]
    print_table("Equal stages, simulated: 1 s forward and 2 s backward", head, simulated_rows(settings))
    rates = [(text.split(":")[0], float(text.split(":")[1])) for text in given]
    head = ["optimiser", "rate", *WAYS, "chosen"]
    title = (
        f"Validation loss after {options.steps} steps, and its increase, mean and standard error of {options.seeds} "
    )
    title += f"seeds; {ALLOWED_INCREASE} allowed"
    print_table(title, head, loss_rows(rates, options.steps, options.seeds))
    if options.searched:
        head = ["schedule", "step ms", "call ms", "bound ms", "bubble", "peak MiB of each stage", "layers of stages"]
        rows = searched_rows(8, 1024, 4096, 8)
        print_table("8 layers of 1024 x 4096, batch 4096 in 8 micro-batches, 2 hosts of a V100, planned", head, rows)


if __name__ == "__main__":
    main()
