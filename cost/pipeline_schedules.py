"""Schedules of pipelines: which operation a stage runs when, as a graph of operations and transfers.

A schedule is a function of a device, the number of devices, the number of micro-batches and the number of stages that a
device holds. It returns the operations of that device in the order in which they run. Everything else, such as which
stage is on which device, follows from these lists.

A device runs the operations of its stages one after the other in that order. From each device to each other one tensor
after the other is sent. An operation starts when its resource is free and its inputs are there. So a schedule is a
graph in which every operation has at most two predecessors.

Letters for sizes: S stages, D devices (or groups of devices that work as one), v = S / D stages on each, M
micro-batches, N operations of a schedule (with transfers).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from cost.real_numbers import Count, checked_number

FORWARD, BACKWARD, WEIGHTS, SEND_FORWARD, SEND_BACKWARD = range(5)
STAGE_KINDS = (FORWARD, BACKWARD, WEIGHTS)


class Operation(NamedTuple):
    """An operation of a device.

    Attributes:
      kind: `FORWARD`, `BACKWARD`, or `WEIGHTS`: the gradients of weights, where a schedule computes them apart.
      stage: of the model, from 0.
      microbatch: from 0.
    """

    kind: int
    stage: int
    microbatch: int


DeviceOrder = Callable[[int, int, int, int], list[Operation]]
"""`order(device, num_devices, num_microbatches, stages_per_device)`: the operations of a device in order."""

Schedule = Literal["gpipe", "1f1b", "eager", "2bw", "interleaved", "zb-h1", "zb-v"]
"""When a device runs its operations.

With "gpipe" all forward operations come first. With "1f1b" forward and backward operations alternate as soon as the
first backward one can run; stage i keeps at most S - i micro-batches. With "eager" it keeps up to 2(S - i) - 1, so that
transfers overlap with arithmetic. "2bw" is "1f1b" whose next step begins before this one has ended, with gradients of
the weights of one step ago: `cost.pipeline_steps` has what a step then takes. Its graph is that of one step.

With "interleaved" a device has several stages, so that the pipeline fills and drains faster. "zb-h1" splits the
backward operation into the gradient of the activations and that of the weights, and delays the second where the stage
would wait. "zb-v" does so too, with two stages on each device, the first and the last stage on the same one.
"""

Order = Sequence[Sequence[Operation]]
"""For each device its operations in the order in which they run."""


class ScheduleGraph(NamedTuple):
    """The operations of a schedule, each after all of its predecessors.

    Attributes:
      num_stages: S.
      num_microbatches: M.
      kind: `[N]`, such as `FORWARD`.
      stage: `[N]`, the stage that runs it; of a transfer the stage before the link, whichever way it sends.
      microbatch: `[N]`.
      predecessors: `[N, 2]`, the operation before it on its device or link, and the one whose result it needs; N where
        there is none.
      device: `[S]`, the device of each stage.
    """

    num_stages: int
    num_microbatches: int
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    predecessors: np.ndarray
    device: np.ndarray

    @property
    def num_devices(self) -> int:
        """D."""
        return int(self.device.max()) + 1


def alternating(forward: Sequence[Operation], backward: Sequence[Operation], num_first: int) -> list[Operation]:
    """Returns operations of which some forward ones come first; then backward and forward ones alternate.

    Args:
      forward: in the order in which they run.
      backward: as many, in the order in which they run.
      num_first: how many forward operations come before the first backward one.
    """
    order = list(forward[:num_first])
    for number, operation in enumerate(backward):
        order.append(operation)
        order += forward[number + num_first : number + num_first + 1]
    return order


def alternating_order(stage: int, num_microbatches: int, kept: int) -> list[Operation]:
    """Returns the operations of a stage that starts `kept` micro-batches before its first backward operation."""
    forward, backward = ([Operation(kind, stage, m) for m in range(num_microbatches)] for kind in (FORWARD, BACKWARD))
    return alternating(forward, backward, kept)


def gpipe(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns all forward operations, then all backward ones. Source: GPipe, Huang et al. (2019)."""
    return alternating_order(device, num_microbatches, num_microbatches)


