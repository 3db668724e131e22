"""The file format of the IOPDDL contest: reads an instance in JSON, plain or gzipped, as a `Problem`, and writes one.

An instance has one usage for each node, integers everywhere, and 10^18 for what must not be chosen. Its edges
may be parallel or lead from a node to itself; a `Problem`'s may not, so that reading merges them.

Source: the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism, github.com/google/iopddl.
"""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from cost.base import FORBIDDEN, Problem
from cost.edges import merge_edges
from diffshard.files import write_whole

_GZIP_MAGIC = b"\x1f\x8b"


def read(path: str | os.PathLike) -> Problem:
    """Reads an instance; its costs and usages are 64-bit integers, and empty intervals use no memory.

    Parallel edges are merged into one, edges from a node to itself into the node's costs.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or breaks a rule of the format; the message says where.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == _GZIP_MAGIC else raw
        document = json.loads(text)
    except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
        kind = "gzipped JSON" if raw[:2] == _GZIP_MAGIC else "JSON"
        raise ValueError(f"`{path}` is not {kind}, or damaged: {error}.") from error
    return parse(document)


def parse(document: Any) -> Problem:
    """Returns the `Problem` of a decoded instance; raises ValueError as `read`."""
    instance = _member(document, "problem", dict, "the document")
    nodes, edges = _member(instance, "nodes", dict, "problem"), _member(instance, "edges", dict, "problem")
    limit = _member(instance, "usage_limit", object, "problem")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit < 2**63:
        raise ValueError(f"`problem.usage_limit` must be a 64-bit integer that is not negative, got {limit!r:.99}.")
    node_cost, usage, intervals = _nodes(nodes)
    ends = _pairs(edges, "nodes", "problem.edges", remedy="an edge joins two nodes; split those of more")
    entries = _lists(edges, "costs", "problem.edges", len(ends))
    edge_nodes, edge_cost = _merged_edges(node_cost, ends, entries)
    live = np.flatnonzero(intervals[:, 0] < intervals[:, 1])
    return Problem(
        node_cost, edge_nodes, edge_cost, live, [usage[v] for v in live], intervals[live], memory_limit=limit
    )


def write(problem: Problem, path: str | os.PathLike) -> None:
    """Writes a problem with integer costs, one usage for each node at most, no loads; gzipped if `path` ends in .gz."""
    if (
        len(problem.load)
        or len(problem.amount)
        or np.size(problem.memory_limit) > 1
        or len(set(problem.usage_node)) < len(problem.usage_node)
    ):
        raise ValueError(
            "`problem` has loads, amounts, device limits or several usages of a node, which the format cannot hold."
        )
    arrays = [*problem.node_cost, *problem.edge_cost, *problem.usage]
    if not all(np.issubdtype(np.asarray(array).dtype, np.integer) for array in arrays):
        raise ValueError("`problem` must have integer costs and usages; scale and round them first.")
    intervals, usages = [[0, 0]] * len(problem.node_cost), [[0] * len(cost) for cost in problem.node_cost]
    for v, usage, interval in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        intervals[v], usages[v] = np.asarray(interval).tolist(), usage.tolist()
    if not np.isfinite(problem.memory_limit):
        raise ValueError("`problem` needs a finite `memory_limit`; the format has no infinity.")
    document = {
        "problem": {
            "name": Path(path).name.split(".")[0],
            "nodes": {"intervals": intervals, "costs": [c.tolist() for c in problem.node_cost], "usages": usages},
            "edges": {
                "nodes": np.asarray(problem.edge_nodes).tolist(),
                "costs": [cost.ravel().tolist() for cost in problem.edge_cost],
            },
            "usage_limit": int(problem.memory_limit),
        }
    }
    raw = json.dumps(document).encode()
    write_whole(path, gzip.compress(raw) if str(path).endswith(".gz") else raw)


def _nodes(nodes: dict) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Returns each node's costs and usages, V arrays `[S_v]` each, and its interval, `[V, 2]`."""
    node_cost = _lists(nodes, "costs", "problem.nodes")
    usage = _lists(nodes, "usages", "problem.nodes", len(node_cost))
    intervals = _pairs(nodes, "intervals", "problem.nodes", len(node_cost))
    for v, (cost, node_usage) in enumerate(zip(node_cost, usage, strict=True)):
        if not len(cost):
            raise ValueError(f"`problem.nodes.costs[{v}]` is empty; every node needs at least one strategy.")
        if len(cost) != len(node_usage):
            raise ValueError(f"`problem.nodes.usages[{v}]` has {len(node_usage)} entries for {len(cost)} strategies.")
    backwards = np.flatnonzero(intervals[:, 0] > intervals[:, 1])
    if backwards.size:
        v = backwards[0]
        raise ValueError(f"`problem.nodes.intervals[{v}]` is {intervals[v].tolist()}, which ends before it starts.")
    return node_cost, usage, intervals


