"""Which device runs which layer of a chain: any device for any layer, or pipeline stages in device order.

Each layer is a node and each device a strategy. The transfer between neighbouring layers is an edge's matrix, the same
one for every edge, and what each device computes is a load: the cost takes the largest.

    free:      J = Σ_l T[x_l, x_{l+1}] + max_d Σ_{l on d} C[l, d]                        (`_free_problem`)
    pipeline:  J = Σ_l T[x_l, x_{l+1}] + (B - 1) · max_d Σ_{l on d} C[l, d] [+ Σ_l C[l, x_l]]   (`_with_pipeline`)

Letters for sizes: L layers, D devices, B micro-batches. An assignment matrix X `[L, D]` has a row of weights for each
layer.

`diffshard.pipelines.place` divides pipelines by the dynamic program of `diffshard.pipelines`; as a problem they are
for all other solvers, and for the price of any division.

Source: for the pipeline, the synchronous 1F1B schedule of Narayanan et al. (2021).
"""

import contextlib
import reprlib
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from cost.evaluation import checked_choice, chosen_costs, exact_sum
from cost.real_numbers import as_array, is_real
from search_spaces.base import Part


class DecodedPlacement(NamedTuple):
    """Where each layer runs and what that costs, in seconds.

    A type of its own beside `diffshard.pipelines.Placement`, which adds what the search found out, of which a search
    space knows nothing.

    Attributes:
      assignment: `[L]`, the device of each layer.
      transfer_s: between the devices of neighbouring layers.
      compute_s: of the busiest device; of a pipeline (B - 1) times that of the slowest stage, plus that of all stages
        where layer times depend on the device (where they do not, that sum is the same for every placement).
      device_s: `[D]`, what each device computes: all its layers once.
    """

    assignment: np.ndarray
    transfer_s: float
    compute_s: float
    device_s: np.ndarray


