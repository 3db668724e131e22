"""The collectives and the memory that were predicted for a plan, beside those of the compilers.

Three sources tell what one step communicates: the prediction by which the plan was chosen, Shardy's partitioner (takes
milliseconds), and the program that XLA compiles (takes seconds). XLA's CPU backend writes a reduce-scatter as an
all-reduce and slices, which count as the reduce-scatter. It also reduces bfloat16 in float32 and plans memory in
another way than on GPUs: to judge these, compile for a GPU mesh (`diffshard.checks.targets`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from diffshard.checks.collectives import CollectiveRecord, hlo_collectives, split_by_axis, with_reduce_scatters
from diffshard.checks.explicit_collectives import explicit_collectives
from diffshard.checks.hlo import MemoryPlan, memory_plan
from diffshard.plans.base import PredictedCollective


@dataclass(frozen=True)
class ComparedBytes:
    """Bytes that one kind of collective has along one mesh axis in a step, as predicted, by Shardy and by XLA.

    Attributes:
      kind: kind of collective, or "sent" for the bytes that a device sends along the axis by all kinds together.
      axis: the mesh axis; several are joined by "+".
      predicted, shardy, compiled: bytes.
    """

    kind: str
    axis: str
    predicted: float
    shardy: float
    compiled: float

    @property
    def error(self) -> float:
        """(predicted − compiled) / compiled; inf if the program has nothing of the kind."""
        return relative_error(self.predicted, self.compiled)


@dataclass(frozen=True)
class ComparedMemory:
    """Bytes of one device: the predicted peak, and XLA's plan of memory."""

    predicted: float
    plan: MemoryPlan

    @property
    def compiled(self) -> float:
        """The peak of XLA's plan."""
        return self.plan.peak

    @property
    def error(self) -> float:
        """(predicted − compiled) / compiled."""
        return relative_error(self.predicted, self.compiled)


@dataclass(frozen=True)
class Verification:
    """A prediction beside what Shardy and XLA make of the plan; `str` gives a table.

    Attributes:
      collectives: bytes by kind and axis.
      sent: bytes that one device sends along each axis, all kinds together. An all-reduce equals here the
        reduce-scatter and all-gather that may replace it.
      memory: None if the backend does not tell.
      num_collectives: how many collectives the program executes in one step.
    """

    collectives: tuple[ComparedBytes, ...]
    sent: tuple[ComparedBytes, ...]
    memory: ComparedMemory | None
    num_collectives: float

    def __str__(self) -> str:
        lines = [f"{'collective':<20}{'axis':<12}{'predicted':>14}{'Shardy':>14}{'XLA':>14}{'error':>9}   (bytes)"]
        for row in (*self.collectives, *self.sent):
            values = "".join(f"{value:>14,.0f}" for value in (row.predicted, row.shardy, row.compiled))
            lines.append(f"{row.kind:<20}{row.axis:<12}{values}{format_error(row.error):>9}")
        if self.memory:
            m = self.memory
            lines.append(
                f"{'peak memory':<32}{m.predicted:>14,.0f}{'':>14}{m.compiled:>14,.0f}{format_error(m.error):>9}   "
                f"= {m.plan.arguments:,} arguments + {m.plan.outputs:,} outputs - {m.plan.aliased:,} aliased "
                f"+ {m.plan.temporaries:,} temporaries"
            )
        return "\n".join(lines)


def verify(
    lowered: Any,
    axis_sizes: Mapping[str, int],
    predicted: Iterable[PredictedCollective],
    predicted_peak_bytes: float,
    *,
    compiled: Any = None,
) -> Verification:
    """Compares a prediction with Shardy's collectives and with XLA's program and memory.

    Args:
      lowered: `step.lower(...)` with the plan's shardings.
      axis_sizes: `mesh.shape`, axes in order.
      predicted: `plan.collectives`.
      predicted_peak_bytes: `plan.peak_bytes`, of one device.
      compiled: `lowered.compile()`, if it was compiled before.
    """
    compiled = lowered.compile() if compiled is None else compiled
    axis_sizes = dict(axis_sizes)
    program = hlo_collectives(compiled.as_text(), axis_sizes)
    by_shardy = with_reduce_scatters(explicit_collectives(lowered), axis_sizes)
    by_xla = with_reduce_scatters(program, axis_sizes) if _is_for_cpu(compiled) else program
    totals = [
        _totals((p.kind, p.axis, p.num_bytes * p.count) for p in predicted),
        _totals(_by_axis(by_shardy, axis_sizes)),
        _totals(_by_axis(by_xla, axis_sizes)),
    ]
    return Verification(
        collectives=_compare(totals),
        sent=_compare([_totals(_sent_bytes(total, axis_sizes)) for total in totals]),
        memory=_memory(compiled, predicted_peak_bytes),
        num_collectives=sum(c.count for c in program),
    )


