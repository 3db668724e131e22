"""Which planted faults the tests notice.

    python -m experiments.planted_faults
    python -m experiments.planted_faults --list held_out --paths diffshard/solving cost
    python -m experiments.planted_faults --sample 40 --seed 1

Each fault changes one line of a copy of the repository, whose related tests then run until the first one fails. Tests
that have failed run once more without any fault: one that fails there as well has noticed nothing. The working tree
stays as it is.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.planted_faults.faults import ROOT, Fault, faulty_text, list_names, read_faults, selected
from experiments.planted_faults.random_faults import draw_faults
from experiments.planted_faults.related_tests import related_tests
from experiments.tables import print_table

NOTICED, NOT_NOTICED, TIMED_OUT = "noticed", "NOT NOTICED", "TIMED OUT"
NOT_APPLICABLE, BROKEN_TEST = "DOES NOT APPLY", "FAILS ANYWAY"
_LEFT_OUT = ("__pycache__", "site", "out", "build", "dist", "*.egg-info")
_HIDDEN = ".*"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED, _FAILED_CODES, _NO_TESTS = 0, (1, 2), 5  # exit codes of pytest: 2 where a file of tests cannot be imported
_CACHE = "JAX_COMPILATION_CACHE_DIR"


class Outcome(NamedTuple):
    """The outcome of the tests for a fault.

    Attributes:
      verdict: `NOTICED`, `NOT_NOTICED`, `TIMED_OUT`, `NOT_APPLICABLE` or `BROKEN_TEST`.
      by: the test that failed, or empty.
      seconds: of the tests.
    """

    verdict: str
    by: str = ""
    seconds: float = 0.0


def outcome_of(fault: Fault, copy: Path, limit_s: float, *, nearest_only: bool = False) -> Outcome:
    """Plants a fault in a copy of the repository, runs the related tests there, and takes the fault out again.

    Args:
      fault: to be planted.
      copy: the folder of the copy.
      limit_s: seconds for the tests of the fault.
      nearest_only: as in `related_tests`.
    """
    faulty = faulty_text(fault, copy)
    if faulty is None:
        return Outcome(NOT_APPLICABLE)
    tests = related_tests(fault.path, copy, nearest_only=nearest_only)
    path, start = copy / fault.path, time.perf_counter()
    text = path.read_text(encoding="utf-8")
    path.write_text(faulty, encoding="utf-8")
    try:
        code, output = _run_tests(["-x", *tests], copy, limit_s) if tests else (_NO_TESTS, "")
    finally:
        path.write_text(text, encoding="utf-8")
    seconds = time.perf_counter() - start
    if code is None:
        return Outcome(TIMED_OUT, seconds=seconds)
    if code in _FAILED_CODES:
        return Outcome(NOTICED, next(iter(_FAILED.findall(output)), ""), seconds)
    return Outcome(NOT_NOTICED, seconds=seconds)


def without_broken_tests(outcomes: Sequence[Outcome], copy: Path, limit_s: float) -> list[Outcome]:
    """Returns the outcomes with another verdict where the test that failed does so without the fault as well.

    Args:
      outcomes: of faults.
      copy: the folder of a copy of the repository without faults.
      limit_s: seconds for each of the tests.
    """
    tests = sorted({outcome.by for outcome in outcomes if outcome.verdict == NOTICED and outcome.by})
    if not tests:
        return list(outcomes)
    code, output = _run_tests(tests, copy, limit_s * len(tests))
    broken = set(tests) if code is None else set(_FAILED.findall(output))
    return [o._replace(verdict=BROKEN_TEST) if o.verdict == NOTICED and o.by in broken else o for o in outcomes]


def _run_tests(words: Sequence[str], copy: Path, limit_s: float) -> tuple[int | None, str]:
    """Runs pytest with these words; returns its exit code, None where time was over, and its output.

    Raises:
      RuntimeError: pytest itself failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    cache = os.environ.get(_CACHE, str(ROOT / ".cache" / "jax"))  # what is not faulty has been compiled before
    environment = os.environ | {"PYTHONPATH": str(copy), _CACHE: cache, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            process.wait()
            return None, ""
    if process.returncode not in (_PASSED, *_FAILED_CODES, _NO_TESTS):
        raise RuntimeError(f"pytest ended with exit code {process.returncode}:\n{output[-2000:]}")
    return process.returncode, output


def outcomes_of(
    faults: Sequence[Fault], *, jobs: int, limit_s: float, nearest_only: bool, records: Path | None
) -> list[Outcome]:
    """Returns the outcome of the tests for each fault.

    Args:
      faults: to be planted, one at a time in each copy.
      jobs: copies whose tests run at the same time.
      limit_s: seconds for the tests of a fault.
      nearest_only: as in `related_tests`.
      records: a folder where outcomes are kept and taken up from, or None.
    """
    with tempfile.TemporaryDirectory(prefix="planted_faults_") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        ignored = shutil.ignore_patterns(*_LEFT_OUT, _HIDDEN)
        for job in range(jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(job), ignore=ignored)))

        def outcome(fault: Fault) -> Outcome:
            record = records and records / f"{hashlib.sha256(str(fault).encode()).hexdigest()[:16]}.json"
            if record and record.exists():
                return Outcome(*json.loads(record.read_text(encoding="utf-8")))
            copy = copies.get()
            try:
                result = outcome_of(fault, copy, limit_s, nearest_only=nearest_only)
            finally:
                copies.put(copy)
            print(f"{result.verdict:<14} {result.seconds:5.0f} s  {fault}", file=sys.stderr, flush=True)
            if record:
                record.parent.mkdir(parents=True, exist_ok=True)
                record.write_text(json.dumps(result), encoding="utf-8")
            return result

        return without_broken_tests(list(pool.map(outcome, faults)), copies.get(), limit_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a fault was not noticed or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=list_names(), default="faults", help="which faults")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="of random faults, in place of a list")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parser.add_argument("--numbers", nargs="+", type=int, default=[], help="of faults in the list, from 1")
    parser.add_argument("--paths", nargs="+", default=[], help="beginnings of the paths of the files with the faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds for the tests of each fault")
    parser.add_argument("--nearest", action="store_true", help="only the nearest tests, where a file has some")
    parser.add_argument("--records", type=Path, help="a folder for outcomes: those already there are taken up")
    options = parser.parse_args(argv)
    if options.sample is not None and options.sample < 1:
        parser.error(f"--sample must be positive, got {options.sample}")
    if options.jobs < 1 or not options.time_limit > 0:
        parser.error(f"--jobs and --time-limit must be positive, got {options.jobs} and {options.time_limit:g}")
    try:
        drawn = None if options.sample is None else draw_faults(options.sample, options.seed, ROOT)
        faults = selected(read_faults(options.list) if drawn is None else drawn, options.numbers, options.paths)
    except ValueError as error:
        parser.error(str(error))
    outcomes = outcomes_of(
        [fault for _, fault in faults], jobs=options.jobs, limit_s=options.time_limit, nearest_only=options.nearest,
        records=options.records,
    )  # fmt: skip
    rows = [
        (number, f"{fault.path}: {fault.text}\n=> {fault.replacement}", outcome.verdict, outcome.by.split("::")[-1])
        for (number, fault), outcome in zip(faults, outcomes, strict=True)
    ]
    title = f"Planted faults of the list `{options.list}`" if drawn is None else f"Random faults of seed {options.seed}"
    print_table(title, ("number", "fault", "verdict", "by"), rows)
    counts = Counter(outcome.verdict for outcome in outcomes)
    others = "".join(f", {count} {verdict.lower()}" for verdict, count in counts.items() if verdict != NOTICED)
    share = counts[NOTICED] / len(outcomes)
    print(f"{len(outcomes)} faults: {counts[NOTICED]} noticed ({share:.0%}){others}")
    return int(counts[NOTICED] < len(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
