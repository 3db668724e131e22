"""Eight host devices and a compilation cache for every test, set before JAX is imported; fewer garbage collections.

With `--at-most S` the tests that take more than S seconds by `tests/seconds.txt` are left out; `--write-seconds` writes
there what the tests that run take by the clock, as many wait for other processes. What tests share as a fixture is set
up by the one that runs first, and counts in equal parts for all of them.
"""

import collections
import gc
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

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
_SECONDS = Path(__file__).with_name("seconds.txt")
_LEAST_S = 0.1  # of a test function with all its parameters, that is worth a line
_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "jax"

_BEGIN = pytest.StashKey[float]()
_shared_s: dict[str, float] = {}
"""Seconds that each shared fixture has taken in the test that runs now, without those it asks for."""

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
    parser.addoption("--at-most", type=float, metavar="S", help=f"leave out tests of more seconds by {_SECONDS.name}")
    parser.addoption(
        "--write-seconds", action="store_true", help=f"write what the tests of whole files take to {_SECONDS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Adds up what tests take in the process that gets all reports."""
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Seconds())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes when a test begins."""
    item.stash[_BEGIN] = time.perf_counter()
    _shared_s.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Notes what a fixture takes that several tests share."""
    begin_s, before_s = time.perf_counter(), sum(_shared_s.values())
    result = yield
    if fixturedef.scope != "function":
        inside_s = sum(_shared_s.values()) - before_s
        _shared_s[_shared(fixturedef)] = time.perf_counter() - begin_s - inside_s
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Adds the seconds of a test to its last report."""
    if call.when == "teardown":
        own_s = time.perf_counter() - item.stash[_BEGIN] - sum(_shared_s.values())
        definitions = (found[-1] for found in item._fixtureinfo.name2fixturedefs.values())  # pyright: ignore
        shares = [_shared(definition) for definition in definitions if definition.scope != "function"]
        item.user_properties += [("own_s", own_s), ("shared_s", dict(_shared_s)), ("shares", shares)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests out that take longer than is asked for."""
    most_s = config.getoption("--at-most")
    if most_s is not None:
        long = {name for name, seconds in _known_seconds().items() if seconds > most_s}
        config.hook.pytest_deselected(items=[item for item in items if _function(item.nodeid) in long])
        items[:] = [item for item in items if _function(item.nodeid) not in long]


class _Seconds:
    """Writes the seconds of test functions that take long."""

    def __init__(self):
        self.seconds = collections.defaultdict[str, float](float)
        self.shared_s = collections.defaultdict[str, float](float)
        self.users = collections.defaultdict[str, list[str]](list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        name = _function(report.nodeid)
        self.seconds[name] += properties.get("own_s", 0.0)
        for shared, seconds in properties.get("shared_s", {}).items():
            self.shared_s[shared] += seconds
        for shared in properties.get("shares", []):
            self.users[shared].append(name)

    def pytest_sessionfinish(self) -> None:
        for shared, users in self.users.items():
            for name in users:
                self.seconds[name] += self.shared_s[shared] / len(users)
        known = _known_seconds() | self.seconds
        lines = (f"{s:6.1f} {name}\n" for name, s in sorted(known.items()) if round(s, 1) >= _LEAST_S)
        _SECONDS.write_text("".join(lines))


def _known_seconds() -> dict[str, float]:
    """Returns the seconds of the functions of tests that take long."""
    lines = (line.split() for line in _SECONDS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def _shared(fixture: pytest.FixtureDef[Any]) -> str:
    """Returns the name of a fixture, with the file that has it."""
    return f"{fixture.baseid}::{fixture.argname}"


def _function(test: str) -> str:
    """Returns the name of a test without its parameters."""
    return test.partition("[")[0]
