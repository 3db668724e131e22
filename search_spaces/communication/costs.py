"""What a choice of strategies costs, in seconds and in bytes: an operation, a group, and every part of a choice.

A stage of a collective takes the seconds of the α–β model; encoding and decoding take what kernels were measured to
take, or else what the roofline allows. Costs of different operations add up: nothing overlaps, except that the last
step's gradients may be summed while this step computes. What an operation costs inside a branch of alternatives depends
on two choices, so it stands in a matrix for a pair of groups: an edge of the problem.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from cost.collectives import collective_s
from search_spaces.base import Part, Traffic
from search_spaces.communication.base import CollectiveStrategy, Group, Operation, Precision, Stage

_DATA = "encoding_seconds.json"


class GroupCosts(NamedTuple):
    """The costs of all groups, in seconds or in bytes.

    Attributes:
      nodes: for each group `[S]`: the operations outside of alternatives.
      edges: for a pair of groups `[S, S']`: operations of the second one that lie in branches of the first one.
    """

    nodes: list[np.ndarray]
    edges: dict[tuple[int, int], np.ndarray]

    def of_choice(self, choice: Sequence[int]) -> list[float]:
        """Returns the cost of each group, `[V]`; an edge counts for its second group."""
        totals = [float(node[strategy]) for node, strategy in zip(self.nodes, choice, strict=True)]
        for (u, v), edge in self.edges.items():
            totals[v] += float(edge[choice[u], choice[v]])
        return totals


def group_costs(
    operations: Sequence[Operation],
    groups: Sequence[Group],
    operation_cost: Callable[[Operation, CollectiveStrategy], float],
) -> GroupCosts:
    """Returns the costs of all groups, with `operation_cost` the cost of one operation with a strategy."""
    group_at = {
        operations[o].call_site: g for g, group in enumerate(groups) for o in group.operations if group.is_alternatives
    }
    nodes = [np.zeros(len(group.names)) for group in groups]
    edges: dict[tuple[int, int], np.ndarray] = {}
    for v, group in enumerate(groups):
        for operation in as_sent([operations[o] for o in group.operations]) if not group.is_alternatives else ():
            costs = np.array([operation_cost(operation, strategy) for strategy in group.strategies])
            if operation.branch is None:
                nodes[v] += costs
            else:
                call_site, branch = operation.branch
                u = group_at[call_site]
                edge = edges.setdefault((u, v), np.zeros((len(groups[u].names), len(costs))))
                edge[branch] += costs
    return GroupCosts(nodes, edges)


def group_seconds(operations: Sequence[Operation], groups: Sequence[Group], hardware: Hardware) -> GroupCosts:
    """Returns the seconds of all groups in an average step."""
    gradient_bytes = sum(_operand_bytes(operation) for operation in operations if operation.direction == "gradient")
    return group_costs(
        operations, groups, partial(_operation_seconds, hardware=hardware, gradient_bytes=gradient_bytes)
    )


def explain(
    operations: Sequence[Operation],
    groups: Sequence[Group],
    choice: Sequence[int],
    seconds: GroupCosts,
    sent_bytes: GroupCosts,
) -> tuple[Part, ...]:
    """Returns one part for each group: its seconds in one step and what its operations send."""
    runs, parts = operations_that_run(operations, groups, choice), []
    costs = zip(groups, seconds.of_choice(choice), sent_bytes.of_choice(choice), strict=True)
    for v, (group, group_seconds, group_bytes) in enumerate(costs):
        first = operations[group.operations[0]]
        active = [operations[o] for o in group.operations if runs[o]]
        count = sum(operation.trips for operation in as_sent(active)) if active else 0
        traffic = Traffic(first.direction, first.kind, first.axes, count, group_bytes)
        parts.append(Part(group.name, first.kind, v, group_seconds, traffic))
    return tuple(parts)


def operations_that_run(operations: Sequence[Operation], groups: Sequence[Group], choice: Sequence[int]) -> list[bool]:
    """Returns for each operation whether all alternatives around it run the branch that it lies in."""
    strategy_at = {o: strategy for group, strategy in zip(groups, choice, strict=True) for o in group.operations}
    runs: list[bool] = []
    running_branch: dict[int | None, int | None] = {}  # by the call site of alternatives; None where they do not run
    for o, operation in enumerate(operations):  # alternatives come before the operations in their branches
        runs.append(operation.branch is None or running_branch[operation.branch[0]] == operation.branch[1])
        if operation.is_alternatives:
            running_branch[operation.call_site] = strategy_at[o] if runs[o] else None
    return runs


def as_sent(operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations of a group as they are sent: gradients as one vector, others each by itself.

    Compilers combine the all-reduces of gradients in the same way.
    """
    if operations[0].direction != "gradient":
        return list(operations)
    return [replace(operations[0], shape=(sum(prod(operation.shape) for operation in operations),))]


def operation_bytes(operation: Operation, strategy: CollectiveStrategy) -> float:
    """Returns the bytes that each device sends for an operation in an average step."""
    assert operation.collective is not None
    return operation.trips * sum(
        stage.sent_bytes for stage in strategy.stages(operation.collective, operation.shape, operation.dtype)
    )


def _operation_seconds(
    operation: Operation, strategy: CollectiveStrategy, hardware: Hardware, gradient_bytes: float
) -> float:
    """Returns the seconds of an operation in an average step: latency, transfer, encoding and decoding of its stages.

    What is sent while the device computes counts with the seconds that remain after the operation's share of the
    computing, which is its share of `gradient_bytes`, those of all gradients. So no second of computing hides two
    transfers.
    """
    assert operation.collective is not None
    stages = strategy.stages(operation.collective, operation.shape, operation.dtype)
    share = _operand_bytes(operation) / gradient_bytes if operation.direction == "gradient" else 0.0
    return operation.trips * sum(stage.count * _stage_seconds(stage, hardware, share) for stage in stages)


def _operand_bytes(operation: Operation) -> float:
    """Returns the bytes of an operation's operand on one device."""
    return prod(operation.shape) * float(np.dtype(operation.dtype).itemsize)


def _stage_seconds(stage: Stage, hardware: Hardware, share: float) -> float:
    seconds = float(collective_s(stage.kind, stage.num_bytes, stage.num_devices, hardware.link(stage.axis)))
    coding = 0.0 if stage.precision is None else stage.num_coded * coding_s(stage.precision, hardware)
    return max(0.0, seconds - share * stage.hidden_s) + coding


def coding_s(precision: Precision, hardware: Hardware) -> float:
    """Returns the seconds to encode or decode one element.

    They were measured for some kinds of devices; for others they are what the memory needs to read a float32 and write
    its code, or the reverse.
    """
    for kind, seconds in encoding_seconds()["seconds_per_element"].items():
        if hardware.name.lower().startswith(kind) and precision.name in seconds:
            return seconds[precision.name]
    return (4 + precision.bits / 8) / hardware.memory_bytes_per_s


@cache
def encoding_seconds() -> dict:
    """Returns the measured seconds for each element, by kind of device and precision, with date and versions.

    `python -m experiments.encoding_seconds` measures them.
    """
    return json.loads(resources.files("search_spaces.communication").joinpath(_DATA).read_text())
