"""Chooses what waits for the backward pass in the host's memory, and when it is copied there and back.

XLA's GPU compiler copies between the memories beside arithmetic: a copy starts and ends at two places of the program,
and kernels run in between. But it orders a program by its dependences alone, and would copy an array to the host just
before it is copied back. So each copy gets two places: a barrier before the step of the forward pass by which an array
has left, and one before the step of the backward pass from which on it comes back. Both follow from the seconds of the
steps: the link copies one array after the other, as soon as they are made, and back as late as they are in time. No
more is offloaded than the link can copy while each pass runs.

In a scan over layers each trip copies its own part, and the loop's border takes the place of the barriers.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from search_spaces.rematerialisation.choices import Network, RematChoice
from search_spaces.rematerialisation.passes import (
    Passes,
    backward_reads,
    first_reads,
    made_by,
    regions_of,
    step_key,
    vertices_of,
)
from search_spaces.sharding.graph import Step, Value

_LEAST_SHARE = 0.01
"""Of what a choice keeps, an offloaded array has at least this part: small copies take as long as larger ones."""


class Offload(NamedTuple):
    """An array that waits in the host's memory.

    Attributes:
      value: the id of the array; of a scan's body for what all trips leave.
      gone_before: the key of the step by which it has left the device; 0 with `back_from` in a scan.
      back_from: the key of the step of the backward pass from which on it comes back.
    """

    value: int
    gone_before: int
    back_from: int


class HostLink(NamedTuple):
    """The way to the host's memory.

    Attributes:
      exposed_share: the part of a copy's seconds that a step waits for, although kernels run beside it.
    """

    s_per_byte: float
    exposed_share: float

    def wait_s(self, num_bytes: float) -> float:
        """Returns how long a step waits for the copies of an array to the host and back."""
        return 2 * self.exposed_share * self.s_per_byte * num_bytes


def offloading(
    network: Network,
    passes: Sequence[Passes],
    candidate: RematChoice,
    link: HostLink,
    share: float,
) -> RematChoice | None:
    """Returns a choice with some of what it keeps offloaded; None if the link is too slow for anything.

    Args:
      share: the part of a forward pass's seconds in which the link may copy, up to 1.
    """
    offloads: list[Offload] = []
    for one in passes:
        offloads += _of_passes(network, one, candidate, link, share)
    if not offloads:
        return None
    ids = {offload.value for offload in offloads}
    num_bytes = sum(network.bytes[v] for v in ids)
    return candidate._replace(
        kept=candidate.kept - ids,
        offloaded=tuple(sorted(offloads)),
        seconds=candidate.seconds + link.wait_s(num_bytes),
        kept_bytes=candidate.kept_bytes - num_bytes,
        host_bytes=num_bytes,
    )


def offloadable(network: Network, passes: Sequence[Passes]) -> set[int]:
    """Returns the ids of all arrays that could be offloaded."""
    return {value.id for one in passes for value, _ in _arrays(network, one, frozenset(network.bytes), frozenset())}


def _of_passes(
    network: Network,
    passes: Passes,
    candidate: RematChoice,
    link: HostLink,
    share: float,
) -> Iterator[Offload]:
    arrays = [
        (value, read_at)
        for value, read_at in _arrays(network, passes, candidate.kept, candidate.recomputed)
        if network.bytes[value.id] >= _LEAST_SHARE * candidate.kept_bytes
    ]
    seconds = [_seconds(network, step) for step in passes.forward]
    budget_s = share * sum(seconds)
    chosen: list[tuple[Value, int]] = []
    if passes.pair is not None:
        arrays.sort(key=lambda pair: -network.bytes[pair[0].id])
    for value, read_at in arrays:
        budget_s -= link.s_per_byte * network.bytes[value.id]
        if budget_s < 0:
            break
        chosen.append((value, read_at))
    if passes.pair is not None:
        yield from (Offload(value.id, 0, 0) for value, _ in chosen)
        return
    gone = _places_gone(network, passes, [value for value, _ in chosen], seconds, link)
    back = _places_back(network, passes, chosen, [_seconds(network, step) for step in passes.backward], link)
    for value, _ in chosen:
        yield Offload(value.id, gone[value.id], back[value.id])


def _arrays(
    network: Network, passes: Passes, kept: Collection[int], recomputed: frozenset[int]
) -> Iterator[tuple[Value, int]]:
    """Yields the kept arrays of a forward pass in order, with the place of their first reader in the backward pass."""
    again = [(region.position, value) for region in regions_of(passes, recomputed) for value in region.inputs]
    read_at = first_reads((*backward_reads(passes), *again))
    made = made_by(passes.forward)
    values = [v for step in passes.forward for v in step.results]
    if passes.pair is not None:
        carries = [carry.results[0] for carry in passes.pair.forward.carries]
        made |= {v.id: passes.forward[0] for v in carries}
        values = carries + values
    for value in values:
        num_bytes = network.bytes.get(value.id, 0.0)
        is_number = value.dtype is not None and (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool)
        is_array = bool(value.shape) and is_number and not value.is_on_host and 0 < num_bytes < np.inf
        place = read_at.get(value.id, len(passes.backward))  # what is read after all steps is handed on as it is
        is_free = value.id in kept and value.id in made and value.id not in passes.pinned
        if is_array and is_free and place < len(passes.backward):
            yield value, place


def _places_gone(
    network: Network, passes: Passes, values: Sequence[Value], seconds: Sequence[float], link: HostLink
) -> dict[int, int]:
    """Returns the key of the step before which the copy of each array has ended; the arrays are in order."""
    ends, at = np.cumsum(seconds), {v.id: i for i, step in enumerate(passes.forward) for v in step.results}
    gone, free_s = {}, 0.0
    for value in values:
        free_s = max(free_s, float(ends[at[value.id]])) + link.s_per_byte * network.bytes[value.id]
        place = max(int(np.searchsorted(ends, free_s)) + 1, at[value.id] + 1)
        steps = passes.forward if place < len(passes.forward) else passes.backward
        gone[value.id] = step_key(steps[place if place < len(passes.forward) else 0])
    return gone


def _places_back(
    network: Network,
    passes: Passes,
    reads: Sequence[tuple[Value, int]],
    seconds: Sequence[float],
    link: HostLink,
) -> dict[int, int]:
    """Returns the key of the step from which on each array is copied back."""
    begins = np.cumsum([0.0, *seconds])
    back, free_s = {}, np.inf
    for value, read_at in sorted(reads, key=lambda pair: -pair[1]):
        free_s = min(free_s, float(begins[read_at])) - link.s_per_byte * network.bytes[value.id]
        place = max(int(np.searchsorted(begins, free_s, side="right")) - 1, 0)
        back[value.id] = step_key(passes.backward[min(place, read_at)])
    return back


def _seconds(network: Network, step: Step) -> float:
    return sum(network.step_s(vertex) for vertex in vertices_of(step))
