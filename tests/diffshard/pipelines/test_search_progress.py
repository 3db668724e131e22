"""What a search for a pipeline tells a terminal, and how its time limit is divided."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import diffshard
from diffshard import base
from diffshard.pipelines import options, pipelined_function
from diffshard.pipelines.options import SearchProgress


class Clock:
    """A time that tests set."""

    seconds, process_s = 0.0, 0.0

    def perf_counter(self):
        """Returns the time that was set."""
        return self.seconds

    def process_time(self):
        """Returns the time of the processor that was set."""
        return self.process_s


class Line:
    """A line that keeps its texts."""

    def __init__(self):
        self.texts = []

    def step(self, text):
        """Keeps a text."""
        self.texts.append(text)


def _search_progress(time_limit_s):
    return SearchProgress(Line(), time_limit_s)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(options, "time", clock)
    monkeypatch.setattr(base, "time", clock)
    return clock


def test_the_line_has_what_is_tried_and_the_best_step_and_the_bound(clock: Clock):
    line = Line()
    search = SearchProgress(line, None)  # type: ignore[arg-type]
    clock.seconds = 2.5
    search.tries(8, "1f1b", 2, 3)
    search.solved()
    search.solved()
    search.found(0.25)
    search.found(0.5)
    search.bounded(0.125)
    assert line.texts[0] == "2.5 s, 8 micro-batches, 1f1b (2 of 3)"
    assert line.texts[-1] == "2.5 s, 8 micro-batches, 1f1b (2 of 3), 2 stages solved, best 250 ms, bound 125 ms"


def test_a_time_limit_is_divided_among_the_search_the_bound_and_the_programs(clock: Clock):
    search = _search_progress(10.0)
    clock.seconds = 6.5
    assert not search.is_search_over()  # nothing was found yet
    assert search.stage_limit_s() == 3.5
    search.found(1.0)
    assert search.is_search_over()
    assert not search.is_proof_over()
    clock.seconds = 8.0
    assert search.is_proof_over()
    assert search.stage_limit_s(4) == 0.5
    clock.seconds = 20.0
    assert search.stage_limit_s() == 0.1
    assert _search_progress(10.0).is_search_over() is False
    unfinished = _search_progress(1.0)
    clock.seconds += 10.5
    assert not unfinished.is_search_over()
    clock.seconds += 0.2
    assert unfinished.is_search_over()  # nothing that fits is looked for without end
    unlimited = _search_progress(None)
    assert not unlimited.is_search_over()
    assert not unlimited.is_proof_over()


def test_a_stage_has_as_much_time_of_the_processor_on_a_busy_machine_as_on_a_quiet_one(clock: Clock):
    quiet_s = _search_progress(None).stage_limit_s()
    search = _search_progress(None)
    clock.seconds, clock.process_s = 8.0, 8.0
    assert search.stage_limit_s() == quiet_s
    clock.seconds = 32.0  # of which this process had a quarter
    assert search.stage_limit_s() == 4 * quiet_s
    clock.seconds, clock.process_s = 32.0, 60.0  # two threads
    assert search.stage_limit_s() == quiet_s


def train_step(params, x):
    def loss_fn(params):
        return (jnp.tanh(x @ params["up"]) @ params["down"]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def test_when_time_is_over_the_plan_says_what_was_not_tried(monkeypatch):
    line, shown = Line(), []

    @contextlib.contextmanager
    def live_line(what, display):
        shown.append((what, display))
        yield line

    monkeypatch.setattr(pipelined_function, "live_line", live_line)
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=1, hardware="h100")])
    pipeline = diffshard.Pipeline(microbatches=(2, 4), schedules=("1f1b", "gpipe"))
    step = diffshard.search(train_step, cluster, pipeline=pipeline, time_limit_s=0.01, progress="none")
    plan = step.plan({"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}, jnp.ones((8, 16)))
    assert [(count, schedule) for count, schedule, _ in plan.tried] == [(2, "1f1b")]
    assert plan.lower_bound_s <= plan.step_s
    assert "after 1 of 4 choices of micro-batches and schedules" in str(plan)
    assert shown == [("searching a pipeline of train_step", "none")]
    text = "\n".join(line.texts)
    for part in ("tracing", "2 micro-batches, 1f1b (1 of 4), 1 stage solved, best", "bound", "sharding stage 1 of 1"):
        assert part in text
