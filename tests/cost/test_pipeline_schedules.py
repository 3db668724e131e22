"""Schedules of several stages on a device, and of split backward operations, against a simulation by hand and formulas.

The simulation knows only who needs what: a device takes its next operation when it is free and its input has come, and
a link sends one tensor after the other. It goes through time, and adds up what each device keeps.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

from cost.pipeline_schedules import _ORDERS, BACKWARD, FORWARD, WEIGHTS, graph_of, in_flight, splits_backward
from cost.pipeline_steps import pipeline_step
from cost.pipeline_times import StageTimes, simulate

SETTINGS = [
    (schedule, num_devices, count, each)
    for schedule, numbers in (("interleaved", (2, 3, 4)), ("zb-h1", (1,)), ("zb-v", (2,)), ("1f1b", (1,)))
    for num_devices, count, each in itertools.product((1, 2, 3, 4), (1, 2, 4, 6, 12), numbers)
    if schedule != "interleaved" or count % num_devices == 0
]


def played(orders, seconds, sends, num_stages):
    """Returns the seconds of a step, and how many micro-batches of each stage are kept at most.

    Args:
      orders: of each device.
      seconds: by kind and stage.
      sends: of the link after a stage, by direction and stage.
      num_stages: of the model.
    """
    device = {stage: d for d, order in enumerate(orders) for _, stage, _ in order}
    last_kind = max(kind for order in orders for kind, _, _ in order)
    arrived = {(FORWARD, 0, m): 0.0 for _, _, m in itertools.chain(*orders)}  # when the input of an operation is there
    free, link_free = [0.0] * len(orders), {}
    begun, kept, most = [0] * len(orders), Counter(), Counter()
    running: list[tuple[float, int, int, int, int]] = []
    now = 0.0
    while True:
        for ended in sorted(one for one in running if one[0] <= now):
            running.remove(ended)
            _, d, kind, stage, m = ended
            kept[stage] -= kind == last_kind
            after = {FORWARD: stage + 1, BACKWARD: stage - 1}.get(kind, -1)
            if kind == FORWARD and stage == num_stages - 1:
                arrived[BACKWARD, stage, m] = now
            elif 0 <= after < num_stages:
                link = d, device[after]
                start = max(now, link_free.get(link, 0.0))
                link_free[link] = start + sends[kind, min(stage, after)]
                arrived[kind, after, m] = link_free[link]
            if kind == BACKWARD:
                arrived[WEIGHTS, stage, m] = now
        for d, order in enumerate(orders):
            if free[d] <= now and begun[d] < len(order):
                kind, stage, m = order[begun[d]]
                if arrived.get((kind, stage, m), np.inf) <= now:
                    begun[d], free[d] = begun[d] + 1, now + seconds[kind, stage]
                    running.append((free[d], d, kind, stage, m))
                    kept[stage] += kind == FORWARD
                    most[stage] = max(most[stage], kept[stage])
        if not running and all(b == len(order) for b, order in zip(begun, orders, strict=True)):
            return now, [most[stage] for stage in range(num_stages)]
        now = min(t for t in (*free, *(one[0] for one in running), *arrived.values()) if t > now)


@pytest.mark.parametrize(("schedule", "num_devices", "count", "each"), SETTINGS)
def test_a_simulation_by_hand_finds_the_same_step_and_memory(schedule, num_devices, count, each):
    rng, size = np.random.default_rng(num_devices * 100 + count), num_devices * each
    forward, backward, weights = rng.integers(1, 9, (3, size)).astype(float)
    there, back = rng.integers(0, 5, (2, size - 1)).astype(float)
    is_split = splits_backward(schedule)
    times = StageTimes(forward, backward, there, back, weights if is_split else None)
    orders = [_ORDERS[schedule](d, num_devices, count, each) for d in range(num_devices)]
    of_kinds = {FORWARD: forward, BACKWARD: backward, WEIGHTS: weights}
    seconds = {(k, s): t[s] for k, t in of_kinds.items() for s in range(size)}
    sends = {(k, s): t[s] for k, t in ((FORWARD, there), (BACKWARD, back)) for s in range(size - 1)}
    step_s, kept = played(orders, seconds, sends, size)
    graph = graph_of(schedule, size, count, each)
    assert simulate(times, graph).step_s == step_s
    assert in_flight(graph).tolist() == kept


@pytest.mark.parametrize(("schedule", "num_devices", "count", "each"), SETTINGS)
def test_each_operation_is_run_once_by_one_device(schedule, num_devices, count, each):
    kinds = (FORWARD, BACKWARD, WEIGHTS) if splits_backward(schedule) else (FORWARD, BACKWARD)
    run = [tuple(o) for d in range(num_devices) for o in _ORDERS[schedule](d, num_devices, count, each)]
    assert sorted(run) == sorted(itertools.product(kinds, range(num_devices * each), range(count)))
    device = graph_of(schedule, num_devices * each, count, each).device
    assert np.bincount(device).tolist() == [each] * num_devices


@pytest.mark.parametrize(("num_devices", "count", "each"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 32, 2)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_device(num_devices, count, each):
    """The step of M·(F + B) waits (D - 1)/(v·M) of it, where F and B are of all stages of a device (section 2.2)."""
    size = num_devices * each
    times = StageTimes([1.0] * size, [2.0] * size, [0.0] * (size - 1), [0.0] * (size - 1))
    step_s = simulate(times, graph_of("interleaved", size, count, each)).step_s
    assert step_s == count * each * 3 * (1 + (num_devices - 1) / (each * count))


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6])
def test_a_v_waits_only_until_the_first_micro_batch_comes(num_devices):
    """With F = B = W all devices compute without a pause, the last one after D - 1 forward operations of half a stage.

    A device keeps at most 2D halves at one time, as many as the D whole stages of the first device with 1F1B.
    """
    size, count = 2 * num_devices, 3 * num_devices
    ones, none = [1.0] * size, [0.0] * (size - 1)
    graph = graph_of("zb-v", size, count)
    assert simulate(StageTimes(ones, ones, none, none, ones), graph).step_s == 6 * count + num_devices - 1
    change = (graph.kind == FORWARD).astype(int) - (graph.kind == WEIGHTS)
    kept = [np.cumsum(change[graph.device[graph.stage] == d]).max() for d in range(num_devices)]
    assert max(kept) == 2 * num_devices


def test_a_device_ends_the_step_of_its_stages_one_after_the_other():
    times = StageTimes([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3)
    step = pipeline_step(times, "interleaved", 4, [1.0, 5.0, 2.0, 1.0], stages_per_device=2)
    assert step.step_s == step.simulation.step_s + 6.0
    assert step.simulation.bubble == pytest.approx(1 - 24 / step.simulation.step_s)
