"""The division with the least sum of all stages and links plus a weight times the slowest stage, exactly.

That is what a pipeline takes with the formula of Alpa, with the weight M - 1. It is no fold, but with a limit on each
stage the sum alone is one. So the programme runs without a limit, then with one just below the slowest stage that it
found, and so on. No division lies between two of these: each has the least sum among those that are as fast as it.

Letters for sizes: L layers, P submeshes, M micro-batches.

Source: Alpa, Zheng et al. (2022), section 5.2, which tries all limits in increasing order.
"""

from collections.abc import Callable, Sequence

import numpy as np

from cost.real_numbers import real_number
from diffshard.pipelines.stage_programme import (
    Division,
    Objective,
    Submesh,
    best_division,
    limited_sum_objective,
    slowest_stage_objective,
)


def least_sum_and_slowest(
    num_layers: int,
    devices: Sequence[int],
    submeshes: Sequence[Submesh],
    stage_s: Callable[[int], np.ndarray],
    link_s: np.ndarray,
    slowest_weight: float,
    *,
    max_stages: int,
    use_all_devices: bool = True,
) -> Division | None:
    """Finds the division with the least Σ_i (t_i + c_i) + w·max_i t_i.

    Args:
      num_layers: as in `best_division`, and so are all arguments without an entry here.
      devices: as there.
      submeshes: as there.
      stage_s: as there.
      link_s: as there.
      slowest_weight: w, finite and not negative.
      max_stages: as there.
      use_all_devices: as there.

    Returns:
      The best division and its value; None where every one is infinite.

    Raises:
      ValueError: as `best_division`, and if the weight is negative or not finite.
    """
    weight = real_number(slowest_weight)
    if weight is None or not 0 <= weight < np.inf:
        raise ValueError(f"`slowest_weight` must be a finite number, 0 or more, not {slowest_weight!r}.")
    tables: dict[int, np.ndarray] = {}  # every run of the programme reads the same times

    def table(number: int) -> np.ndarray:
        if number not in tables:
            tables[number] = np.asarray(stage_s(number), float)
        return tables[number]

    def divide(objective: Objective) -> Division | None:
        return best_division(
            num_layers,
            devices,
            submeshes,
            table,
            link_s,
            objective,
            max_stages=max_stages,
            use_all_devices=use_all_devices,
        )

    fastest = divide(slowest_stage_objective())
    if fastest is None:
        return None
    best, limit_s = None, np.inf
    while (division := divide(limited_sum_objective(limit_s))) is not None:
        if best is not None and division.value + slowest_weight * fastest.value >= best.value:
            break  # the sums only grow from here on
        slowest_s = slowest_of(division, table)
        value = division.value + slowest_weight * slowest_s
        if best is None or value < best.value:
            best = Division(division.stages, value)
        limit_s = float(np.nextafter(slowest_s, -np.inf))
    return best


def slowest_of(division: Division, stage_s: Callable[[int], np.ndarray]) -> float:
    """Returns the seconds of the slowest stage of a division; `stage_s` is that of `best_division`."""
    later = range(len(division.stages), 0, -1)
    return max(float(stage_s(n)[stage]) for n, stage in zip(later, division.stages, strict=True))
