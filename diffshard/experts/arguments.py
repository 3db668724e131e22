"""Checks of what users give to `group_experts` and `assign_experts`, before any work starts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cost.expert_groups import ExpertStep, ExpertWorkers
from cost.real_numbers import real_number, whole_number
from diffshard.base import InfeasibleError

_LONGEST_S = 1e100
"""More than any real plan takes, and little enough that squares and sums of times do not overflow."""


def checked_workers(flops_per_s: Any, capacity: Any, latency_s: Any, s_per_byte: Any) -> ExpertWorkers:
    """Returns the workers."""
    speeds = checked_speeds(flops_per_s)
    links = []
    for name, numbers in (("latency_s", latency_s), ("s_per_byte", s_per_byte)):
        matrix = _numbers(name, numbers).copy()
        if matrix.shape != (len(speeds), len(speeds)):
            raise ValueError(
                f"`{name}` must be `[{len(speeds)}, {len(speeds)}]`, a row and a column for each worker; got shape "
                f"{matrix.shape}."
            )
        np.fill_diagonal(matrix, 0.0)
        _check_all(name, matrix, matrix >= 0, "at least 0 and finite; leave slow links in with their numbers")
        links.append(matrix)
    return ExpertWorkers(speeds, checked_capacity(capacity, len(speeds)), *links)


def checked_step(
    expert_flops: Any,
    *,
    layer_spacing: Any,
    recomputation: Any,
    **numbers: Any,
) -> ExpertStep:
    """Returns the step."""
    works = checked_works(expert_flops)
    for name in ("exchange_bytes", "num_exchanges", "all_reduce_bytes"):
        value = real_number(numbers[name])
        if value is None or not 0 <= value < float("inf"):
            raise ValueError(f"`{name}` must be a finite number of at least 0, not {numbers[name]!r}.")
        numbers[name] = value
    numbers["layer_spacing"] = layer_spacing
    for name in ("num_layers", "layer_spacing", "global_batch", "mini_batch"):
        value = whole_number(numbers[name])
        if value is None or value < 1:
            raise ValueError(f"`{name}` must be a positive whole number, not {numbers[name]!r}.")
        numbers[name] = value
    if numbers["layer_spacing"] > numbers["num_layers"]:
        raise ValueError(
            f"`layer_spacing` must be at most `num_layers`, {numbers['num_layers']}, so that a layer has experts; got "
            f"{numbers['layer_spacing']}."
        )
    again = real_number(float(recomputation) if isinstance(recomputation, bool) else recomputation)
    if again is None or not 0 <= again < float("inf"):
        raise ValueError(
            f"`recomputation` must be how many forward passes are made again, such as 0 or 1, not {recomputation!r}."
        )
    return ExpertStep(tuple(works.tolist()), recomputation=again, **numbers)


def checked_works(expert_flops: Any) -> np.ndarray:
    """Returns the work of each expert, `[X]`; raises `ValueError` if it breaks a rule."""
    works = _vector("expert_flops", expert_flops, "expert")
    _check_all("expert_flops", works, works > 0, "positive and finite; leave out experts that compute nothing")
    return works


def checked_speeds(flops_per_s: Any) -> np.ndarray:
    """Returns the speed of each worker, `[W]`; raises `ValueError` if it breaks a rule."""
    speeds = _vector("flops_per_s", flops_per_s, "worker")
    _check_all("flops_per_s", speeds, speeds > 0, "positive and finite; leave out workers that cannot compute")
    return speeds


def checked_capacity(capacity: Any, num_workers: int) -> np.ndarray:
    """Returns the experts that each worker has room for, `[W]` integers.

    Args:
      capacity: one whole number for all workers, or W of them.
      num_workers: W.
    """
    numbers = _numbers("capacity", capacity)
    if numbers.shape not in ((), (num_workers,)):
        raise ValueError(
            f"`capacity` must be a whole number or one for each of {num_workers} workers, got shape {numbers.shape}."
        )
    whole = (numbers >= 0) & (numbers == np.floor(numbers)) & (numbers < 2**31)
    _check_all("capacity", numbers, whole, "a whole number of experts, at least 0")
    return np.broadcast_to(numbers.astype(np.int64), (num_workers,))


def check_room(num_experts: int, capacity: np.ndarray) -> None:
    """Raises `InfeasibleError` where workers have less room than there are experts; says how many are missing."""
    room = int(capacity.sum())
    if room < num_experts:
        whose = "the only worker" if len(capacity) == 1 else f"all {len(capacity)} workers together"
        raise InfeasibleError(
            f"`capacity` of {whose} is {room}, {num_experts - room} less than the "
            f"{num_experts} experts of `expert_flops`. Give more workers, more capacity, or fewer experts."
        )


def check_scale(works: np.ndarray, speeds: np.ndarray) -> None:
    """Raises `ValueError` where experts take longer than numbers can say, on the slowest worker or all together."""
    with np.errstate(over="ignore"):
        longest_s = works.sum() / speeds.min()
    if not longest_s < _LONGEST_S:
        raise ValueError(
            f"`expert_flops` are too many for `flops_per_s`: all experts, of {works.max()} FLOPs at most, would take "
            f"{longest_s:.3g} s on the slowest worker, of {speeds.min()} in a second. Check the units."
        )


def _vector(name: str, numbers: Any, thing: str) -> np.ndarray:
    vector = _numbers(name, numbers)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"`{name}` must have one number for each {thing} and at least one, got shape {vector.shape}.")
    return vector


def _numbers(name: str, numbers: float | Sequence[float] | np.ndarray) -> np.ndarray:
    try:
        return np.asarray(numbers, float)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be numbers in equally long rows, not {numbers!r}.") from None


def _check_all(name: str, numbers: np.ndarray, valid: np.ndarray, rule: str) -> None:
    wrong = np.argwhere(~(valid & np.isfinite(numbers)))
    if len(wrong):
        where = tuple(map(int, wrong[0]))
        raise ValueError(f"`{name}{list(where) if where else ''}` must be {rule}; got {numbers[where]}.")
