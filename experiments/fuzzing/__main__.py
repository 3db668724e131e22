"""Runs the fuzzers and counts what becomes of the cases.

python -m experiments.fuzzing [--cases 10000] [--seed 0] [--kinds plans bilevel_plans ...]
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from diffshard.solving.solvers import greedy
from experiments.fuzzing import problems, scales
from experiments.fuzzing.bilevel_plans import BilevelPlanDamage
from experiments.fuzzing.instances import InstanceDamage
from experiments.fuzzing.outcomes import HELD, REFUSED, TAKEN
from experiments.fuzzing.plans import PlanDamage

KINDS = ("plans", "bilevel_plans", "instances", "problems", "scales", "no-greedy")


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
    damage = {"plans": PlanDamage, "bilevel_plans": BilevelPlanDamage, "instances": InstanceDamage}
    yield damage[kind]().outcome if kind in damage else problems.outcome


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(argv)
    for kind in options.kinds:
        start_s = time.perf_counter()
        with outcomes(kind) as outcome:
            counts = Counter(outcome(seed) for seed in range(options.seed, options.seed + options.cases))
        good = ", ".join(f"{counts.pop(name)} {name}" for name in (REFUSED, TAKEN, HELD) if name in counts)
        seconds = time.perf_counter() - start_s
        print(f"{kind}: {options.cases} cases: {good}, {counts.total()} faults, {seconds:.0f} s", flush=True)
        for name, count in counts.most_common():
            print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
