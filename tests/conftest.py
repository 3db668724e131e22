"""Eight host devices and a compilation cache for every test, set before JAX is imported; fewer garbage collections.

With `--fast` the tests that `tests/slow_tests.txt` names are left out; `--list-slow` writes this file in a run of all.
"""

import collections
import gc
import os
from pathlib import Path

import pytest

# Tests run each program a few times at most, so that most of their time is compiling. Machine code in one piece that
# LLVM does not optimise, and the older emitter of fusions, make it several times faster. The HLO, its collectives, its
# memory and XLA's counts of operations and bytes are the same.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
_SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
_SLOW_S = 0.5  # of a test function with all its parameters; what is left takes a minute and a half on two cores
_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag, value in _FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
# Most of the suite's time is XLA compiling; the second run on a machine takes it from disk.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Traced programs, and the test files while they are read, are many small objects that live long. Python's default
# visits them all after each 700 new ones, which takes an eighth of the suite's time and a fifth of its start.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    """Lets no garbage be looked for among what was imported."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options of this suite."""
    parser.addoption("--fast", action="store_true", help=f"leave out the tests that {_SLOW_TESTS.name} lists")
    parser.addoption("--list-slow", action="store_true", help=f"write {_SLOW_TESTS.name}; takes a run of all tests")


def pytest_configure(config: pytest.Config) -> None:
    """Adds up what tests take, in the process that gets all reports."""
    if config.getoption("--list-slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SlowTests())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out where the fast ones are asked for."""
    if config.getoption("--fast"):
        slow = set(_SLOW_TESTS.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if _function(item.nodeid) in slow])
        items[:] = [item for item in items if _function(item.nodeid) not in slow]


class _SlowTests:
    """Writes the functions of tests that take long."""

    def __init__(self):
        self.seconds = collections.defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_function(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        _SLOW_TESTS.write_text("".join(f"{name}\n" for name, s in sorted(self.seconds.items()) if s > _SLOW_S))


def _function(test: str) -> str:
    """Returns the name of a test without its parameters."""
    return test.partition("[")[0]
