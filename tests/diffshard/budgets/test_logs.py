"""Phases of a log: small logs worked by hand, and rules that hold for any log, second by second."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh

import diffshard
from diffshard.elastic import Phase


def line(number):
    return AbstractMesh((number,), ("x",))


def power_of_two(number):
    """The largest mesh whose size is a power of two; none for a single device."""
    return line(2 ** int(math.log2(number))) if number > 1 else None


def made(times_s, num_devices, mesh_of=line, **options):
    phases = diffshard.elastic.phases_of_log(times_s, num_devices, mesh_of, **options)
    return [(phase.mesh.size, phase.duration_s or 0.0) for phase in phases]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        # Number of devices and seconds; times shorter than 10 s cannot be used.
        ([(8, 60), (4, 30), (8, 20)], [(8, 60), (4, 30), (8, 20)]),
        ([(8, 60), (8, 30), (4, 20), (4, 20)], [(8, 90), (4, 40)]),  # equal neighbours
        ([(8, 60), (0, 30), (8, 20)], [(8, 60), (8, 20)]),  # a pause
        ([(0, 5), (8, 60), (0, 30)], [(8, 60)]),
        ([(4, 60), (8, 9), (4, 20)], [(4, 89)]),  # a short peak
        ([(4, 60), (8, 10), (4, 20)], [(4, 60), (8, 10), (4, 20)]),
        ([(4, 60), (8, 9), (2, 20)], [(4, 69), (2, 20)]),  # both have fewer devices
        ([(2, 60), (4, 9), (8, 20)], [(2, 69), (8, 20)]),  # a short stair
        ([(8, 60), (4, 9), (8, 20)], [(8, 60), (8, 20)]),  # a short dip: the job waits
        ([(0, 5), (4, 9), (8, 20)], [(8, 20)]),  # beside a pause
        ([(4, 9), (8, 20)], [(8, 20)]),  # at the begin, and at the end
        ([(8, 20), (4, 9)], [(8, 20)]),
        ([(8, 9), (4, 20)], [(4, 29)]),
        ([(8, 5), (4, 5), (8, 5), (4, 5)], [(4, 20)]),  # short ones that are long enough together
        ([(2, 4), (8, 5), (4, 5), (0, 1), (2, 10)], [(4, 10), (2, 10)]),
    ],
)  # fmt: skip
def test_phases_are_those_worked_by_hand(log, expected):
    start_s = 1000.5
    ends = np.cumsum([seconds for _, seconds in log]) + start_s
    times = [start_s, *ends[:-1]]
    assert made(times, [number for number, _ in log], end_s=ends[-1], min_duration_s=10) == expected


def test_numbers_with_the_same_mesh_are_one_phase():
    log = [0, 10, 20, 30, 40], [7, 5, 4, 3, 1]
    assert made(*log, mesh_of=power_of_two, end_s=50) == [(4, 30), (2, 10)]


def test_meshes_of_devices_hardware_and_limits_reach_the_phases():
    devices = np.array(jax.devices())
    asked = []

    def mesh_of(number):
        asked.append(number)
        return Mesh(devices[-number:], ("x",))

    phases = diffshard.elastic.phases_of_log(
        np.array([0.0, 1.5, 2.0]), np.array([2, 1, 2]), mesh_of, end_s=4, hardware="h100", memory_limit_bytes=2**30
    )
    large, small = Mesh(devices[-2:], ("x",)), Mesh(devices[-1:], ("x",))
    assert phases == tuple(
        Phase(mesh=mesh, duration_s=seconds, hardware="h100", memory_limit_bytes=2**30)
        for mesh, seconds in ((large, 1.5), (small, 0.5), (large, 2.0))
    )
    assert sorted(asked) == [1, 2]


def test_a_budget_takes_the_phases_and_a_pause_costs_nothing():
    phases = diffshard.elastic.phases_of_log([0, 2, 3], [4, 0, 4], line, end_s=5, hardware="h100")
    arguments = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((32, 8), "float32")
    plans = diffshard.elastic.budget(lambda w, x: w - jax.numpy.sum(x @ w) * w, phases, *arguments, donate_argnums=0)
    assert plans.has_durations
    assert [move.seconds for move in plans.moves] == [0]
    assert plans.chosen.total_steps == pytest.approx(4 / plans.plans[0].step_s)


LOGS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=12)


def seconds_of(log):
    """The devices of each second."""
    return [number for number, seconds in log for _ in range(seconds)]


def phases_of(log, mesh_of, min_duration_s):
    ends = np.cumsum([seconds for _, seconds in log])
    times = [0, *ends[:-1]]
    try:
        return made(times, [n for n, _ in log], mesh_of, end_s=ends[-1], min_duration_s=min_duration_s)
    except ValueError as error:
        if "leaves no phase" not in str(error):
            raise
        return []


@settings(deadline=None)
@given(LOGS, st.sampled_from([line, power_of_two]))
def test_without_a_least_duration_every_second_with_a_mesh_is_in_a_phase(log, mesh_of):
    expected = [mesh.size for n in seconds_of(log) if n and (mesh := mesh_of(n)) is not None]
    phases = phases_of(log, mesh_of, 0)
    assert seconds_of([(size, int(seconds)) for size, seconds in phases]) == expected


@settings(deadline=None)
@given(LOGS, st.sampled_from([line, power_of_two]), st.integers(1, 15))
def test_phases_fit_into_the_log_and_are_long_enough(log, mesh_of, min_duration_s):
    allowed = seconds_of(log)
    place = 0
    for size, seconds in phases_of(log, mesh_of, min_duration_s):
        assert seconds >= min_duration_s
        # The earliest place for each phase after those before: if any places fit, these do.
        while place + seconds <= len(allowed) and min(allowed[place : place + int(seconds)]) < size:
            place += 1
        assert place + seconds <= len(allowed)
        place += int(seconds)


@settings(deadline=None)
@given(LOGS, st.integers(1, 15))
def test_only_pauses_and_what_cannot_be_used_are_lost(log, min_duration_s):
    """A run of seconds with devices is lost to pauses only where it is short or around a long time with more."""
    phases = phases_of(log, line, min_duration_s)
    lost = sum(n > 0 for n in seconds_of(log)) - sum(seconds for _, seconds in phases)
    runs = "".join("x" if n else " " for n in seconds_of(log)).split()
    short = sum(len(run) for run in runs if len(run) < min_duration_s)
    assert lost >= short
    # Each long run keeps at least a phase, and loses less than `min_duration_s` before, between and after its phases.
    num_long = sum(len(run) >= min_duration_s for run in runs)
    assert len(phases) >= num_long
    assert lost <= short + (len(phases) + num_long) * (min_duration_s - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times_s": [], "num_devices": []}, "`times_s` is empty"),
        ({"times_s": [0, 5]}, "one number for each of the 2 times, not 3"),
        ({"times_s": [0, 5, 3]}, r"ascending order, but times_s\[2\] = 3 comes after 5"),
        ({"times_s": [0, 5, 5]}, r"ascending order, but times_s\[2\] = 5"),
        ({"times_s": [0, math.nan, 5]}, r"`times_s\[1\]` must be a finite number of seconds, not nan"),
        ({"times_s": ["noon", 5, 6]}, r"`times_s\[0\]` must be a finite number of seconds, not 'noon'"),
        ({"num_devices": [8, -1, 8]}, r"`num_devices\[1\]` must be a whole number, 0 or more, not -1"),
        ({"num_devices": [8, 4.5, 8]}, r"`num_devices\[1\]` must be a whole number, 0 or more, not 4.5"),
        ({"end_s": 10}, "`end_s` must be later than the last of `times_s`, 10, not 10"),
        ({"end_s": math.inf}, "`end_s` must be a finite number of seconds, not inf"),
        ({"min_duration_s": -1}, "`min_duration_s` must be 0 or more, not -1"),
        ({"mesh_of": lambda number: line(8)}, r"`mesh_of\(4\)` must have at most 4 devices, but has 8: {'x': 8}"),
        ({"num_devices": [0, 0, 0]}, "The log leaves no phase"),
        ({"min_duration_s": 60}, "The log leaves no phase: .* for 60 seconds or longer"),
    ],
)  # fmt: skip
def test_a_wrong_log_is_told_by_name_and_value(changes, message):
    arguments = {"times_s": [0, 5, 10], "num_devices": [8, 4, 8], "mesh_of": line, "end_s": 20, **changes}
    with pytest.raises(ValueError, match=message):
        diffshard.elastic.phases_of_log(**arguments)


def test_what_is_no_mesh_is_a_type_error():
    with pytest.raises(TypeError, match=r"`mesh_of\(8\)` must be a jax.sharding.Mesh or an AbstractMesh, not 8"):
        diffshard.elastic.phases_of_log([0], [8], lambda number: number, end_s=1)  # pyright: ignore[reportArgumentType]
