"""What a step of the search costs beside a plain training step: seconds, and memory for temporaries.

The choice takes a step in every eighth one by default, which is dear; the mean over a round of them is what counts.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import diffshard
from diffshard.bilevel_search.search import CHOICE_EVERY
from experiments import bilevel_training as task
from experiments.bilevel_searches import MARGIN
from experiments.tables import print_table


class StepOverhead(NamedTuple):
    """A compiled step.

    Attributes:
      step: for people.
      seconds: median of a call, in the mean over a round of steps with and without one of the choice.
      choice_s: median of a call with a step of the choice.
      temporary_bytes: by the compiler.
      compile_s: seconds to trace and compile.
    """

    step: str
    seconds: float
    choice_s: float
    temporary_bytes: int
    compile_s: float


def main(setting: task.Setting, repeats: int) -> list[StepOverhead]:
    """Prints the table; returns its rows, the plain step first."""
    work, optimizer = setting.task(), setting.optimizer
    space, params = task.space(setting, "slow", work), work.init(jax.random.key(0))
    train, validation = (task.as_list(task.batches(work, name, 0, 1))[0] for name in ("train", "search"))
    exact = space.exact_choice()

    def plain(params: Any, params_state: Any, residuals: Any, batch: Any, step: jax.Array) -> Any:
        loss, gradients, residuals = space.loss_and_gradients(params, batch, exact, residuals, jax.random.key(0), step)
        updates, params_state = optimizer.update(gradients, params_state, params)
        return optax.apply_updates(params, updates), params_state, residuals, loss

    state = params, optimizer.init(params), space.init_residuals(params)
    steps = [("training alone", 1, *_compiled(plain, ((*state, train, jnp.int32(0)),)))]
    search = diffshard.bilevel(None, space=space, weights_optimizer=optimizer, max_loss_increase=MARGIN)
    first = search.init(jax.random.key(1), params, train)
    states = first, first._replace(step=first.step + 1)  # with a step of the choice, and without
    program = _compiled(search.update, [(state, train, validation) for state in states])
    steps.append(("search", CHOICE_EVERY, *program))
    print(f"compiled the search in {program[2]:.1f} s", flush=True)
    times: list[list[list[float]]] = [[[] for _ in calls] for _, _, calls, _, _ in steps]
    for _ in range(repeats):  # in turns, so that other work on the machine meets all alike
        for (_, _, calls, _, _), times_of_step in zip(steps, times, strict=True):
            for call, seconds in zip(calls, times_of_step, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(call())
                seconds.append(time.perf_counter() - start)
    rows = []
    for (name, every, _, temporary_bytes, compile_s), times_of_step in zip(steps, times, strict=True):
        medians = [statistics.median(seconds) for seconds in times_of_step]
        mean = (medians[0] + (every - 1) * medians[-1]) / every
        rows.append(StepOverhead(name, mean, medians[0], temporary_bytes, compile_s))
    alone = rows[0]
    print_table(
        f"A step of the search beside a training step: medians of {repeats}, the choice in every {CHOICE_EVERY}th",
        ("step", "mean ms", "ratio", "with the choice ms", "temporaries MiB", "ratio", "compile s"),
        [
            (
                row.step, f"{1e3 * row.seconds:.1f}", f"{row.seconds / alone.seconds:.2f}", f"{1e3 * row.choice_s:.1f}",
                f"{row.temporary_bytes / 2**20:.1f}", f"{row.temporary_bytes / alone.temporary_bytes:.2f}",
                f"{row.compile_s:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return rows


def _compiled(
    fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> tuple[list[Callable[[], Any]], int, float]:
    """Returns a call with each of these arguments, temporaries in bytes, and the seconds that compiling took."""
    start = time.perf_counter()
    program = jax.jit(fn).lower(*arguments[0]).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    if memory is None:
        raise ValueError("the backend has no memory analysis; run with JAX_PLATFORMS=cpu.")
    return [functools.partial(program, *some) for some in arguments], memory.temp_size_in_bytes, seconds
