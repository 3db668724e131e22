"""Trainings that begin with a plan for wrong rates and search while they train, beside the first plan and the best one.

    python -m experiments.search_while_training [--steps 20000] [--cases 8] [--neighbour]

The first plan is for a preset that is wrong by a factor of 3 in arithmetic and in one link. Three trainings of a small
MLP take turns step by step on 8 host devices, so that other work on the machine slows all alike: one searches while it
trains, one keeps the first plan, and one has the best plan from the start: of all that such presets and the right one
lead to, the one whose steps were measured to be the fastest. When nothing has been searched or moved for a while, the
steps until half-way, and then until the end, are not run but counted at the median of the last 150.

Seconds are the processor's, of all threads together, because the machine does other work as well; the training that
searches is given the same clock. What the search and its compilations take is added to its own training. Compiling the
first plan is left out for all. With `--neighbour` all threads are kept to one core from half-way on, as if somebody had
the other.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import diffshard
from diffshard.elastic.rates import scaled
from diffshard.elastic.searching_step import SearchingStep, search_while_training
from diffshard.plans.printing import format_percent, format_s
from diffshard.sharding_search.fingerprints import plan_facts
from experiments.host_devices import host_mesh
from experiments.models import mlp
from experiments.models.model import Model, arguments
from experiments.tables import print_table

FACTOR = 3.0
SETTLED_ROUNDS, MOST_ROUNDS, TOURNAMENT_ROUNDS = 150, 700, 40
MOST_DIFFERENCE = 1e-4
"""Relative difference of losses that is rounding: sums have another order in each plan, and adam carries it on."""


class WrongPreset(NamedTuple):
    """A preset in which arithmetic and the link of an axis are so many times as slow as on the machine."""

    arithmetic: float
    axis: str
    link: float

    def __str__(self) -> str:
        return f"arithmetic {_word(self.arithmetic)}, {self.axis} {_word(self.link)}"

    def of(self, hardware: diffshard.Hardware) -> diffshard.Hardware:
        """Returns the hardware as this wrong preset has it."""
        link = {f"{part} of {self.axis}": math.log(self.link) for part in ("latency", "bytes")}
        return scaled(hardware, {"arithmetic": math.log(self.arithmetic), "memory": 0.0, **link})


_SLOWNESS = 1 / FACTOR, FACTOR
WRONG_PRESETS = [WrongPreset(*case) for case in itertools.product(_SLOWNESS, ("data", "model"), _SLOWNESS)]


class Training:
    """A training whose steps are timed; `seconds` counts those that were not run, too."""

    def __init__(self, step: Callable[..., Any], state: Any):
        self.step, self.seconds, self.losses = step, 0.0, []
        self._state, self._recent = state, []

    def run(self, batch: Any, *, is_alone: bool = True) -> None:
        """Makes a step; one that is not alone in its process counts as the median of those before."""
        start_s = time.process_time()
        self._state, loss = jax.block_until_ready(self.step(self._state, batch))
        step_s = time.process_time() - start_s
        self.losses.append(float(loss))
        if is_alone:
            self._recent = [*self._recent[1 - SETTLED_ROUNDS :], step_s]
        self.seconds += step_s if is_alone else self.step_s

    @property
    def step_s(self) -> float:
        """The median seconds of the last steps."""
        return statistics.median(self._recent)

    def skip(self, num_steps: int) -> None:
        """Counts steps that are not run."""
        self.seconds += num_steps * self.step_s
        if isinstance(self.step, SearchingStep):
            self.step.num_steps += num_steps


class Result(NamedTuple):
    """The seconds of the three trainings of a case.

    Attributes:
      step_s: of the last steps of each: searching, first, best.
      seconds: of all steps of each, and of the search.
      search_s: seconds during which the search worked, which are in those of its training.
    """

    preset: WrongPreset
    step_s: list[float]
    seconds: list[float]
    search_s: float
    num_moves: int
    difference: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints the table; 1 if losses differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of each training, of which most are counted only")
    parser.add_argument("--cases", type=int, default=len(WRONG_PRESETS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--neighbour", action="store_true")
    options = parser.parse_args(argv)
    model = mlp.make(layers=4, width=options.width, batch=options.batch)
    best, presets = fastest(model)
    print(f"The best plan from the start is that of: {presets}", flush=True)
    results = []
    for preset in WRONG_PRESETS[: options.cases]:
        results.append(result_of(model, preset, best, options.steps, options.neighbour))
        print_results(results[-1:], options.steps)
    print_results(results, options.steps)
    return int(max(result.difference for result in results) > MOST_DIFFERENCE)


def searched(model: Model, hardware: diffshard.Hardware) -> Any:
    """Returns the step of a model, searched for hardware."""
    return diffshard.search(model.step, host_mesh((2, 4)), hardware=hardware, donate_argnums=0, time_limit_s=5)


def right_preset() -> diffshard.Hardware:
    """Returns the preset of the host devices."""
    return diffshard.preset("cpu", dict(host_mesh((2, 4)).shape))


def fresh(step: Any, model: Model) -> Training:
    """Returns a training at its beginning, compiled."""
    state, batch = arguments(model)
    step.compile(state, batch)
    return Training(step, step.plan(state, batch).shard(state))


def fastest(model: Model) -> tuple[Any, str]:
    """Runs the plans of all presets in turn; returns the step of the fastest one, and the presets that lead to it."""
    host_mesh((2, 4))  # before JAX is used
    args, steps = arguments(model), {}
    named = {"the right preset": right_preset()} | {str(preset): preset.of(right_preset()) for preset in WRONG_PRESETS}
    for name, hardware in named.items():
        step = searched(model, hardware)
        steps.setdefault(plan_facts(step.plan(*args))["the plan's layout"], (step, []))[1].append(name)
    trainings = {key: fresh(step, model) for key, (step, _) in steps.items()}
    for _ in range(TOURNAMENT_ROUNDS):
        for training in trainings.values():
            training.run(args[1])
    best = min(trainings, key=lambda key: trainings[key].step_s)
    for key, training in trainings.items():
        print(f"  {format_s(training.step_s)}: {'; '.join(steps[key][1])}")
    return steps[best][0], "; ".join(steps[best][1])


def result_of(model: Model, preset: WrongPreset, best: Any, num_steps: int, with_neighbour: bool) -> Result:
    """Runs three trainings in turn, the second half beside a neighbour or not."""
    step = searched(model, preset.of(right_preset()))
    searching, first, known = (fresh(s, model) for s in (step, step, best))
    searching.step = search_while_training(step, num_steps, clock=time.process_time)
    trainings, cores, search_s, made = (searching, first, known), os.sched_getaffinity(0), 0.0, 0
    with searching.step as searching_step:
        for half in (1, 2):
            if half == 2 and with_neighbour:
                keep_to({min(cores)})
            quiet = 0
            for _ in range(MOST_ROUNDS):
                batch = jax.block_until_ready(model.make_batch(jax.random.key(made)))
                start_s, is_searching = time.process_time(), searching_step.is_searching
                before_s = sum(training.seconds for training in trainings)
                for training in trainings:
                    training.run(batch, is_alone=not is_searching)
                made += 1
                if is_searching:
                    own_s = sum(training.seconds for training in trainings) - before_s
                    search_s += max(time.process_time() - start_s - own_s, 0.0)
                last = [event.num_steps for event in searching_step.history if event.action != "stays"]
                quiet = 0 if searching_step.is_searching or searching_step.num_steps - last[-1] < 30 else quiet + 1
                if quiet >= SETTLED_ROUNDS:
                    break
            left = num_steps * half // 2 - searching_step.num_steps
            for training in trainings:
                training.skip(left)
        keep_to(cores)
        print(searching_step)
        num_moves = searching_step.num_moves
    searching.seconds += search_s
    losses = np.array([training.losses for training in trainings])
    difference = float(np.max(np.abs(losses - losses[1]) / losses[1]))
    return Result(
        preset, [t.step_s for t in trainings], [t.seconds for t in trainings], search_s, num_moves, difference
    )


def keep_to(cores: set[int]) -> None:
    """Lets all threads of this process run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def print_results(results: Sequence[Result], num_steps: int) -> None:
    """Prints a row for each case, and the means of the ratios."""
    rows = [
        [
            r.preset, *(format_s(s) for s in r.step_s), *(f"{s:.0f}" for s in r.seconds), f"{r.search_s:.0f}",
            f"{r.seconds[0] / r.seconds[1]:.2f}", f"{r.seconds[0] / r.seconds[2]:.2f}", r.num_moves,
            f"{r.difference:.0e}",
        ]
        for r in results
    ]  # fmt: skip
    columns = (
        "preset: too", "searching: step", "first", "best", "searching: s", "first", "best", "of it search", "to first",
        "to best", "moves", "losses differ",
    )  # fmt: skip
    print_table(f"{num_steps:,} steps of each training", columns, rows)
    if len(results) > 1:
        ratios = np.exp(np.mean(np.log([[r.seconds[0] / r.seconds[i] for i in (1, 2)] for r in results]), axis=0))
        first = np.exp(np.mean([math.log(r.seconds[1] / r.seconds[2]) for r in results]))
        print(
            f"Geometric means: searching takes {format_percent(ratios[0])} of the first plan's seconds and "
            f"{ratios[1]:.2f} times those of the best, the first plan {first:.2f} times."
        )


def _word(slowness: float) -> str:
    return "slow" if slowness > 1 else "fast"


if __name__ == "__main__":
    raise SystemExit(main())
