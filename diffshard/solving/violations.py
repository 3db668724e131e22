"""What is wrong with an infeasible choice, in words: forbidden strategies and transfers, and memory in excess."""

from collections.abc import Sequence

import numpy as np

from cost.base import Problem, is_forbidden
from cost.evaluation import live_usage

_MOST = 5  # lines of a kind


def violations(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[str]:
    """One sentence for each rule that a choice breaks, at most a few of each kind; empty for a feasible choice.

    Args:
      problem: a valid problem.
      choice: `[V]` strategy indices.
    """
    choice = np.asarray(choice)
    nodes = [v for v, cost in enumerate(problem.node_cost) if is_forbidden(cost[choice[v]])]
    pairs = zip(np.asarray(problem.edge_nodes).reshape(-1, 2).tolist(), problem.edge_cost, strict=True)
    edges = [(u, v) for (u, v), cost in pairs if is_forbidden(cost[choice[u], choice[v]])]
    said = [f"Node {v} takes strategy {choice[v]}, which is forbidden." for v in nodes[:_MOST]]
    said += [
        f"Nodes {u} and {v} take strategies {choice[u]} and {choice[v]}, which exclude each other."
        for u, v in edges[:_MOST]
    ]
    return said + _memory(problem, choice)


def _memory(problem: Problem, choice: np.ndarray) -> list[str]:
    times, used = live_usage(problem, choice)
    over = np.asarray(used, float) - np.asarray(problem.memory_limit, float)
    peaks = over.max(axis=1)
    said = []
    for t in np.argsort(-peaks, kind="stable")[:_MOST]:
        if peaks[t] <= 0:
            break
        device = int(over[t].argmax())
        where = f" on device {device}" if over.shape[1] > 1 else ""
        largest = ", ".join(f"{v} ({amount:,.0f})" for v, amount in _largest(problem, choice, int(times[t]), device))
        said.append(
            f"At time {times[t]} the memory{where} exceeds the limit by {peaks[t]:,.0f}; "
            f"its largest users are nodes {largest}."
        )
    return said


def _largest(problem: Problem, choice: np.ndarray, time: int, device: int) -> list[tuple[int, float]]:
    held: dict[int, float] = {}
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        if start <= time < end:
            amount = np.ravel(np.asarray(usage)[choice[v]])
            held[int(v)] = held.get(int(v), 0.0) + float(amount[min(device, len(amount) - 1)])
    return sorted(held.items(), key=lambda item: -item[1])[:_MOST]
