"""Runs the fuzzers and counts what becomes of the cases.

python -m experiments.fuzzing [--cases 10000] [--seed 0] [--kinds plans bilevel_plans ...] [--time-limit 1800]
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from diffshard.solving.solvers import greedy
from experiments.fuzzing import problems, scales
from experiments.fuzzing.bilevel_plans import BilevelPlanDamage
from experiments.fuzzing.functions import FunctionRuns
from experiments.fuzzing.instances import InstanceDamage
from experiments.fuzzing.outcomes import HELD, REFUSED, TAKEN
from experiments.fuzzing.plans import PlanDamage

KINDS = ("plans", "bilevel_plans", "instances", "problems", "scales", "no-greedy", "functions")
_ARE_MANY = KINDS[:-1]
"""Kinds whose cases take milliseconds; a random function takes seconds."""


@contextmanager
def outcomes(kind: str) -> Iterator[Callable[[int], str]]:
    """Gives a function from a seed to what becomes of its case."""
    if kind in ("scales", "no-greedy"):
        process, first_choices = scales.SharedProcess(), greedy.solve if kind == "scales" else scales.no_choices
        try:
            yield lambda seed: scales.outcome(seed, process, first_choices)
        finally:
            process.end()
        return
    if kind == "functions":
        runs = FunctionRuns()
        yield runs.outcome
        runs.print()
        return
    damage = {"plans": PlanDamage, "bilevel_plans": BilevelPlanDamage, "instances": InstanceDamage}
    yield damage[kind]().outcome if kind in damage else problems.outcome


def _in_time(seeds: Iterable[int], end_s: float) -> Iterator[int]:
    """Yields seeds until it is too late, by `time.perf_counter`."""
    return takewhile(lambda _: time.perf_counter() < end_s, seeds)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which a kind ends")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=_ARE_MANY)
    options = parser.parse_args(argv)
    for kind in options.kinds:
        start_s = time.perf_counter()
        with outcomes(kind) as outcome:
            seeds = range(options.seed, options.seed + options.cases)
            counts = Counter(outcome(seed) for seed in _in_time(seeds, start_s + options.time_limit))
        num_cases = counts.total()
        good = ", ".join(f"{counts.pop(name)} {name}" for name in (REFUSED, TAKEN, HELD) if name in counts)
        seconds = time.perf_counter() - start_s
        print(f"{kind}: {num_cases} cases: {good}, {counts.total()} faults, {seconds:.0f} s", flush=True)
        for name, count in counts.most_common():
            print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