class PlacementSpace:
    """All placements of a chain of layers on devices, or on the stages of a pipeline.

    >>> space = PlacementSpace([3, 3, 3, 2, 4, 4], [[0, 2, 4], [2, 0, 3], [4, 3, 0]])
    >>> space.decode([0, 0, 0, 1, 2, 2]).compute_s
    9.0

    Args:
      layer_times: C, seconds, `[L]` where devices are equal or `[L, D]`; inf where a layer cannot run on a device.
      transfer: T `[D, D]`, seconds from the device of one layer (row) to that of the next (column). Of a pipeline only
        `transfer[d, d + 1]` matters.
      num_microbatches: B of a pipeline; None lets any layer run on any device.
      layer_bytes: `[L]`, what each layer holds on its device for the whole step.
      memory_limit_bytes: of each device, one number or `[D]`.

    Raises:
      ValueError: sizes that do not fit, negative or NaN numbers, a memory limit without `layer_bytes`, fewer layers
        than stages, micro-batches that are not a positive integer.
    """

    def __init__(
        self,
        layer_times: np.ndarray | Sequence,
        transfer: np.ndarray | Sequence,
        *,
        num_microbatches: int | None = None,
        layer_bytes: np.ndarray | Sequence | None = None,
        memory_limit_bytes: float | np.ndarray = np.inf,
    ):
        transfer = _checked_transfer(transfer)
        self._times = _times_on_devices(layer_times, len(transfer))
        free = _with_memory(_free_problem(self._times, transfer), layer_bytes, memory_limit_bytes)
        self._num_microbatches = num_microbatches
        self._problem = free if num_microbatches is None else _with_pipeline(free, self._times, num_microbatches)

    @property
    def problem(self) -> Problem:
        """A node for each layer with a strategy for each device; an edge between neighbouring layers."""
        return self._problem

    @property
    def node_names(self) -> tuple[str, ...]:
        """The layers, `[L]` names."""
        return tuple(f"layer {layer}" for layer in range(len(self._times)))

    def stage_s(self) -> np.ndarray:
        """Returns `[D, L, L + 1]`, the seconds of layers `start` to `end` (exclusive) on each device.

        It is infinite where one of them cannot run there or they exceed its memory together, and for no layers at all.
        """
        num_layers, num_devices = self._times.shape
        needed = np.zeros((num_layers, num_devices))  # of each device's memory
        for v, usage in zip(self.problem.usage_node, self.problem.usage, strict=True):
            needed[v] += usage.max(axis=-1)
        seconds = np.full((num_devices, num_layers, num_layers + 1), np.inf)
        for start in range(num_layers):
            fits = np.cumsum(needed[start:], axis=0) <= self.problem.memory_limit
            seconds[:, start, start + 1 :] = np.where(fits, np.cumsum(self._times[start:], axis=0), np.inf).T
        return seconds

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the names of the devices, or of the stages of a pipeline, `[D]`; the same for every layer."""
        del node
        kind = "device" if self._num_microbatches is None else "stage"
        return tuple(f"{kind} {d}" for d in range(self._times.shape[1]))

    def decode(self, choice: Sequence[int]) -> DecodedPlacement:
        """Returns where each layer runs and how long each device computes.

        Raises:
          ValueError: the choice has the wrong length or a device that there is not.
        """
        assignment = checked_choice(self.problem, choice)
        layer_s, edge_s, load_s = chosen_costs(self.problem, assignment)
        layers, num_devices = np.arange(len(self._times)), self._times.shape[1]
        return DecodedPlacement(
            assignment=assignment,
            transfer_s=exact_sum(edge_s),
            compute_s=exact_sum(layer_s) + float(load_s.max()),
            device_s=np.bincount(assignment, self._times[layers, assignment], num_devices),
        )

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns each layer's own time where the cost counts it, each transfer that takes time, and the largest load.

        Raises:
          ValueError: as `decode`.
        """
        assignment = checked_choice(self.problem, choice)
        layer_s, edge_s, load_s = chosen_costs(self.problem, assignment)
        layers, devices = self.node_names, self.strategy_names(0)
        busiest = int(load_s.argmax())
        layer_parts = [Part(layers[v], "compute", v, float(s)) for v, s in enumerate(layer_s) if s]
        transfer_parts = [
            Part(f"{layers[v - 1]} to {layers[v]}", "transfer", v, float(s)) for v, s in enumerate(edge_s, 1) if s
        ]
        return (*layer_parts, *transfer_parts, Part(devices[busiest], "compute", None, float(load_s[busiest])))


def _free_problem(times: np.ndarray, transfer: np.ndarray) -> Problem:
    """Builds the problem of any layer on any device, without memory; a layer is forbidden where its time is infinite.

    Args:
      times: `[L, D]` seconds.
      transfer: `[D, D]` seconds.
    """
    num_layers = len(times)
    return Problem(
        node_cost=list(np.where(np.isinf(times), np.inf, 0.0)),
        edge_nodes=np.stack([np.arange(num_layers - 1), np.arange(1, num_layers)], axis=1),
        edge_cost=[transfer] * (num_layers - 1),
        load=[np.diag(row) for row in np.where(np.isinf(times), 0.0, times)],
    )


