"""What searching the start is worth at equal compute: `init_search` against one long training and best of n.

Each method gets the same number of steps for each seed: "one start" trains one initialisation with all of them, "best
of n" trains n to the end and keeps the one with the least loss on the scoring batch, `init_search` halves them in
rungs, or halves half as many and then as many again around the survivors. Losses are on data that nothing is scored
by.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diffshard.initialisation import init_search
from experiments.models import gpt, text
from experiments.tables import print_table

RUNGS = (50, 50, 100)
STARTS = 8
_PRODUCTS = 3.0  # that are known in phase retrieval, for each unknown


class Case(NamedTuple):
    """A problem with a loss and data.

    Attributes:
      name: for the table.
      init: parameters of a key.
      loss: of parameters and a batch.
      batches: `[count, ...]` of a key and a count.
      test: a batch that is not trained on.
      optimizer: of all methods.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[jax.Array, int], Any]
    test: Any
    optimizer: optax.GradientTransformation


class MethodResult(NamedTuple):
    """A method on a case: test losses `[seeds]`, steps of training for each seed, and seconds in all."""

    case: str
    method: str
    losses: np.ndarray
    steps: int
    seconds: float


def two_layers(quick: bool) -> Case:
    """Makes a narrow network fit a wider one's outputs: it has bad local minima."""
    width, hidden = (4, 4) if quick else (8, 8)
    teacher = jax.random.normal(jax.random.key(7), (2 * hidden, width))

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(key, (64, width))
        return x, jnp.sin(x @ teacher.T).sum(axis=1)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {
            "up": jax.random.normal(first, (width, hidden)) * width**-0.5,
            "down": jax.random.normal(second, (hidden,)) * hidden**-0.5,
        }

    def loss(params: dict[str, jax.Array], data: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.square(jax.nn.relu(data[0] @ params["up"]) @ params["down"] - data[1]).mean()

    def batches(key: jax.Array, count: int) -> Any:
        return jax.vmap(batch)(jax.random.split(key, count))

    return Case("two layers", init, loss, batches, _join(batches(jax.random.key(8), 16)), optax.adam(1e-2))


def phase_retrieval(quick: bool) -> Case:
    """Seeks a vector from the squares of its products with few known ones: many starts end in a local minimum."""
    width = 8 if quick else 32
    hidden = jax.random.normal(jax.random.key(9), (width,))
    hidden = hidden / jnp.linalg.norm(hidden)

    def products(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(key, (count, width))
        return x, jnp.square(x @ hidden)

    products_given = products(jax.random.key(10), round(_PRODUCTS * width))

    def loss(params: jax.Array, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.square(jnp.square(data[0] @ params) - data[1]).mean()

    def batches(key: jax.Array, count: int) -> Any:
        del key  # all products, in every step
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), products_given)

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (width,)) * width**-0.5

    return Case("phase retrieval", init, loss, batches, products(jax.random.key(12), 1024), optax.adam(1e-2))


def byte_gpt(quick: bool) -> Case:
    """Trains a small GPT on bytes of text; the last fifth of the text is the test."""
    sizes = gpt.Sizes(layers=1, width=16, heads=2, sequence=16) if quick else gpt.Sizes(layers=2, width=32, sequence=32)
    network, tokens = gpt.GPT(sizes), text.load()
    cut = len(tokens) * 4 // 5

    def init(key: jax.Array) -> Any:
        return network.init(key, jnp.zeros((1, sizes.sequence), jnp.int32))["params"]

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits = jnp.asarray(network.apply({"params": params}, batch[:, :-1]))
        return gpt.next_token_loss(logits, batch)

    def batches(key: jax.Array, count: int) -> jax.Array:
        keys = jax.random.split(key, count)
        return jnp.stack([text.sample(tokens[:cut], k, 8, sizes.sequence) for k in keys])

    test = text.sample(tokens[cut:], jax.random.key(11), 64, sizes.sequence)
    return Case("byte GPT", init, loss, batches, test, optax.adam(3e-3))


CASES = (two_layers, byte_gpt, phase_retrieval)


def compare_methods(case: Case, seeds: int, rungs: tuple[int, ...], starts: int) -> list[MethodResult]:
    """Returns one row for each method; every method takes as many steps, to within one start's."""
    total = _steps(starts, rungs)
    few = max(round(total / sum(rungs)), 1)
    half = max(starts // 2, 1)
    methods: dict[str, Callable[[jax.Array], tuple[Any, int]]] = {
        "one start, all steps": lambda key: _search(case, key, 1, (total,)),
        f"best of {few}": lambda key: _search(case, key, few, (sum(rungs),)),
        f"init_search, {starts} starts": lambda key: _search(case, key, starts, rungs),
        f"init_search, {half} starts and {half} finer": lambda key: _search(case, key, half, rungs, half),
        "one start, one training's steps": lambda key: _search(case, key, 1, (sum(rungs),)),
    }
    rows = []
    for name, method in methods.items():
        start = time.perf_counter()
        results = [method(jax.random.key(100 + seed)) for seed in range(seeds)]
        losses = np.array([float(jax.jit(case.loss)(params, case.test)) for params, _ in results])
        rows.append(MethodResult(case.name, name, losses, results[0][1], time.perf_counter() - start))
        print(f"{case.name}, {name}: {losses.mean():.4f}", flush=True)
    return rows


def main(quick: bool, seeds: int) -> list[MethodResult]:
    """Prints the table; returns its rows."""
    rungs, starts = ((2, 2), 4) if quick else (RUNGS, STARTS)
    rows = [row for make in CASES for row in compare_methods(make(quick), seeds, rungs, starts)]
    print_table(
        f"Starts: test loss over {seeds} seeds",
        ("case", "method", "mean", "median", "worst", "steps", "seconds"),
        [
            (
                row.case, row.method, f"{row.losses.mean():.4f}", f"{np.median(row.losses):.4f}",
                f"{row.losses.max():.4f}", row.steps, f"{row.seconds:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return rows


def _search(case: Case, key: jax.Array, starts: int, rungs: tuple[int, ...], finer: int = 0) -> tuple[Any, int]:
    keys_key, data_key = jax.random.split(key)
    batches = case.batches(data_key, sum(rungs) + 1)
    keys = jax.random.split(keys_key, starts)
    params, record = init_search(
        case.init, case.loss, keys, batches, optimizer=case.optimizer, rungs=rungs, num_finer=finer
    )
    return params, record.steps


def _steps(starts: int, rungs: tuple[int, ...]) -> int:
    """Steps of a halving that keeps one half each time."""
    steps = 0
    for rung in rungs:
        steps += starts * rung
        starts = -(-starts // 2)
    return steps


def _join(batches: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches)
