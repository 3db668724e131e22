"""Which device runs which layer of a chain: free placement, and pipeline stages in device order.

Letters for sizes: L layers, D devices. An assignment matrix X `[L, D]` has one row of weights for each layer.
"""

from collections.abc import Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem


def placement_problem(
    layer_times: np.ndarray | Sequence,
    transfer: np.ndarray | Sequence,
    *,
    layer_bytes: np.ndarray | Sequence | None = None,
    memory_limit_bytes: float | np.ndarray = np.inf,
) -> Problem:
    """Any layer on any device: J = Σ_l T[x_l, x_{l+1}] + max_d Σ_{l on d} C[l, d].

    Args:
      layer_times: C, seconds, `[L]` where devices are equal or `[L, D]`; inf where a layer cannot run on a device.
      transfer: T `[D, D]`, seconds from the device of one layer (row) to that of the next (column).
      layer_bytes: `[L]`, what each layer holds on its device for the whole step.
      memory_limit_bytes: one number, or `[D]`.

    Raises:
      ValueError: sizes that do not fit, negative or NaN numbers, a memory limit without `layer_bytes`.
    """
    transfer = _checked(transfer, "transfer")
    num_devices = len(transfer) if transfer.ndim else 0
    if transfer.shape != (num_devices, num_devices) or not num_devices:
        raise ValueError(f"`transfer` must be square, a row and a column for each device; got shape {transfer.shape}.")
    times = times_on_devices(layer_times, num_devices)
    num_layers = len(times)
    return Problem(
        node_cost=list(np.where(np.isinf(times), np.inf, 0.0)),
        edge_nodes=np.stack([np.arange(num_layers - 1), np.arange(1, num_layers)], axis=1),
        edge_cost=[transfer] * (num_layers - 1),
        **_memory(layer_bytes, num_layers, num_devices, memory_limit_bytes),
        load=[np.diag(row) for row in np.where(np.isinf(times), 0.0, times)],
    )


def pipeline_problem(
    layer_times: np.ndarray | Sequence,
    transfer: np.ndarray | Sequence,
    *,
    num_microbatches: int,
    layer_bytes: np.ndarray | Sequence | None = None,
    memory_limit_bytes: float | np.ndarray = np.inf,
) -> Problem:
    """Contiguous stages in device order, none empty: J = (B - 1) · max stage + Σ cuts [+ Σ stages], B micro-batches.

    The stage after each layer's is the same or the next one: everything else is forbidden, so is a first layer that is
    not on the first device and a last one that is not on the last. What the slowest stage delays, B - 1 times, is the
    load. The first micro-batch's way through all stages, Σ stages, is in J where a layer's time depends on the device;
    where all devices are alike it is the same for every choice and is left out, for any `[L]` times and for `[L, D]`
    ones with equal columns. Arguments as in `placement_problem`; only `transfer[d, d + 1]` matters.

    Source: the synchronous 1F1B pipeline of Narayanan et al. (2021).

    Raises:
      ValueError: as `placement_problem`; fewer layers than devices; micro-batches that are no positive integer.
    """
    free = placement_problem(layer_times, transfer, layer_bytes=layer_bytes, memory_limit_bytes=memory_limit_bytes)
    num_layers, num_devices = len(free.node_cost), len(free.load[0][0])
    if num_layers < num_devices:
        raise ValueError(f"`layer_times` has {num_layers} layers, too few for {num_devices} stages of at least one.")
    if not isinstance(num_microbatches, Integral) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise ValueError(f"`num_microbatches` must be an integer of at least 1, got {num_microbatches!r}.")
    stage = np.arange(num_devices)
    ahead = stage[None, :] - stage[:, None]
    step = np.where(ahead == 0, 0.0, np.where(ahead == 1, np.asarray(transfer, float), np.inf))
    times = times_on_devices(layer_times, num_devices)
    alike = (times == times[:, :1]).all()
    node_cost = [
        np.where((stage <= layer) & (num_devices - stage <= num_layers - layer), 0.0 if alike else own, np.inf) + cost
        for layer, (own, cost) in enumerate(zip(times, free.node_cost, strict=True))
    ]
    return free._replace(
        node_cost=node_cost,
        edge_cost=[step] * (num_layers - 1),
        load=[(num_microbatches - 1) * load for load in free.load],
    )


def transitions(assignment: jax.Array | np.ndarray) -> jax.Array:
    """M = Xᵀ S X `[D, D]`: how often a layer on device i (row) is followed by one on device j (column).

    S shifts X up by one row, its last row becoming zero. Σ M ⊙ T is the transfer, differentiable in the weights.
    """
    shifted_up = jnp.concatenate([assignment[1:], jnp.zeros_like(assignment[:1])])
    return jnp.asarray(assignment).T @ shifted_up


def times_on_devices(layer_times: np.ndarray | Sequence, num_devices: int) -> np.ndarray:
    """Layer times as `[L, D]` seconds, with equal columns where `[L]` was given; raises as `placement_problem`."""
    times = _checked(layer_times, "layer_times")
    if times.ndim == 1:
        times = np.repeat(times[:, None], num_devices, axis=1)
    if times.ndim != 2 or times.shape[1] != num_devices or not len(times):
        raise ValueError(f"`layer_times` must be `[L]` or `[L, {num_devices}]` with L > 0, got shape {times.shape}.")
    return times


def _memory(
    layer_bytes: np.ndarray | Sequence | None,
    num_layers: int,
    num_devices: int,
    memory_limit_bytes: float | np.ndarray,
) -> dict:
    limit = _checked(memory_limit_bytes, "memory_limit_bytes")
    if layer_bytes is None:
        if np.isfinite(limit).any():
            raise ValueError(f"`memory_limit_bytes` is {limit.tolist()}, which needs `layer_bytes` to be held against.")
        empty = np.zeros(0, np.int64)
        return {"usage_node": empty, "usage": [], "usage_interval": empty.reshape(0, 2)}
    held = _checked(layer_bytes, "layer_bytes")
    if held.shape != (num_layers,):
        raise ValueError(f"`layer_bytes` must have one number for each of {num_layers} layers, got {held.shape}.")
    if limit.shape not in ((), (num_devices,)):
        raise ValueError(f"`memory_limit_bytes` must be a number or `[{num_devices}]`, got shape {limit.shape}.")
    return {
        "usage_node": np.arange(num_layers),
        "usage": [np.eye(num_devices) * number for number in held],
        "usage_interval": np.tile([0, 1], (num_layers, 1)),
        "memory_limit": np.broadcast_to(limit, (num_devices,)),
    }


def _checked(numbers: np.ndarray | Sequence | float, name: str) -> np.ndarray:
    numbers = np.asarray(numbers, float)
    if np.isnan(numbers).any() or (numbers < 0).any():
        raise ValueError(f"`{name}` must not be negative or NaN, got {numbers.tolist()}.")
    return numbers
