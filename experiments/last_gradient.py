"""Where the bilevel search delays gradients by a step, by optimiser and learning rate.

    python -m experiments.last_gradient

A small language model is trained on two simulated devices that each have half of the batch. The sum of its gradients
may be exact, or that of the last step, which is sent while this step computes. The search trains both ways and takes
the faster one whose validation loss is within the bound. Losses are measured; seconds are modelled, and the seconds of
a step's computing are given.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

import diffshard
from experiments.tables import print_table

WORDS, CONTEXT, WIDTH, BATCH = 32, 4, 32, 64
ALLOWED_INCREASE = 0.01
"""Nats of validation loss that the delay may cost."""
COMPUTE_S = 10e-6
"""Seconds of a step's computing that are given to the price."""
NETWORK = diffshard.Hardware("two hosts, 100 Gbit/s", 1e14, 1e12, 1e12, {"data": diffshard.Link(10e-6, 1 / 12.5e9)})
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adamw": optax.adamw,
}
SETTINGS = [
    *(("sgd", rate) for rate in (0.1, 0.3)),
    *(("momentum", rate) for rate in (0.01, 0.03, 0.1)),
    *(("adamw", rate) for rate in (0.001, 0.003, 0.01)),
]


def loss_fn(params: Any, words: jax.Array) -> jax.Array:
    """Returns the mean loss of the last of `words` by those before it, `[rows, CONTEXT + 1]`."""
    h = params["embedding"][words[:, :CONTEXT]].reshape(len(words), -1) @ params["in"]
    for up, down in zip(params["up"], params["down"], strict=True):
        h = h + jax.nn.gelu(h @ up) @ down
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], words[:, CONTEXT]).mean()


def start(key: jax.Array) -> dict[str, jax.Array]:
    """Returns random parameters."""
    keys = jax.random.split(key, 5)
    return {
        "embedding": jax.random.normal(keys[0], (WORDS, WIDTH)),
        "in": jax.random.normal(keys[1], (CONTEXT * WIDTH, WIDTH)) / (CONTEXT * WIDTH) ** 0.5,
        "up": jax.random.normal(keys[2], (4, WIDTH, 2 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[3], (4, 2 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
        "out": jax.random.normal(keys[4], (WIDTH, WORDS)) / WIDTH**0.5,
    }


def batches(key: jax.Array, count: int, size: int) -> list[jax.Array]:
    """Returns batches of word sequences, `[size, CONTEXT + 1]` each; a word follows from the two before it."""
    table = jax.random.dirichlet(jax.random.key(0), jnp.full(WORDS, 0.1), (WORDS, WORDS))

    def word(last: Any, key: jax.Array) -> Any:
        following = jax.random.categorical(key, jnp.log(table[last[0], last[1]] + 1e-9))
        return (last[1], following), following

    def batch(key: jax.Array) -> jax.Array:
        first_key, key = jax.random.split(key)
        first = jax.random.randint(first_key, (2, size), 0, WORDS)
        return jax.lax.scan(word, (first[0], first[1]), jax.random.split(key, CONTEXT + 1))[1].T

    return list(jax.lax.map(batch, jax.random.split(key, count)))


def row(optimizer: str, rate: float, num_steps: int) -> list[Any]:
    """Searches with one optimiser; returns its name, rate, both losses, what was chosen, and predicted seconds."""
    strategies = {"gradient": (diffshard.formats.Exact(), diffshard.formats.LastGradient(COMPUTE_S))}
    space = functools.partial(
        diffshard.formats.CommunicationSpace,
        param_specs=PartitionSpec(),
        batch_specs=PartitionSpec("data"),
        strategies=strategies,
        hardware=NETWORK,
    )
    search = diffshard.bilevel(
        loss_fn,
        AbstractMesh((2,), ("data",)),
        space=space,
        weights_optimizer=OPTIMIZERS[optimizer](rate),
        max_loss_increase=ALLOWED_INCREASE,
    )
    params_key, search_key, data_key, test_key, key = jax.random.split(jax.random.key(1), 5)
    params, first = start(params_key), batches(search_key, 2, BATCH)
    state, _ = search.update(search.init(search_key, params, first[0]), *first)
    data = diffshard.formats.CandidatesData(
        params,
        batches(data_key, num_steps, BATCH),
        batches(test_key, 64, BATCH),
        key,
        rungs=(num_steps,),
        num_candidates=1,
        num_refinements=0,
    )
    plan, _ = search.finish(state, candidates_data=data)
    assert plan.validation is not None
    # Named by the choice and not by the candidate: the proposal may be one of them.
    late = {(any(tried.choice), tried.exact_share): tried for tried in plan.validation.table}
    exact = next(tried for tried in plan.validation.table if not any(tried.choice))
    delayed = late.get((True, 0.0))
    increase = "" if delayed is None else f"{delayed.loss_increase:+.4f}"
    return [optimizer, rate, f"{exact.loss:.4f}", increase, plan.strategies[0], f"{1e6 * plan.seconds:.1f}"]


def main(args: Sequence[str] | None = None) -> None:
    """Prints a row for each optimiser and learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many rows, from the first")
    options = parser.parse_args(args)
    rows = [row(*setting, options.steps) for setting in SETTINGS[: options.settings]]
    columns = ["optimiser", "rate", "exact loss", "increase", "chosen", "µs sent"]
    print_table(f"Validation loss after {options.steps} steps; {ALLOWED_INCREASE} allowed", columns, rows)


if __name__ == "__main__":
    main()