def predicted_sent_bytes(predicted: Iterable[PredictedCollective], axis_sizes: Mapping[str, int]) -> float:
    """Returns the bytes that one device is predicted to send in a step, all collectives together."""
    total = _totals((p.kind, p.axis, p.num_bytes * p.count) for p in predicted)
    return sum(num_bytes for _, _, num_bytes in _sent_bytes(total, axis_sizes))


def compiled_sent_bytes(hlo: str, axis_sizes: Mapping[str, int], *, platform: str) -> float:
    """Returns the bytes that one device sends in a step of a compiled program, all collectives together.

    Args:
      hlo: the program's text.
      axis_sizes: `mesh.shape`, axes in order.
      platform: "cpu", whose backend writes every reduce-scatter as an all-reduce and a slice, or another.
    """
    program = hlo_collectives(hlo, axis_sizes)
    return sent_bytes(with_reduce_scatters(program, axis_sizes) if platform == "cpu" else program, axis_sizes)


def sent_bytes(collectives: list[CollectiveRecord], axis_sizes: Mapping[str, int]) -> float:
    """Returns the bytes that one device sends in a step, all collectives together."""
    return sum(num_bytes for _, _, num_bytes in _sent_bytes(_totals(_by_axis(collectives, axis_sizes)), axis_sizes))


def relative_error(predicted: float, actual: float) -> float:
    """Returns (predicted − actual) / actual; 0 if both are zero, inf if only `actual` is."""
    if actual == 0:
        return 0.0 if predicted == 0 else float("inf")
    return (predicted - actual) / actual


def format_error(error: float, digits: int = 1) -> str:
    """Writes a relative error in percent; "new" where something was predicted that the program does not have."""
    return "new" if np.isinf(error) else f"{100 * error:+.{digits}f}%"


def _is_for_cpu(compiled: Any) -> bool:
    # The CPU backend writes every reduce-scatter as an all-reduce and a slice; in a GPU's program that is what runs.
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(device.platform == "cpu" for sharding in shardings[:1] for device in sharding.device_set)


def _by_axis(collectives: list[CollectiveRecord], axis_sizes: Mapping[str, int]) -> Iterable[tuple[str, str, float]]:
    for collective in split_by_axis(collectives, axis_sizes):
        yield collective.kind, "+".join(collective.axes), collective.num_bytes * collective.count


def _totals(entries: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for kind, axis, num_bytes in entries:
        total[kind, axis] = total.get((kind, axis), 0.0) + num_bytes
    return total


def _compare(totals: Sequence[Mapping[tuple[str, str], float]]) -> tuple[ComparedBytes, ...]:
    """Sets the predicted totals, Shardy's and XLA's side by side, sorted by kind and axis."""
    keys = sorted({key for total in totals for key in total})
    return tuple(ComparedBytes(*key, *(total.get(key, 0.0) for total in totals)) for key in keys)


def _sent_bytes(
    totals: Mapping[tuple[str, str], float], axis_sizes: Mapping[str, int]
) -> Iterable[tuple[str, str, float]]:
    for (kind, axis), num_bytes in totals.items():
        num_devices = axis_sizes[axis.split("+")[0]]
        yield "sent", axis, float(collective_sent_bytes(cast(CollectiveKind, kind), num_bytes, num_devices))


def _memory(compiled: Any, predicted: float) -> ComparedMemory | None:
    plan = memory_plan(compiled)
    return None if plan is None else ComparedMemory(predicted, plan)
