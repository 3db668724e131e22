"""The live line of a search: where it appears, when, and that it is taken away."""

import io
import math
import time

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import diffshard
from diffshard.live_progress import live_line, state_text
from diffshard.plans.printing import format_s

MESH = AbstractMesh((2,), ("x",))
ERASE_LINE = "\x1b[2K"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Tells that lines can be taken back."""
        return True


@pytest.fixture(autouse=True)
def _a_plain_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("CI", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _wait_for(stream: io.StringIO, text: str) -> bool:
    for _ in range(500):
        if text in stream.getvalue():
            return True
        time.sleep(0.01)
    return False


def test_a_long_search_is_shown_on_a_terminal_and_taken_away():
    out = Terminal()
    with live_line("searching step", "terminal", stream=out, delay_s=0.0) as line:
        line.step("tracing")
        assert _wait_for(out, "searching step: tracing")
        line.progress(3.0, 0.5, 0.25)
        assert _wait_for(out, "best 500 ms, lower bound 250 ms, gap 50.00%")
    assert out.getvalue().rpartition("searching")[2].count(ERASE_LINE) >= 1
    length = len(out.getvalue())
    time.sleep(0.3)
    assert len(out.getvalue()) == length


def test_a_short_search_shows_nothing():
    out = Terminal()
    with live_line("searching step", "terminal", stream=out, delay_s=60.0) as line:
        line.step("tracing")
    assert "searching" not in out.getvalue()


@pytest.mark.parametrize("variable", ["CI", "FORCE_COLOR", ""])
def test_nothing_is_shown_elsewhere(monkeypatch, variable):
    display, out = "terminal", Terminal() if variable == "CI" else io.StringIO()
    if variable:
        monkeypatch.setenv(variable, "1")
    with live_line("searching step", display, stream=out, delay_s=0.0) as line:
        line.step("tracing")
        line.progress(3.0, 0.5, 0.25)
        time.sleep(0.2)
    assert out.getvalue() == ""


def test_nothing_is_shown_where_it_is_turned_off():
    out = Terminal()
    with live_line("searching step", "none", stream=out, delay_s=0.0) as line:
        line.step("tracing")
        time.sleep(0.2)
    assert out.getvalue() == ""


def test_the_line_goes_though_the_search_fails():
    out = Terminal()

    def fail():
        with live_line("searching step", "terminal", stream=out, delay_s=0.0):
            assert _wait_for(out, "searching step")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert out.getvalue().rpartition("searching")[2].count(ERASE_LINE) >= 1


def test_how_far_a_search_is():
    assert state_text(1.0, math.inf, -math.inf, format_s) == "1.0 s, nothing feasible yet"
    assert state_text(3.14, 0.5, 0.25, format_s) == "3.1 s, best 500 ms, lower bound 250 ms, gap 50.00%"


def test_a_search_tells_its_function_and_not_the_terminal(capsys):
    told = []
    found = diffshard.search(lambda x: jnp.tanh(x).sum(), MESH, hardware="h100")
    found.plan(jnp.zeros(8), progress=lambda *state: told.append(state))
    assert told
    assert capsys.readouterr().err == ""


def test_an_unknown_display_is_refused():
    with pytest.raises(ValueError, match=r"`progress` must be one of \('terminal', 'none'\), not 'bar'"):
        diffshard.search(jnp.sin, MESH, hardware="h100", progress="bar")  # pyright: ignore[reportArgumentType]
