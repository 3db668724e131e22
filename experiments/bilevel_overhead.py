"""What a step of the search costs beside a plain training step: seconds, and memory for temporaries."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import diffshard
from experiments import bilevel_training as task
from experiments.bilevel_loss import MARGIN
from experiments.models import device_gpt
from experiments.tables import print_table

SEARCHES = (("curvature", 1), ("mixture", 1), ("mixture", 2), ("sampled", 1), ("sampled", 2))


class Row(NamedTuple):
    """A compiled step.

    Attributes:
      step: for people.
      seconds: median of one call.
      temporary_bytes: by the compiler.
      compile_s: seconds to trace and compile.
    """

    step: str
    seconds: float
    temporary_bytes: int
    compile_s: float


def main(setting: task.Setting, repeats: int, searches: Sequence[tuple[str, int]] = SEARCHES) -> list[Row]:
    """Prints the table; returns its rows, the plain step first."""
    space, sizes = task.space(setting, "slow"), setting.sizes
    params = device_gpt.init(jax.random.key(0), sizes)
    train, held = task.batches("train", 0, 1, sizes)[0], task.batches("search", 0, 1, sizes)[0]
    exact = space.lossless_choice()

    def plain(params: Any, weights_state: Any, residuals: Any, batch: jax.Array, step: jax.Array) -> Any:
        loss, gradients, residuals = space.loss_and_gradients(params, batch, exact, residuals, jax.random.key(0), step)
        updates, weights_state = task.OPTIMIZER.update(gradients, weights_state, params)
        return optax.apply_updates(params, updates), weights_state, residuals, loss

    state = params, task.OPTIMIZER.init(params), space.state(params)
    steps = [("training alone", _compiled(plain, *state, train, jnp.int32(0)))]
    for estimator, order in searches:
        search = diffshard.bilevel(
            None,
            space=space,
            weights_optimizer=task.OPTIMIZER,
            max_loss_increase=MARGIN,
            estimator=estimator,
            order=order,
        )
        state = search.init(jax.random.key(1), params, train)
        name = f"{estimator}, order {order}"
        steps.append((name, _compiled(search.update, state, train, held)))
        print(f"compiled {name} in {steps[-1][1][2]:.1f} s", flush=True)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):  # in turns, so that other work on the machine meets all alike
        for (_, (call, _, _)), taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            taken.append(time.perf_counter() - start)
    rows = [
        Row(name, statistics.median(taken), bytes_, compile_s)
        for (name, (_, bytes_, compile_s)), taken in zip(steps, times, strict=True)
    ]
    alone = rows[0]
    print_table(
        f"A step of the search beside a training step, median of {repeats}",
        ("step", "ms", "ratio", "temporaries MiB", "ratio", "compile s"),
        [
            (
                row.step, f"{1e3 * row.seconds:.1f}", f"{row.seconds / alone.seconds:.2f}",
                f"{row.temporary_bytes / 2**20:.1f}", f"{row.temporary_bytes / alone.temporary_bytes:.2f}",
                f"{row.compile_s:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return rows


def _compiled(fn: Callable[..., Any], *arguments: Any) -> tuple[Callable[[], Any], int, float]:
    """A call with these arguments, its temporaries in bytes, and the seconds that compiling took."""
    start = time.perf_counter()
    program = jax.jit(fn).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    if memory is None:
        raise ValueError("the backend has no memory analysis; run with JAX_PLATFORMS=cpu.")
    return lambda: program(*arguments), memory.temp_size_in_bytes, seconds
