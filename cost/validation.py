"""Checks of the rules of `Problem` and of `Quantity`, for those from outside."""

from collections.abc import Mapping, Sequence

import numpy as np

from cost.base import FORBIDDEN, Problem, edge_ends, is_forbidden, num_loads, num_strategies
from cost.edges import distinct_arrays, first_positions
from cost.quantities import LiveMemory, Quantities, Quantity
from cost.real_numbers import Count, as_array, checked_number, is_real

_LARGEST_USAGE = 1e100
"""Sums of usages up to this one stay finite in float64, however many there are."""


def validate(problem: Problem) -> None:
    """Checks that a problem keeps the rules of `Problem`.

    Raises:
      TypeError: it is no `Problem`.
      ValueError: names the field, the rule, the place and the value.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"`problem` must be a Problem, not {type(problem).__name__}.")
    for name in ("node_cost", "edge_cost", "usage", "load", "edge_load", "amount", "edge_amount"):
        check_is_list(getattr(problem, name), f"`{name}`")
    for name in ("edge_nodes", "usage_node", "usage_interval"):
        _check_array(getattr(problem, name), f"`{name}`")
    for v in first_positions(problem.node_cost):
        cost = problem.node_cost[v]
        _check_costs(cost, np.shape(cost)[:1] or ("strategies",), f"`node_cost[{v}]`")
    sizes = num_strategies(problem)
    if sizes.size and sizes.min() == 0:
        raise ValueError(f"`node_cost[{sizes.argmin()}]` is empty; every node needs at least one strategy.")
    _check_edges(problem, sizes)
    if isinstance(problem.memory_limit, int) and problem.memory_limit >= 2**64:
        raise ValueError(f"`memory_limit` must be below 2^64, or infinite for no limit, got {problem.memory_limit}.")
    _check_usages(problem, sizes)
    _check_sums(problem, sizes, "load")
    _check_sums(problem, sizes, "amount")
    groups, limits = np.asarray(problem.load_group), np.asarray(problem.amount_limit)
    if groups.size and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"`load_group` must be integers, got {groups.dtype}.")
    if groups.shape not in ((0,), (num_loads(problem),)) or (groups.size and groups.min() < 0):
        raise ValueError(f"`load_group` must have a number for each of {num_loads(problem)} loads, got {groups}.")
    count = np.shape(problem.amount[0])[1] if len(problem.amount) else 0
    if limits.shape != (count,) or not is_real(limits) or np.isnan(limits).any():
        raise ValueError(
            f"`amount_limit` must be one number for each of the {count} columns of `amount`, got "
            f"{problem.amount_limit!r}; give an array `[{count}]`, with `np.inf` for what has no limit."
        )


def _check_sums(problem: Problem, sizes: np.ndarray, name: str) -> None:
    """Checks `load` and `edge_load`, or the same of `amount`."""
    of_nodes, of_edges = getattr(problem, name), getattr(problem, f"edge_{name}")
    if len(of_nodes) not in (0, len(sizes)):
        raise ValueError(f"`{name}` must be () or one array for each of the {len(sizes)} nodes, got {len(of_nodes)}.")
    columns = np.shape(of_nodes[0])[1:] if len(of_nodes) else ()
    for v in first_positions(of_nodes):
        shape = (sizes[v], *(columns or (f"{name}s",)))
        _check_costs(of_nodes[v], shape, f"`{name}[{v}]`")
        if name == "amount" and np.isinf(of_nodes[v]).any():
            raise ValueError(f"`amount[{v}]` must be finite; what must not be chosen has an infinite `node_cost`.")
    if len(of_edges) and len(of_edges) != len(problem.edge_cost):
        raise ValueError(f"`edge_{name}` must be () or one array for each of {len(problem.edge_cost)} edges.")
    if len(of_edges) and not len(of_nodes):
        raise ValueError(f"`edge_{name}` needs `{name}` for the nodes; give zeros where they add nothing.")
    pairs = edge_ends(problem)
    for e, table in enumerate(of_edges):
        _check_numbers(table, (*sizes[pairs[e]].tolist(), *columns), f"`edge_{name}[{e}]`")
        if is_forbidden(table).any():
            raise ValueError(f"`edge_{name}[{e}]` must be finite; what must not be chosen has an infinite `edge_cost`.")


def with_finite_loads(problem: Problem) -> Problem:
    """Returns an equal problem in which strategies of forbidden loads have a forbidden `node_cost` instead.

    A sum of loads is then a number, whichever is chosen.
    """
    if not any(is_forbidden(load).any() for load in problem.load):
        return problem
    node_cost, loads = [], []
    for cost, load in zip(problem.node_cost, problem.load, strict=True):
        is_infinite: np.ndarray = np.asarray(is_forbidden(load).any(axis=1))
        mark = FORBIDDEN if np.issubdtype(np.asarray(cost).dtype, np.integer) else np.inf  # integers stay exact
        node_cost.append(np.where(is_infinite, mark, cost) if is_infinite.any() else cost)
        loads.append(np.where(is_infinite[:, None], 0, load))
    return problem._replace(node_cost=node_cost, load=loads)


def _check_edges(problem: Problem, sizes: np.ndarray) -> None:
    edges = _checked_pairs(problem.edge_nodes, len(problem.edge_cost), "`edge_nodes`", "`edge_cost`")
    wrong = np.flatnonzero(((edges < 0) | (edges >= len(sizes))).any(axis=1))
    if wrong.size:
        e = wrong[0]
        raise ValueError(f"`edge_nodes[{e}]` is {edges[e].tolist()}, but {_nodes_text(sizes)}.")
    loops = np.flatnonzero(edges[:, 0] == edges[:, 1])
    if loops.size:
        e = loops[0]
        raise ValueError(f"`edge_nodes[{e}]` joins node {edges[e, 0]} to itself; add its diagonal to `node_cost`.")
    for e in _first_of_each_form(problem.edge_cost, sizes[edges]):
        u, v = edges[e].tolist()
        _check_costs(problem.edge_cost[e], (sizes[u], sizes[v]), f"`edge_cost[{e}]` between nodes {u} and {v}")


def _check_usages(problem: Problem, sizes: np.ndarray) -> None:
    limit = as_array(problem.memory_limit)
    if not is_real(limit) or limit.ndim > 1 or not limit.size or np.isnan(limit).any() or (limit < 0).any():
        raise ValueError(
            f"`memory_limit` must be a number or `[D]`, not negative, got {problem.memory_limit!r}; "
            "`np.inf` is no limit."
        )
    nodes = np.asarray(problem.usage_node)
    if nodes.shape != (len(problem.usage),):
        raise ValueError(f"`usage_node` must have one node for each of {len(problem.usage)} usages, got {nodes.shape}.")
    if nodes.size and not np.issubdtype(nodes.dtype, np.integer):
        raise ValueError(f"`usage_node` must be integers, got {nodes.dtype}.")
    intervals = _checked_pairs(problem.usage_interval, len(problem.usage), "`usage_interval`", "`usage`")
    first: tuple[int, int] | None = None  # the first usage that differs between devices, and between how many
    for k in np.flatnonzero((nodes < 0) | (nodes >= len(sizes)))[:1]:
        raise ValueError(f"`usage_node[{k}]` is {nodes[k]}, but {_nodes_text(sizes)}.")
    for k in np.flatnonzero(intervals[:, 0] >= intervals[:, 1])[:1]:
        start, end = intervals[k]
        raise ValueError(f"`usage_interval[{k}]` is [{start}, {end}), which is empty; leave the usage out.")
    for k in _first_of_each_form(problem.usage, sizes[nodes.astype(np.int64)]):
        usage, v = problem.usage[k], int(nodes[k])
        _check_array(usage, f"`usage[{k}]`")
        devices = np.shape(usage)[1:]
        if devices not in ((), (limit.size,)) and not (len(devices) == 1 and limit.ndim == 0):
            raise ValueError(
                f"`usage[{k}]` has shape {np.shape(usage)}, but `memory_limit` is for {limit.size} devices."
            )
        if devices and devices != (1,):
            first = first or (k, devices[0])
            if devices[0] != first[1]:
                raise ValueError(
                    f"`usage[{k}]` is for {devices[0]} devices, but `usage[{first[0]}]` for {first[1]}; "
                    "give every usage as `[S_v]` or for the same devices."
                )
        _check_numbers(usage, (sizes[v], *devices), f"`usage[{k}]` of node {v}")
        if len(usage) and (np.min(usage) < 0 or np.isinf(np.max(usage))):
            wrong = np.min(usage) if np.min(usage) < 0 else np.max(usage)
            raise ValueError(
                f"`usage[{k}]` of node {v} must be finite and not negative, got {wrong}; "
                "a strategy that must not be chosen has an infinite `node_cost`."
            )
        if float(np.max(usage, initial=0)) > _LARGEST_USAGE:
            raise ValueError(f"`usage[{k}]` of node {v} must be at most {_LARGEST_USAGE:.0e}, got {np.max(usage)}.")


def validate_quantities(quantities: Quantities, problem: Problem, name: str) -> None:
    """Checks that quantities keep the rules of `Quantity`, on a problem that is valid.

    Args:
      name: of the argument, for errors.

    Raises:
      TypeError: they are no dict of quantities.
      ValueError: names the quantity, its field, the rule and the value.
    """
    if not isinstance(quantities, Mapping) or not quantities:
        raise TypeError(f"`{name}` must be a dict of one Quantity or more by their names, not {quantities!r}.")
    sizes = num_strategies(problem)
    places = {"node": sizes[:, None], "edge": sizes[edge_ends(problem)]}
    for key, quantity in quantities.items():
        own_name = f"{name}[{key!r}]"
        if isinstance(quantity, LiveMemory) and isinstance(quantity.problem, Problem):
            if not _have_equal_usages(quantity.problem, problem):
                raise ValueError(f"`{own_name}` must be the LiveMemory of the problem; it is of one with other usages.")
            continue
        if not isinstance(quantity, Quantity):
            raise TypeError(f"`{own_name}` must be a Quantity(node, edge) or a LiveMemory(problem), not {quantity!r}.")
        rest: tuple[int, ...] | None = None
        for field, forms in places.items():
            rest = _check_tables(getattr(quantity, field), forms, rest, f"{own_name}.{field}", field)
            _check_groups(quantity, field, f"{own_name}.{field}_group")


def _have_equal_usages(one: Problem, other: Problem) -> bool:
    shapes = [list(map(np.shape, problem.usage)) for problem in (one, other)]
    fields = [(problem.usage_node, problem.usage_interval) for problem in (one, other)]
    return shapes[0] == shapes[1] and all(map(np.array_equal, *fields))


def _check_tables(
    tables: Sequence[np.ndarray], forms: np.ndarray, rest: tuple[int, ...] | None, name: str, of: str
) -> tuple[int, ...] | None:
    """Checks the arrays of a quantity for nodes or edges, and returns the dimensions that all of them have in common.

    Args:
      forms: `[V, 1]` or `[E, 2]`, the numbers of strategies.
      rest: those dimensions, where another array has told them.
    """
    check_is_list(tables, f"`{name}`")
    if len(tables) not in (0, len(forms)):
        raise ValueError(f"`{name}` must be () or one array for each of the {len(forms)} {of}s, got {len(tables)}.")
    for i in _first_of_each_form(tables, forms[: len(tables)]):
        _check_array(tables[i], f"`{name}[{i}]`")
        rest = np.shape(tables[i])[forms.shape[1] :] if rest is None else rest
        _check_numbers(tables[i], (*forms[i].tolist(), *rest), f"`{name}[{i}]`")
        if np.isinf(tables[i]).any():
            raise ValueError(f"`{name}[{i}]` must be finite; what must not be chosen has an infinite `{of}_cost`.")
    return rest


def _check_groups(quantity: Quantity, field: str, name: str) -> None:
    number = checked_number(f"{name.rpartition('.')[0]}.num_groups", quantity.num_groups, Count)
    groups, count = getattr(quantity, f"{field}_group"), len(getattr(quantity, field))
    if groups is None or not count:
        return
    groups = np.asarray(groups)
    is_whole = groups.shape == (count,) and np.issubdtype(groups.dtype, np.integer)
    if not is_whole or groups.min() < 0 or groups.max() >= number:
        raise ValueError(
            f"`{name}` must be None or {count} integers from 0 to {number - 1}, below `num_groups`, got {groups!r}."
        )


def _first_of_each_form(arrays: Sequence[np.ndarray], sizes: np.ndarray) -> list[int]:
    """Returns where each array stands first with the same numbers of strategies: one that is shared is checked once.

    Args:
      arrays: of nodes, edges or usages.
      sizes: the numbers of strategies that each array must have, `[len]` or `[len, rank]`.
    """
    if not len(arrays):
        return []
    forms = np.column_stack([distinct_arrays(arrays)[1], sizes])
    return np.sort(np.unique(forms, axis=0, return_index=True)[1]).tolist()


def check_is_list(arrays: Sequence[np.ndarray], name: str) -> None:
    """Raises `ValueError` unless arrays are a list or another sequence; one array of several dimensions is not."""
    if not isinstance(arrays, Sequence) or isinstance(arrays, str):
        raise ValueError(
            f"{name} must be a list of NumPy arrays, got {type(arrays).__name__}; write `[np.array(...), ...]`."
        )


def _check_array(array: np.ndarray, name: str) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(
            f"{name} must be a NumPy array without a mask; fill it by `array.filled(np.inf)`, got {array}."
        )
    if not isinstance(array, np.ndarray | np.generic):
        raise ValueError(f"{name} must be a NumPy array, got {type(array).__name__}; wrap it in `np.array`.")


def _check_costs(cost: np.ndarray, shape: tuple, name: str) -> None:
    _check_numbers(cost, shape, name)
    if np.min(cost, initial=0) <= -FORBIDDEN:
        raise ValueError(f"{name} must be above -1e18, got {np.min(cost)}; divide all costs by a number.")


def _check_numbers(cost: np.ndarray, shape: tuple, name: str) -> None:
    _check_array(cost, name)
    if np.shape(cost) != tuple(shape):
        shape_text = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({shape_text}), got {np.shape(cost)}.")
    if not is_real(np.asarray(cost)):
        raise ValueError(f"{name} must hold real numbers, got {np.asarray(cost).dtype}.")
    if np.isnan(cost).any() or np.isneginf(cost).any():
        raise ValueError(f"{name} must not hold NaN or -inf; `inf` marks what must not be chosen.")


def _checked_pairs(pairs: np.ndarray, count: int, name: str, of: str) -> np.ndarray:
    pairs = np.asarray(pairs)
    if pairs.size == 0 and count == 0:
        return np.zeros((0, 2), np.int64)
    if pairs.shape != (count, 2) or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(
            f"{name} must be integers of shape {(count, 2)}, a pair for each array of {of}; "
            f"got {pairs.dtype} {pairs.shape}."
        )
    return pairs


def _nodes_text(sizes: np.ndarray) -> str:
    return f"the nodes are 0 to {len(sizes) - 1}" if len(sizes) else "there are no nodes"
