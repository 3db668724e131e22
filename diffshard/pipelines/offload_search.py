"""Which residuals of a stage wait in the memory of the host, and what that costs.

Every offloaded byte takes as long as any other: once to the host and once back. So for each choice of what is made
again the memory that is still missing says how many bytes have to leave the devices, and both together how long the
choice takes. Of the residuals that are left the largest are offloaded.

A copy is priced as if nothing ran beside it: a forward program ends when its residuals are on the host, and a backward
program begins when they are back.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from cost.base import Hardware
from diffshard.pipelines.stage_search import StageLayout
from search_spaces.partition_specs import NamedSpec
from search_spaces.pipelines.forward_backward import num_bytes
from search_spaces.pipelines.residuals import can_be_offloaded, residuals_of
from search_spaces.pipelines.stage_labels import Key
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.rematerialisation.choices import RematChoice


class ResidualEstimate(NamedTuple):
    """What a choice of residuals takes, before it is searched.

    Attributes:
      choice: what is kept and what is made again; its seconds are those of one device that has all of it.
      num_bytes: of the activations of all micro-batches in flight, as a whole.
    """

    choice: RematChoice
    num_bytes: float


def least_offload(
    estimates: Sequence[ResidualEstimate], needed_bytes: float, in_flight: int, hardware: Hardware
) -> tuple[RematChoice, float] | None:
    """Returns the choice of residuals that is fastest with as much of it offloaded as the memory demands.

    Args:
      estimates: choices; what is made again and what is offloaded is split over devices alike.
      needed_bytes: what activations may take, as a whole.
      in_flight: k; a byte that is offloaded spares k - 1, because a micro-batch that runs has it on the devices.
      hardware: of the stage; must know `host_memory_bytes_per_s`.

    Returns:
      The choice and the bytes of each micro-batch to offload, as a whole; None where no choice can do.
    """
    assert hardware.host_memory_bytes_per_s is not None
    possible = []
    for number, (choice, activation_bytes) in enumerate(estimates):
        offloaded = max(activation_bytes - needed_bytes, 0.0) / max(in_flight - 1, 1)
        if in_flight > 1 and 0 < offloaded <= choice.kept_bytes:
            seconds = choice.seconds + 2 * offloaded / hardware.host_memory_bytes_per_s
            possible.append((seconds, number, offloaded))
    if not possible:
        return None
    _, number, offloaded = min(possible)
    return estimates[number].choice, offloaded


def largest_residuals(staged: StagedStep, stage: int, least_bytes: float) -> tuple[int, ...]:
    """Returns the positions of the fewest, largest residuals of a stage that reach a number of bytes, or of all."""
    residuals = residuals_of(staged, stage)
    size = {i: num_bytes(staged.avals[k]) for i, k in enumerate(residuals) if can_be_offloaded(staged, k)}
    chosen: list[int] = []
    for i in sorted(size, key=lambda i: -size[i]):
        if sum(size[j] for j in chosen) < least_bytes:
            chosen.append(i)
    return tuple(sorted(chosen))


def offloaded_keys(staged: StagedStep, layouts: Sequence[StageLayout]) -> list[Key]:
    """Returns the keys of what the stages of a step offload, as their layouts say."""
    return [residuals_of(staged, i)[place] for i, layout in enumerate(layouts) for place in layout.offloaded]


def with_copies(
    layout: StageLayout,
    staged: StagedStep,
    stage: int,
    offloaded: Sequence[int],
    sizes: dict[str, int],
    hardware: Hardware,
) -> StageLayout:
    """Returns a layout with the seconds of the copies to the host and back, which its lower bound is without.

    Args:
      layout: of a stage whose residuals at some positions are offloaded.
    """
    assert hardware.host_memory_bytes_per_s is not None
    residuals = residuals_of(staged, stage)
    offloaded_bytes = sum(_local_bytes(staged, residuals[i], layout.specs, sizes) for i in offloaded)
    offload_s = offloaded_bytes / hardware.host_memory_bytes_per_s
    return replace(
        layout,
        seconds=layout.seconds + 2 * staged.num_microbatches * offload_s,
        offloaded=tuple(offloaded),
        offloaded_bytes=offloaded_bytes,
        offload_s=offload_s,
    )


def _local_bytes(staged: StagedStep, key: Key, specs: dict[Key, NamedSpec], sizes: dict[str, int]) -> float:
    parts = prod(sizes[axis] for axes in specs.get(key, ()) for axis in axes)
    return num_bytes(staged.avals[key]) / parts
