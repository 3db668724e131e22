"""When steps on streams end: worked by hand, by the recursion in JAX, and against bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.streams import COMPUTE, Step, Wait, finish_s, play

LINK, OTHER = 1, 2


def compute(seconds, *reads):
    return Step((COMPUTE,), seconds, reads)


def send(seconds, *reads, links=(LINK,)):
    return Step(links, seconds, reads)


BARRIER = 0.0


@pytest.mark.parametrize(
    ("steps", "start_s", "seconds", "waits"),
    [
        pytest.param([], [], 0, [], id="nothing"),
        # A gather of 5 s beside a product of 3 s: the reader waits for 2 s.
        pytest.param([send(5), compute(3), compute(1, 0, 1)], [0, 0, 5], 6, [Wait(2, 0, 2)], id="a reader waits"),
        # The second product does not need the gather and runs before the first one's reader.
        pytest.param(
            [send(5), compute(3, 0), compute(4)], [0, 5, 0], 8, [Wait(1, 0, 1)], id="arithmetic goes on meanwhile"
        ),
        # With a barrier between them it must not.
        pytest.param(
            [send(5), compute(3, 0), compute(BARRIER), compute(4)], [0, 5, 8, 8], 12, [Wait(1, 0, 5)],
            id="nothing passes a barrier",
        ),
        # Two transfers share a link, a third has its own; the one over both links waits for both.
        pytest.param(
            [send(2), send(3), send(4, links=(OTHER,)), send(1, links=(LINK, OTHER))], [0, 2, 0, 5], 6,
            [Wait(None, 3, 6)], id="a link does one thing at a time",
        ),
        # A join takes no stream; the wait is for the transfer behind it.
        pytest.param(
            [send(4), send(1, links=(OTHER,)), Step((), 0.0, (0, 1)), compute(2, 2)], [0, 0, 4, 4], 6,
            [Wait(3, 0, 4)], id="a wait through a join",
        ),
        # What is sent last is waited for at the end of the step.
        pytest.param([compute(2), send(3, 0)], [0, 2], 5, [Wait(None, 1, 3)], id="the end waits for links"),
    ],
)  # fmt: skip
def test_steps_run_when_their_streams_are_free_and_what_they_read_is_there(steps, start_s, seconds, waits):
    played = play(steps)
    assert played.start_s.tolist() == start_s
    assert played.end_s.tolist() == [start + step.seconds for start, step in zip(start_s, steps, strict=True)]
    assert played.seconds == seconds
    assert list(played.waits) == waits
    assert sorted(played.order) == list(range(len(steps)))


def random_program(rng, size=40):
    """Steps with whole seconds on arithmetic, two links, both links, or nothing."""
    steps = []
    for i in range(size):
        reads = tuple(sorted({int(j) for j in rng.integers(0, i, size=rng.integers(0, 4))})) if i else ()
        streams = [(COMPUTE,), (COMPUTE,), (LINK,), (OTHER,), (LINK, OTHER), ()][rng.integers(6)]
        steps.append(Step(streams, float(rng.integers(0, 9)) if streams else 0.0, reads))
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_the_recursion_ends_when_the_player_does(seed):
    steps = random_program(np.random.default_rng(seed))
    played = play(steps)
    seconds = np.array([step.seconds for step in steps])
    with jax.enable_x64(True):
        assert finish_s(seconds, steps, played.order) == played.seconds
        smoothed = [float(finish_s(seconds, steps, played.order, t)) for t in (1.0, 0.1, 1e-3)]
    assert smoothed == sorted(smoothed, reverse=True)
    assert smoothed[-1] >= played.seconds
    assert smoothed[-1] == pytest.approx(played.seconds, abs=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_program_takes_as_long_as_its_arithmetic_and_waits_and_as_its_busiest_stream(seed):
    steps = random_program(np.random.default_rng(seed))
    played = play(steps)
    busy = {stream: sum(s.seconds for s in steps if stream in s.streams) for stream in (COMPUTE, LINK, OTHER)}
    assert busy[COMPUTE] + sum(wait.seconds for wait in played.waits) == played.seconds
    assert max(busy.values()) <= played.seconds <= sum(step.seconds for step in steps)
    for i, step in enumerate(steps):
        assert all(played.end_s[j] <= played.start_s[i] for j in step.reads)
        if step.streams and not all(stream == COMPUTE for stream in step.streams):
            assert steps[i].streams[0] in (LINK, OTHER)
    for wait in played.waits:
        assert set(steps[wait.transfer].streams) <= {LINK, OTHER}


def test_the_gradient_is_one_on_the_critical_path():
    # The gather (5 s) and its reader are critical; the product beside it (3 s) and the transfer (1 s) are not.
    steps = [send(5.0), compute(3.0), compute(2.0, 0, 1), send(1.0, 1, links=(OTHER,))]
    order = play(steps).order
    seconds = jnp.array([step.seconds for step in steps])
    gradient = jax.grad(lambda s: finish_s(s, steps, order))(seconds)
    assert gradient.tolist() == [1.0, 0.0, 1.0, 0.0]
    smooth = jax.grad(lambda s: finish_s(s, steps, order, 1.0))(seconds)
    assert 0 < float(smooth[1]) < float(smooth[0]) < 1


def test_the_recursion_follows_other_seconds_in_the_same_order():
    steps = [send(5.0), compute(3.0), compute(2.0, 0, 1)]
    order = play(steps).order
    assert float(finish_s([1.0, 3.0, 2.0], steps, order)) == 5.0
    # Convex: the mean of two programs' seconds does not end after the mean of their ends.
    a, b = np.array([5.0, 3.0, 2.0]), np.array([1.0, 9.0, 2.0])
    ends = [float(finish_s(s, steps, order)) for s in (a, b, (a + b) / 2)]
    assert ends[2] <= (ends[0] + ends[1]) / 2