def one_forward_one_backward(
    device: int, num_devices: int, num_microbatches: int, stages_per_device: int
) -> list[Operation]:
    """Returns forward and backward operations that alternate as soon as the first backward one can run.

    Source: Narayanan et al., "PipeDream-2BW" (2021), figure 4.
    """
    return alternating_order(device, num_microbatches, min(num_microbatches, num_devices - device))


def eager(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of 1F1B with up to twice the micro-batches, so that transfers overlap with arithmetic.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism" (2023), section 4.
    """
    return alternating_order(device, num_microbatches, min(num_microbatches, 2 * (num_devices - device) - 1))


def interleaved(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order in which a micro-batch goes round all devices v times: device d holds stages d, d + D, ...

    The first micro-batch reaches the last device after D - 1 stages of 1/v of a device's layers. So the pipeline fills
    and drains in 1/v of the time, for v times the transfers and more micro-batches in flight. Groups of D go through
    the first stage of each device, then through the second one of each, and so on; backward the stages come in the
    opposite order. M is a multiple of D: with a smaller last group some orders wait for each other for ever.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2 and figure 4; Megatron-LM's `forward_backward_pipelining_with_interleaving`.
    """
    groups = [range(first, first + num_devices) for first in range(0, num_microbatches, num_devices)]
    forward = [
        Operation(FORWARD, chunk * num_devices + device, m)
        for group in groups
        for chunk in range(stages_per_device)
        for m in group
    ]
    backward = [
        Operation(BACKWARD, chunk * num_devices + device, m)
        for group in groups
        for chunk in reversed(range(stages_per_device))
        for m in group
    ]
    num_first = 2 * (num_devices - device - 1) + (stages_per_device - 1) * num_devices + 1
    return alternating(forward, backward, min(num_first, len(forward)))


def zero_bubble(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of ZB-H1: 1F1B with the gradients of weights, which no other stage awaits, `device` later.

    So the last stage, where 1F1B keeps one micro-batch, keeps D, and has gradients of weights left to compute while the
    last gradient goes back through the other stages. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023),
    section 2.3.
    """
    found: list[Operation] = []
    for operation in one_forward_one_backward(device, num_devices, num_microbatches, stages_per_device):
        found.append(operation)
        if operation.kind == BACKWARD and operation.microbatch >= device:
            found.append(operation._replace(kind=WEIGHTS, microbatch=operation.microbatch - device))
    left = range(max(num_microbatches - device, 0), num_microbatches)
    return found + [Operation(WEIGHTS, device, m) for m in left]


def v_shaped(device: int, num_devices: int, num_microbatches: int, stages_per_device: int) -> list[Operation]:
    """Returns the order of ZB-V: device d holds the stages d and 2D - 1 - d, so that work goes down and up again.

    The first device has the first and the last stage, so the first backward operation runs where the forward one ended,
    and all devices keep about as much. With equal times of forward, backward and weights' gradients no device waits.
    The order is made for 2D - 1 micro-batches or more; those too many are left out.

    Source: Qi et al. (2023), section 6 and figure 8; the order is that of PyTorch's `ScheduleZBVZeroBubble`.
    """
    down, up, left = device, 2 * num_devices - 1 - device, num_devices - device
    count = max(2 * num_devices - 1, num_microbatches)
    both = [(BACKWARD, down), (WEIGHTS, down), (FORWARD, up), (BACKWARD, up), (WEIGHTS, up)]
    num_last = left - 1  # rounds in which no micro-batch is left to begin
    sequence = [
        *[(FORWARD, down)] * (2 * left - 1),
        *[(FORWARD, up), (FORWARD, down)] * device,
        *[(FORWARD, up), (BACKWARD, up), (WEIGHTS, up)] * left,
        *[(FORWARD, down), *both] * (count - num_devices - num_last),
        *both * num_last,
        *[(BACKWARD, down), (BACKWARD, up)] * device,
        *[(BACKWARD, down), (WEIGHTS, down)] * left,
        *[(WEIGHTS, up)] * device,
        *[(WEIGHTS, down)] * device,
    ]
    done: Counter[tuple[int, int]] = Counter()
    found = []
    for kind, stage in sequence:
        found.append(Operation(kind, stage, done[kind, stage]))
        done[kind, stage] += 1
    return [operation for operation in found if operation.microbatch < num_microbatches]


_ORDERS: dict[str, DeviceOrder] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager": eager,
    "2bw": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "zb-v": v_shaped,
}
_SEVERAL_STAGES = frozenset({"interleaved", "zb-v"})
"""The schedules in whose orders a device has several stages."""


def graph_of(
    schedule: Schedule, num_stages: int, num_microbatches: int, stages_per_device: int | None = None
) -> ScheduleGraph:
    """Returns the operations of a schedule.

    Args:
      schedule: its name.
      num_stages: S.
      num_microbatches: M.
      stages_per_device: S / D; None takes the least number that the schedule is for.

    Raises:
      ValueError: there is no such schedule, a number is below 1, a device cannot have so many stages, or interleaved
        micro-batches are no multiple of D.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"`schedule` must be one of {get_args(Schedule)}, not {schedule!r}.")
    num_stages = checked_number("num_stages", num_stages, Count)
    num_microbatches = checked_number("num_microbatches", num_microbatches, Count)
    each = checked_stages_per_device(schedule, stages_per_device)
    if num_stages % each:
        raise ValueError(f"`num_stages` must be a multiple of `stages_per_device`, {each}, not {num_stages}.")
    num_devices = num_stages // each
    if not goes_round(schedule, num_devices, num_microbatches):
        raise ValueError(
            f"`num_microbatches` must be a multiple of the {num_devices} devices with 'interleaved', not "
            f"{num_microbatches}: they go round the devices in groups of so many."
        )
    return _graph(schedule, num_devices, num_microbatches, each)