def _merged_edges(
    node_cost: list[np.ndarray], ends: np.ndarray, entries: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns one edge for each pair of nodes, with the sum of its matrices; loops are added to `node_cost`."""
    edges: list[tuple[int, int, np.ndarray]] = []
    for e, ((u, v), flat) in enumerate(zip(ends.tolist(), entries, strict=True)):
        if not (0 <= u < len(node_cost) and 0 <= v < len(node_cost)):
            raise ValueError(f"`problem.edges.nodes[{e}]` is [{u}, {v}], but the nodes are 0 to {len(node_cost) - 1}.")
        shape = (len(node_cost[u]), len(node_cost[v]))
        if len(flat) != shape[0] * shape[1]:
            raise ValueError(
                f"`problem.edges.costs[{e}]` has {len(flat)} entries, "
                f"but nodes {u} and {v} have {shape[0]} x {shape[1]} strategies."
            )
        cost = flat.reshape(shape)
        if u == v:
            node_cost[u] = _sum(node_cost[u], np.diagonal(cost), f"node {u} and of its edges to itself")
        else:
            edges.append((u, v, cost))
    matrices = merge_edges(edges, lambda a, b: _sum(a, b, "edges that join the same two nodes"))
    return np.array(list(matrices), np.int64).reshape(-1, 2), list(matrices.values())


def _sum(a: np.ndarray, b: np.ndarray, what: str) -> np.ndarray:
    """Adds costs so that what is forbidden stays forbidden, without overflow."""
    a, b = np.minimum(a, FORBIDDEN), np.minimum(b, FORBIDDEN)
    is_bad = np.maximum(a, b) >= FORBIDDEN
    if ((a + b >= FORBIDDEN) & ~is_bad).any():
        raise ValueError(f"costs of {what} sum to {FORBIDDEN:.0e} or more, which means forbidden; scale them down.")
    return np.where(is_bad, FORBIDDEN, a + b)


def _member(mapping: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(mapping, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(mapping).__name__}.")
    if key not in mapping:
        raise ValueError(f"{where} lacks `{key}`; it has {sorted(mapping)}.")
    if not isinstance(mapping[key], kind):
        raise ValueError(f"`{key}` of {where} must be a JSON {kind.__name__}, got {type(mapping[key]).__name__}.")
    return mapping[key]


def _lists(mapping: dict, key: str, where: str, count: int | None = None) -> list[np.ndarray]:
    """Returns a member that is a list of lists of integers in [0, 2^63), each list as an array."""
    lists = _member(mapping, key, list, where)
    if count is not None and len(lists) != count:
        raise ValueError(f"`{where}.{key}` must have {count} lists, got {len(lists)}.")
    arrays = []
    for i, numbers in enumerate(lists):
        if not isinstance(numbers, list):
            raise ValueError(f"`{where}.{key}[{i}]` must be a list, got {numbers!r}.")
        try:
            array = np.array(numbers) if numbers else np.zeros(0, np.int64)
        except ValueError:  # ragged
            array = np.zeros((0, 0))
        if array.ndim != 1 or array.dtype != np.int64 or (array < 0).any():
            at, bad = next((j, n) for j, n in enumerate(numbers) if type(n) is not int or not 0 <= n < 2**63)
            raise ValueError(
                f"`{where}.{key}[{i}]` must hold 64-bit integers that are not negative, got {bad!r} at {at}; scale and "
                f"round the numbers, with {FORBIDDEN:.0e} for what must not be chosen."
            )
        arrays.append(array)
    return arrays


def _pairs(mapping: dict, key: str, where: str, count: int | None = None, remedy: str = "") -> np.ndarray:
    """Returns a member that is a list of pairs of integers, `[len, 2]`."""
    arrays = _lists(mapping, key, where, count)
    for i, array in enumerate(arrays):
        if len(array) != 2:
            raise ValueError(
                f"`{where}.{key}[{i}]` must have two numbers, got {array.tolist()}{remedy and '; ' + remedy}."
            )
    return np.array(arrays, np.int64).reshape(-1, 2)
