"""What a step waits for where its links are busier than its arithmetic.

A space prices collectives that can run beside arithmetic at a share of their time, whatever runs beside them. That is
too little once they take longer than all arithmetic: then the step waits at least for the difference.
"""

from collections.abc import Sequence
from dataclasses import replace

from search_spaces.sharding.explaining import StepPrediction, Transfer
from search_spaces.sharding.space import ShardingSpace


def waiting_transfers(prediction: StepPrediction) -> tuple[Transfer, ...]:
    """Returns the collectives of a prediction with the seconds that a step waits for them, the links' limit included.

    Of collectives that can run beside arithmetic, with O seconds on their links and w seconds of waiting in the
    prediction, a step with C seconds of arithmetic waits max(w, O - C) seconds; each has its part of that.
    """
    has_time = [transfer.seconds < transfer.link_s for transfer in prediction.transfers]
    link_s = _total(prediction.transfers, has_time, "link_s")
    waited_s = _total(prediction.transfers, has_time, "seconds")
    least_s = link_s - float(prediction.compute_s.sum())
    if least_s <= waited_s:
        return prediction.transfers
    factor = least_s / link_s
    pairs = zip(prediction.transfers, has_time, strict=True)
    return tuple(t._replace(seconds=factor * t.link_s) if is_timely else t for t, is_timely in pairs)


def step_s(prediction: StepPrediction) -> float:
    """Returns the seconds of a step, the links' limit included."""
    return float(prediction.compute_s.sum()) + sum(transfer.seconds for transfer in waiting_transfers(prediction))


def is_bound_by_links(prediction: StepPrediction) -> bool:
    """Tells whether a step waits for its links longer than the prediction says."""
    return waiting_transfers(prediction) != prediction.transfers


def without_overlap(space: ShardingSpace) -> ShardingSpace:
    """Returns a space of the same choices in which every collective costs all of its seconds."""
    return replace(space, hardware=replace(space.hardware, exposed_share=1.0))


def _total(transfers: Sequence[Transfer], is_counted: Sequence[bool], field: str) -> float:
    return sum(getattr(t, field) for t, counts in zip(transfers, is_counted, strict=True) if counts)