@lru_cache(maxsize=64)
def _graph(schedule: Schedule, num_devices: int, num_microbatches: int, stages_per_device: int) -> ScheduleGraph:
    order = _ORDERS[schedule]
    orders = [order(d, num_devices, num_microbatches, stages_per_device) for d in range(num_devices)]
    return schedule_graph(orders, num_microbatches)


def goes_round(schedule: Schedule, num_devices: int, num_microbatches: int) -> bool:
    """Returns whether a schedule has an order for so many micro-batches: interleaved, D of them go round together."""
    return schedule != "interleaved" or num_microbatches % num_devices == 0


def checked_stages_per_device(schedule: Schedule, stages_per_device: int | None) -> int:
    """Returns how many stages a device has with a schedule; None takes the least number.

    Raises:
      ValueError: the schedule is for other numbers.
    """
    least = 2 if schedule in _SEVERAL_STAGES else 1
    number = least if stages_per_device is None else checked_number("stages_per_device", stages_per_device, Count)
    if number != least and not (schedule == "interleaved" and number > least):
        more = " or more" if schedule == "interleaved" else ""
        raise ValueError(f"`stages_per_device` must be {least}{more} with {schedule!r}, not {number}.")
    return number


def splits_backward(schedule: Schedule) -> bool:
    """Returns whether a schedule computes the gradients of weights apart from those of activations."""
    return any(operation.kind == WEIGHTS for operation in _ORDERS[schedule](0, 1, 1, 1))


BY_STAGES_LEFT: tuple[Schedule, ...] = tuple(
    name for name in get_args(Schedule) if name not in _SEVERAL_STAGES and not splits_backward(name)
)
"""The schedules with one stage on each device, which keeps micro-batches by how many stages follow it alone."""


