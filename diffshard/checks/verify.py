"""A plan held against what the compilers say and against what it computes.

Three witnesses of the same step: the prediction that chose the plan, Shardy's partitioner (milliseconds), and XLA's
compiled program (seconds). The CPU backend writes a reduce-scatter as an all-reduce and slices, which count as what
they stand for; it reduces bfloat16 in float32 and plans memory otherwise: judge those on a GPU mesh
(`diffshard.checks.gpu_target`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from diffshard.checks.collectives import hlo_collectives
from diffshard.plans.base import PredictedCollective
from search_spaces.sharding.collective_records import CollectiveRecord, split_by_axis, with_reduce_scatters
from search_spaces.sharding.explicit_collectives import explicit_collectives


@dataclass(frozen=True)
class Row:
    """Bytes of one step by three witnesses; `kind` is "sent" where it is what a device sends in all along the axis."""

    kind: str
    axis: str
    predicted: float
    shardy: float
    compiled: float

    @property
    def error(self) -> float:
        """(predicted − compiled) / compiled; inf where the program has nothing of the kind."""
        return relative_error(self.predicted, self.compiled)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: predicted peak, and the parts that XLA plans."""

    predicted: float
    arguments: float
    outputs: float
    aliased: float
    temporaries: float

    @property
    def compiled(self) -> float:
        """The peak by XLA's plan: outputs that reuse donated arguments count once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def error(self) -> float:
        """(predicted − compiled) / compiled."""
        return relative_error(self.predicted, self.compiled)


@dataclass(frozen=True)
class Verification:
    """A prediction beside what Shardy and XLA make of the plan; `str` is a table.

    Attributes:
      rows: collective bytes by kind and axis.
      sent: bytes that one device sends along each axis, all kinds together: an all-reduce and the reduce-scatter with
        all-gather that replace it are the same here.
      memory: None where the backend does not tell.
      compiled_collectives: how many collectives the program executes in one step.
    """

    rows: tuple[Row, ...]
    sent: tuple[Row, ...]
    memory: Memory | None
    compiled_collectives: float

    def __str__(self) -> str:
        lines = [f"{'collective':<20}{'axis':<12}{'predicted':>14}{'Shardy':>14}{'XLA':>14}{'error':>9}   (bytes)"]
        for row in (*self.rows, *self.sent):
            values = "".join(f"{value:>14,.0f}" for value in (row.predicted, row.shardy, row.compiled))
            lines.append(f"{row.kind:<20}{row.axis:<12}{values}{_percent(row.error):>9}")
        if self.memory:
            m = self.memory
            lines.append(
                f"{'peak memory':<32}{m.predicted:>14,.0f}{'':>14}{m.compiled:>14,.0f}{_percent(m.error):>9}   "
                f"= {m.arguments:,.0f} arguments + {m.outputs:,.0f} outputs - {m.aliased:,.0f} aliased "
                f"+ {m.temporaries:,.0f} temporaries"
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
      predicted_peak_bytes: of one device.
      compiled: `lowered.compile()`, where it is at hand.
    """
    compiled = lowered.compile() if compiled is None else compiled
    axis_sizes = dict(axis_sizes)
    program = hlo_collectives(compiled.as_text(), axis_sizes)
    meant = with_reduce_scatters(program, axis_sizes) if _is_for_cpu(compiled) else program
    partitioned = with_reduce_scatters(explicit_collectives(lowered), axis_sizes)
    witnesses = [
        _totals((p.kind, p.axis, p.num_bytes * p.count) for p in predicted),
        _totals(_by_axis(partitioned, axis_sizes)),
        _totals(_by_axis(meant, axis_sizes)),
    ]
    keys = sorted({key for witness in witnesses for key in witness})
    rows = [Row(*key, *(witness.get(key, 0.0) for witness in witnesses)) for key in keys]
    sent = [_totals(_sent(witness, axis_sizes)) for witness in witnesses]
    axes = sorted({key for witness in sent for key in witness})
    return Verification(
        rows=tuple(rows),
        sent=tuple(Row(*key, *(witness.get(key, 0.0) for witness in sent)) for key in axes),
        memory=_memory(compiled, predicted_peak_bytes),
        compiled_collectives=sum(c.count for c in program),
    )


def relative_error(predicted: float, actual: float) -> float:
    """(predicted − actual) / actual, 0 where both are zero."""
    if actual == 0:
        return 0.0 if predicted == 0 else float("inf")
    return (predicted - actual) / actual


def assert_equal_results(
    function: Callable[..., Any], parallel: Callable[..., Any], args: tuple[Any, ...], *, tolerance: float = 1e-5
) -> float:
    """Runs a function on one device and in parallel, and compares all results.

    Args:
      function: the original; it is jitted.
      parallel: the same with a plan; it may donate its arguments, which are handed to it as copies.
      args: arrays in any pytrees, random keys included.
      tolerance: of the largest difference in an array relative to its largest magnitude; integers must be equal.

    Returns:
      The largest relative difference found.

    Raises:
      AssertionError: results differ in structure, shape, dtype or value; it names the worst array.
    """
    expected = jax.device_get(_without_keys(jax.jit(function)(*_copies(args))))
    found = jax.device_get(_without_keys(parallel(*_copies(args))))
    expected_leaves, tree = jax.tree_util.tree_flatten_with_path(expected)
    found_leaves, found_tree = jax.tree_util.tree_flatten_with_path(found)
    if tree != found_tree:
        raise AssertionError(f"results differ in structure: {tree} on one device, {found_tree} in parallel.")
    worst, where = 0.0, ""
    for (path, one), (_, many) in zip(expected_leaves, found_leaves, strict=True):
        difference = _difference(one, many)
        if not difference <= worst:
            worst, where = difference, jax.tree_util.keystr(path)
    if not worst <= tolerance:
        raise AssertionError(
            f"results differ by {worst:.3g} of the largest magnitude at {where}; allowed {tolerance:.3g}."
        )
    return worst


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


def _sent(totals: Mapping[tuple[str, str], float], axis_sizes: Mapping[str, int]) -> Iterable[tuple[str, str, float]]:
    for (kind, axis), num_bytes in totals.items():
        num_devices = axis_sizes[axis.split("+")[0]]
        yield "sent", axis, float(collective_sent_bytes(cast(CollectiveKind, kind), num_bytes, num_devices))


def _memory(compiled: Any, predicted: float) -> Memory | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        predicted,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    # Values on the host belong to no device: both functions may place them as they like, and donate them.
    def copy(leaf: Any) -> Any:
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.array(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return np.array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return jax.tree.map(copy, args)


def _without_keys(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _difference(one: Any, many: Any) -> float:
    one, many = np.asarray(one), np.asarray(many)
    if one.shape != many.shape or one.dtype != many.dtype:
        raise AssertionError(f"results differ in type: {one.dtype}{one.shape} on one device, {many.dtype}{many.shape}.")
    if one.size == 0:
        return 0.0
    if not jnp.issubdtype(one.dtype, np.inexact):
        return 0.0 if np.array_equal(one, many) else float("inf")
    wide = np.complex128 if jnp.issubdtype(one.dtype, np.complexfloating) else np.float64
    one, many = one.astype(wide), many.astype(wide)
    same = (one == many) | (np.isnan(one) & np.isnan(many))
    difference = np.where(same, 0.0, np.abs(one - many)).max()
    scale = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    return 0.0 if difference == 0 else float("inf") if np.isnan(difference) else float(difference / max(scale, 1e-30))


def _percent(error: float) -> str:
    return "new" if np.isinf(error) else f"{100 * error:+.1f}%"