def _with_pipeline(free: Problem, times: np.ndarray, num_microbatches: int) -> Problem:
    """Restricts a free problem to contiguous stages in device order, none empty, and counts micro-batches.

    The stage after each layer's is the same or the next one: everything else is forbidden, and so are a first layer
    that is not on the first device and a last one that is not on the last. What the slowest stage delays, B - 1 times,
    is the load. The first micro-batch's way through all stages, Σ_l C[l, x_l], is counted where a layer's time depends
    on the device; where all devices are alike it is the same for every choice and is left out.
    """
    num_layers, num_devices = times.shape
    if num_layers < num_devices:
        raise ValueError(f"`layer_times` has {num_layers} layers, too few for {num_devices} stages of at least one.")
    if not isinstance(num_microbatches, Integral) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise ValueError(f"`num_microbatches` must be an integer of at least 1, got {num_microbatches!r}.")
    stage = np.arange(num_devices)
    stages_apart = stage[None, :] - stage[:, None]
    own_s = np.zeros_like(times) if (times == times[:, :1]).all() else times
    reachable = [(stage <= layer) & (num_devices - stage <= num_layers - layer) for layer in range(num_layers)]
    node_cost = [
        np.where(mask, seconds, np.inf) + cost
        for mask, seconds, cost in zip(reachable, own_s, free.node_cost, strict=True)
    ]
    edge_cost = []
    if num_layers > 1:
        step = np.where(stages_apart == 1, free.edge_cost[0], np.where(stages_apart == 0, 0.0, np.inf))
        edge_cost = [step] * (num_layers - 1)
    return free._replace(
        node_cost=node_cost,
        edge_cost=edge_cost,
        load=[(num_microbatches - 1) * load for load in free.load],
    )


def _with_memory(
    problem: Problem, layer_bytes: np.ndarray | Sequence | None, memory_limit_bytes: float | np.ndarray
) -> Problem:
    """Adds the bytes that each layer holds on its device, `[L]`, and the limit of each device, a number or `[D]`."""
    num_layers, num_devices = len(problem.node_cost), len(problem.node_cost[0])
    limit = _checked_numbers(memory_limit_bytes, "memory_limit_bytes")
    if layer_bytes is None:
        if np.isfinite(limit).any():
            raise ValueError(f"`memory_limit_bytes` is {limit.tolist()}, which needs `layer_bytes` to be held against.")
        return problem
    layer_bytes = _checked_numbers(layer_bytes, "layer_bytes")
    if layer_bytes.shape != (num_layers,):
        raise ValueError(
            f"`layer_bytes` must have one number for each of {num_layers} layers, got {layer_bytes.shape}."
        )
    if limit.shape not in ((), (num_devices,)):
        raise ValueError(f"`memory_limit_bytes` must be a number or `[{num_devices}]`, got shape {limit.shape}.")
    return problem._replace(
        usage_node=np.arange(num_layers),
        usage=[np.eye(num_devices) * num_bytes for num_bytes in layer_bytes],
        usage_interval=np.tile([0, 1], (num_layers, 1)),
        memory_limit=np.broadcast_to(limit, (num_devices,)),
    )


def _times_on_devices(layer_times: np.ndarray | Sequence, num_devices: int) -> np.ndarray:
    """Returns layer times as `[L, D]` seconds, with equal columns where `[L]` was given."""
    times = _checked_numbers(layer_times, "layer_times")
    if times.ndim == 1:
        times = np.repeat(times[:, None], num_devices, axis=1)
    if times.ndim != 2 or times.shape[1] != num_devices or not len(times):
        raise ValueError(f"`layer_times` must be `[L]` or `[L, {num_devices}]` with L > 0, got shape {times.shape}.")
    return times


def _checked_transfer(transfer: np.ndarray | Sequence) -> np.ndarray:
    transfer = _checked_numbers(transfer, "transfer")
    if transfer.ndim != 2 or transfer.shape[0] != transfer.shape[1] or not transfer.size:
        raise ValueError(f"`transfer` must be square, a row and a column for each device; got shape {transfer.shape}.")
    return transfer


def _checked_numbers(numbers: np.ndarray | Sequence | float, name: str) -> np.ndarray:
    array = as_array(numbers)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if array.dtype.kind in "OV":  # fractions and large integers, and the short floats of JAX
            array = array.astype(float)
    if not is_real(array) or np.isnan(array).any() or (array < 0).any():
        shown = reprlib.repr(array.tolist())
        raise ValueError(f"`{name}` must be numbers that are not negative or NaN, got {shown}.")
    return array.astype(float)


EXAMPLE = partial(PlacementSpace, (3, 3, 3, 2, 4, 4), ((0, 2, 4), (2, 0, 3), (4, 3, 0)))