def in_flight(graph: ScheduleGraph) -> np.ndarray:
    """Returns `[S]`: how many micro-batches each stage keeps residuals of, at most."""
    last = WEIGHTS if (graph.kind == WEIGHTS).any() else BACKWARD
    change = (graph.kind == FORWARD).astype(int) - (graph.kind == last)
    return np.array([int(np.cumsum(change[graph.stage == s]).max()) for s in range(graph.num_stages)])


@lru_cache(maxsize=10_000)
def kept_microbatches(schedule: Schedule, stages_left: int, num_microbatches: int) -> int:
    """Returns how many micro-batches a stage keeps at most.

    Args:
      schedule: one of `BY_STAGES_LEFT`; with the others it depends on the number of stages, too.
      stages_left: the stages from this one to the last, itself included.
      num_microbatches: of the step.
    """
    operations = _ORDERS[schedule](0, stages_left, num_microbatches, 1)
    return [operation.kind for operation in operations].index(BACKWARD)


def schedule_graph(order: Order, num_microbatches: int) -> ScheduleGraph:
    """Returns the graph of devices that run the operations of all stages in some order.

    Raises:
      ValueError: the devices wait for each other for ever.
    """
    device = {operation.stage: d for d, operations in enumerate(order) for operation in operations}
    num_stages = max(device) + 1
    kinds, stages, microbatches, predecessors = [], [], [], []
    at: dict[tuple[int, int, int], int] = {}  # the number of an operation, by kind, stage and micro-batch
    last_on: dict[tuple[int, ...], int] = {}  # the last operation of a resource: a device, or a link and its direction

    def add(kind: int, stage: int, microbatch: int, needed: int | None) -> None:
        resource = _resource(kind, stage, device)
        predecessors.append((last_on.get(resource), needed))
        at[kind, stage, microbatch] = last_on[resource] = len(kinds)
        kinds.append(kind)
        stages.append(stage)
        microbatches.append(microbatch)

    position, total = [0] * len(order), sum(map(len, order))
    while sum(position) < total:
        before = sum(position)
        for d, operations in enumerate(order):
            while position[d] < len(operations):
                kind, stage, m = operations[position[d]]
                key = _needed(kind, stage, m, num_stages)
                if key is not None and key not in at:
                    break
                add(kind, stage, m, None if key is None else at[key])
                if kind == FORWARD and stage < num_stages - 1:
                    add(SEND_FORWARD, stage, m, at[FORWARD, stage, m])
                if kind == BACKWARD and stage > 0:
                    add(SEND_BACKWARD, stage - 1, m, at[BACKWARD, stage, m])
                position[d] += 1
        if sum(position) == before:
            raise ValueError("The devices of this schedule wait for each other for ever.")
    none = len(kinds)
    pairs = [[none if number is None else number for number in pair] for pair in predecessors]
    devices = [device[s] for s in range(num_stages)]
    arrays = [np.array(values) for values in (kinds, stages, microbatches, pairs, devices)]
    return ScheduleGraph(num_stages, num_microbatches, *arrays)


def _resource(kind: int, stage: int, device: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the resource that an operation occupies: a device, or the link from one device to another."""
    if kind in STAGE_KINDS:
        return (device[stage],)
    one, other = device[stage], device[stage + 1]
    return (one, other) if kind == SEND_FORWARD else (other, one)


def _needed(kind: int, stage: int, microbatch: int, num_stages: int) -> tuple[int, int, int] | None:
    """Returns the operation whose result an operation of a stage needs: its kind, stage and micro-batch."""
    if kind == FORWARD:
        return None if stage == 0 else (SEND_FORWARD, stage - 1, microbatch)
    if kind == WEIGHTS:
        return BACKWARD, stage, microbatch
    return (FORWARD, stage, microbatch) if stage == num_stages - 1 else (SEND_BACKWARD, stage, microbatch)
