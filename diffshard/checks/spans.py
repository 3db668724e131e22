"""What a timeline consists of: times in which a compute stream or a class of links is busy, and trips of loops."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

COMPUTE = "compute"
MAX_UNROLLED_SPANS = 50_000
"""The most spans that a loop is written out as. A longer loop stays one span: its trace would be slow to open."""


@dataclass(frozen=True)
class Repetition:
    """Further trips of a loop, each a copy of the one before.

    Attributes:
      first: index of the first span of the trip that is copied; the trip ends before the span that has the repetition.
      period_s: by how much each trip is later than the one before, by resource.
    """

    first: int
    times: int
    period_s: Mapping[str, float]


@dataclass(frozen=True)
class Span:
    """A time in which a resource is busy.

    Attributes:
      source: the operation's name in the traced function, or "".
      transfer: kind and mesh axes of a collective, such as "all_gather data"; "" for kernels.
      repeats: the trips for which it stands, where it stands for trips of a loop; None elsewhere.
    """

    name: str
    resource: str
    start_s: float
    end_s: float
    source: str = ""
    transfer: str = ""
    repeats: Repetition | None = None


def unroll(spans: Sequence[Span], max_spans: int = MAX_UNROLLED_SPANS) -> Iterator[Span]:
    """Yields the spans of a timeline with the trips of loops written out.

    Args:
      max_spans: trips of one loop that are more spans than that stay one span, with its repetition.
    """
    yield from _shift(spans, range(len(spans)), {}, max_spans)


def _shift(spans: Sequence[Span], indices: range, later_s: Mapping[str, float], max_spans: int) -> Iterator[Span]:
    for index in indices:
        span = spans[index]
        repeats = span.repeats
        if repeats is None or repeats.times * _count(spans, range(repeats.first, index), max_spans) > max_spans:
            shift_s = later_s.get(span.resource, 0.0)
            yield replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s)
            continue
        for trip in range(1, repeats.times + 1):
            resources = later_s.keys() | repeats.period_s.keys()
            trip_s = {r: later_s.get(r, 0.0) + trip * repeats.period_s.get(r, 0.0) for r in resources}
            yield from _shift(spans, range(repeats.first, index), trip_s, max_spans)


def _count(spans: Sequence[Span], indices: range, max_spans: int) -> int:
    """Returns how many spans these are when written out."""
    count = 0
    for index in indices:
        repeats = spans[index].repeats
        inner = repeats.times * _count(spans, range(repeats.first, index), max_spans) if repeats else 1
        count += inner if inner <= max_spans else 1
    return count
