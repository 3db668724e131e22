"""What is wrong with an infeasible choice, in words: forbidden strategies and transfers, and memory in excess."""

from collections.abc import Sequence

import numpy as np

from cost.base import Problem, is_forbidden
from cost.evaluation import chosen_costs, live_usage

_MOST_OF_A_KIND = 5
"""Sentences about each kind of violation, and nodes that each one names; enough to see what they have in common."""


def violations(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[str]:
    """Returns one sentence for each rule that a choice breaks, at most a few of each kind; none for a feasible choice.

    Args:
      problem: a valid problem.
      choice: `[V]` strategy indices.
    """
    choice = np.asarray(choice)
    node_cost, edge_cost, _ = chosen_costs(problem, choice)
    nodes = np.flatnonzero(is_forbidden(node_cost))[:_MOST_OF_A_KIND]
    edges = np.asarray(problem.edge_nodes).reshape(-1, 2)[is_forbidden(edge_cost)][:_MOST_OF_A_KIND]
    return [
        *(f"Node {v} takes strategy {choice[v]}, which is forbidden." for v in nodes),
        *(
            f"Nodes {u} and {v} take strategies {choice[u]} and {choice[v]}, which exclude each other."
            for u, v in edges
        ),
        *_memory_violations(problem, choice),
    ]


def format_excess(excess: float) -> str:
    """Writes by how much a limit is exceeded: whole where that says something, else with the digits that do."""
    return f"{excess:,.0f}" if excess >= 1 or excess == 0 else f"{excess:.2g}"


def _memory_violations(problem: Problem, choice: np.ndarray) -> list[str]:
    """Returns a sentence for each of the times at which the memory is exceeded most."""
    times, memory = live_usage(problem, choice)
    excess = np.asarray(memory, float) - np.asarray(problem.memory_limit, float)
    peaks = excess.max(axis=1)
    sentences = []
    for t in np.argsort(-peaks, kind="stable")[:_MOST_OF_A_KIND]:
        if peaks[t] <= 0:
            break
        device = int(excess[t].argmax())
        where = f" on device {device}" if excess.shape[1] > 1 else ""
        users = _largest_users(problem, choice, int(times[t]), device)
        sentences.append(
            f"At time {times[t]} the memory{where} exceeds the limit by {format_excess(peaks[t])}; "
            f"its largest users are nodes {', '.join(f'{v} ({amount:,.0f})' for v, amount in users)}."
        )
    return sentences


def _largest_users(problem: Problem, choice: np.ndarray, time: int, device: int) -> list[tuple[int, float]]:
    """Returns the nodes that use most of a device's memory at a time, and how much each one uses."""
    amounts: dict[int, float] = {}
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        if start <= time < end:
            amount = np.ravel(np.asarray(usage)[choice[v]])
            amounts[int(v)] = amounts.get(int(v), 0.0) + float(amount[min(device, len(amount) - 1)])
    return sorted(amounts.items(), key=lambda item: -item[1])[:_MOST_OF_A_KIND]
