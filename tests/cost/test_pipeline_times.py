"""Simulated pipelines against numbers worked by hand, published bubbles, and the bound on every schedule."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost.pipeline_schedules import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD, Operation, graph_of, schedule_graph
from cost.pipeline_times import StageTimes, lower_bound_s, simulate

EQUAL = StageTimes([1] * 4, [2] * 4, [1] * 3, [1] * 3)
SCHEDULES = ("gpipe", "1f1b", "eager")


def simulated(times, num_microbatches, schedule):
    return simulate(times, graph_of(schedule, len(times.forward_s), num_microbatches))


def stage_times(size, max_stages=5):
    """Times of up to `max_stages` stages, whole numbers, so that simulations have no rounding."""
    numbers = st.integers(0, size)
    return st.integers(1, max_stages).flatmap(
        lambda s: st.builds(
            StageTimes,
            *(st.lists(numbers, min_size=n, max_size=n) for n in (s, s, s - 1, s - 1)),
            st.none(),
        )
    )


@pytest.mark.parametrize(
    ("schedule", "step_s", "in_flight"),
    [("gpipe", 39, [8] * 4), ("1f1b", 49, [4, 3, 2, 1]), ("eager", 39, [7, 5, 3, 1])],
)
def test_equal_stages_with_transfers(schedule, step_s, in_flight):
    """Without transfers (M + S - 1)·3 = 33. 1F1B waits for 2(S - 1)·M/S + 2(S - 2) = 16 of them, eager for 2(S - 1)."""
    simulation = simulated(EQUAL, 8, schedule)
    assert simulation.step_s == step_s
    assert simulation.in_flight.tolist() == in_flight
    assert simulation.busy_s.tolist() == [24] * 4
    assert simulation.bubble == pytest.approx(1 - 24 / step_s)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 3), (4, 8), (8, 16)])
def test_bubbles_that_are_published(num_stages, num_microbatches):
    """1F1B and GPipe wait (S - 1)·(F + B) (Narayanan et al.), ZB-H1 (S - 1)·(F + B - W) (Qi et al., table 1)."""
    f, b, w, none = 1.0, 1.0, 1.0, [0.0] * (num_stages - 1)
    whole = StageTimes([f] * num_stages, [b + w] * num_stages, none, none)
    for schedule in ("gpipe", "1f1b"):
        step_s = simulated(whole, num_microbatches, schedule).step_s
        assert step_s == num_microbatches * (f + b + w) + (num_stages - 1) * (f + b + w)
    apart = StageTimes([f] * num_stages, [b] * num_stages, none, none, [w] * num_stages)
    simulation = simulated(apart, num_microbatches, "zb-h1")
    expected = num_microbatches * (f + b + w) + (num_stages - 1) * (f + b - w)
    assert simulation.step_s == expected if num_microbatches >= num_stages else simulation.step_s >= expected
    assert simulation.in_flight.max() <= num_stages


@settings(max_examples=200, deadline=None)
@given(stage_times(9), st.integers(1, 9), st.sampled_from((*SCHEDULES, "zb-h1")))
def test_no_schedule_is_faster_than_the_bound(times, num_microbatches, schedule):
    if schedule == "zb-h1":
        times = replace(times, weights_s=times.backward_s)
    assert simulated(times, num_microbatches, schedule).step_s >= lower_bound_s(times, num_microbatches)


OPERATIONS = [(kind, m) for m in range(3) for kind in (FORWARD, BACKWARD)]


@settings(max_examples=200, deadline=None)
@given(st.permutations(OPERATIONS), st.permutations(OPERATIONS), stage_times(5, 2))
def test_no_order_of_operations_is_faster_than_the_bound(first, second, times):
    orders = []
    for stage, operations in enumerate((first, second)[: len(times.forward_s)]):
        order = list(operations)
        for m in range(3):  # backward after forward
            i, j = sorted((order.index((FORWARD, m)), order.index((BACKWARD, m))))
            order[i], order[j] = (FORWARD, m), (BACKWARD, m)
        orders.append([Operation(kind, stage, m) for kind, m in order])
    try:
        graph = schedule_graph(orders, 3)
    except ValueError:  # each waits for the other
        return
    assert simulate(times, graph).step_s >= lower_bound_s(times, 3)


@settings(max_examples=60, deadline=None)
@given(stage_times(9, 4), st.integers(1, 5), st.sampled_from(SCHEDULES))
def test_the_bound_is_reached_by_one_stage_and_by_one_microbatch(times, num_microbatches, schedule):
    alone = StageTimes(times.forward_s[:1], times.backward_s[:1], [], [])
    assert simulated(alone, num_microbatches, schedule).step_s == lower_bound_s(alone, num_microbatches)
    assert simulated(times, 1, schedule).step_s == lower_bound_s(times, 1)


@settings(max_examples=60, deadline=None)
@given(stage_times(9), st.integers(1, 6), st.sampled_from(SCHEDULES))
def test_operations_wait_for_what_they_need_and_never_run_at_once(times, num_microbatches, schedule):
    simulation = simulated(times, num_microbatches, schedule)
    graph, start, end = simulation.graph, simulation.start_s, simulation.end_s
    at = {key: i for i, key in enumerate(zip(graph.kind.tolist(), graph.stage.tolist(), graph.microbatch.tolist()))}  # noqa: B905
    num_stages = len(times.forward_s)
    kinds = {FORWARD: num_stages, BACKWARD: num_stages, SEND_FORWARD: num_stages - 1, SEND_BACKWARD: num_stages - 1}
    wanted = {(k, s, m) for k, stages in kinds.items() for s in range(stages) for m in range(num_microbatches)}
    assert {key for key in at if key[0] in kinds} == wanted
    assert len(at) == len(graph.kind)
    for (kind, stage, m), i in at.items():
        needed = {
            FORWARD: (SEND_FORWARD, stage - 1, m) if stage else None,
            SEND_FORWARD: (FORWARD, stage, m),
            BACKWARD: (FORWARD, stage, m) if stage == num_stages - 1 else (SEND_BACKWARD, stage, m),
            SEND_BACKWARD: (BACKWARD, stage + 1, m),
        }[kind]
        assert needed is None or end[at[needed]] <= start[i]
    on_resource: dict[tuple[int, int], list[int]] = {}
    for (kind, stage, _), i in at.items():
        on_resource.setdefault((min(kind, 1) and kind if kind > BACKWARD else FORWARD, stage), []).append(i)
    for operations in on_resource.values():
        ordered = sorted(operations, key=lambda i: (start[i], end[i]))
        assert all(end[a] <= start[b] for a, b in pairwise(ordered))


def test_a_slow_link_bounds_the_step():
    """Eight tensors of 10 s go through the link; one micro-batch takes 6 s of computing and 11 s of links."""
    times = StageTimes([1, 1], [2, 2], [10], [1])
    assert lower_bound_s(times, 8) == 6 + 11 + 7 * 10
    assert simulated(times, 8, "eager").step_s == lower_bound_s(times, 8)


@pytest.mark.parametrize(
    ("times", "num_microbatches", "schedule", "message"),
    [
        (EQUAL, 0, "1f1b", "`num_microbatches` must be a whole number, 1 or more, not 0"),
        (EQUAL, 2.5, "1f1b", "`num_microbatches` must be a whole number"),
        (EQUAL, 8, "backwards", "`schedule` must be one of"),
        (EQUAL, 7, "interleaved", "`num_microbatches` must be a multiple of the 2 devices"),
        (StageTimes([1], [1], [], []), 8, "interleaved", "`num_stages` must be a multiple of `stages_per_device`, 2"),
        (EQUAL, 8, "zb-h1", "`weights_s` must be given"),
        (replace(EQUAL, weights_s=[1] * 4), 8, "1f1b", "`weights_s` must be given"),
    ],
)
def test_wrong_arguments_are_named(times, num_microbatches, schedule, message):
    with pytest.raises(ValueError, match=message):
        simulated(times, num_microbatches, schedule)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (([1] * 4, [2] * 3, [1] * 3, [1] * 3), "`backward_s` must have one number for each of 4"),
        (([1] * 4, [2] * 4, [1, -1, 1], [1] * 3), "`send_forward_s` must be seconds, 0 or more"),
        (([1] * 4, [2] * 4, [1] * 3, [1] * 3, [1] * 3), "`weights_s` must have one number for each of 4"),
        (([], [], [], []), r"`len\(forward_s\)` must be a whole number, 1 or more, not 0"),
    ],
)
def test_times_of_no_pipeline_are_refused(times, message):
    with pytest.raises(ValueError, match=message):
        StageTimes(*times)


def test_times_of_other_stages_than_the_schedule_has_are_refused():
    with pytest.raises(ValueError, match="`times` must be of the 3 stages of `graph`, not of 4"):
        simulate(EQUAL, graph_of("1f1b", 3, 8))


def test_stages_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        schedule_graph([[Operation(kind, stage, 0) for kind in (BACKWARD, FORWARD)] for stage in range(2)], 1)
