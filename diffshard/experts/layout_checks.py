"""Checks of layouts of experts and of the arrays that they are used with, before any work starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cost.real_numbers import is_positive, whole_number


def check_layout(
    axis_sizes: Mapping[str, int], axis: str, groups: Sequence[Sequence[int]], experts: Sequence[Sequence[int]]
) -> None:
    """Raises `ValueError` unless groups divide the devices along an axis, and each holds each expert once."""
    if axis not in axis_sizes:
        raise ValueError(f"`mesh` has no axis {axis!r}; its axes are {tuple(axis_sizes)}.")
    num_devices = axis_sizes[axis]
    if len(experts) != num_devices:
        raise ValueError(
            f"`experts` must have an entry for each of the {num_devices} devices of {axis!r}, not {len(experts)}."
        )
    if sorted(device for group in groups for device in group) != list(range(num_devices)) or not all(groups):
        raise ValueError(f"`groups` must have each of the {num_devices} devices of {axis!r} once, got {groups}.")
    below = sorted({x for own in experts for x in own if x < 0})
    if below:
        raise ValueError(f"`experts` must be numbered from 0, got {below[0]}.")
    num_experts = max((x for own in experts for x in own), default=-1) + 1
    if not num_experts:
        raise ValueError("`experts` must have at least one expert.")
    for group in groups:
        held = [x for device in group for x in experts[device]]
        missing = sorted(set(range(num_experts)).difference(held))
        twice = sorted({x for x in held if held.count(x) > 1})
        if missing or twice:
            raise ValueError(
                f"`experts` must give the group {tuple(group)} each of the {num_experts} experts once; missing are "
                f"{missing}, several times there are {twice}."
            )


def checked_experts(experts: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the experts of each device as whole numbers; raises `ValueError` where they are something else."""
    try:
        numbers = [[whole_number(x) for x in own] for own in experts]
    except TypeError:
        numbers = [[None]]
    if any(x is None for own in numbers for x in own):
        raise ValueError(f"`experts` must be a list of whole numbers for each device, not {experts!r}.")
    return tuple(tuple(int(x) for x in own if x is not None) for own in numbers)


def check_movable(arrays: Any, num_rows: int, what: str) -> None:
    """Raises `ValueError` unless each array of a tree begins with `num_rows`; `what` these are, for the message."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if jnp.shape(leaf)[:1] != (num_rows,):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"The array{f' {name!r}' if name else ''} must begin with the {num_rows} {what}; its shape is "
                f"{jnp.shape(leaf)}."
            )


def check_layer(
    num_experts: int, num_devices: int, tokens: jax.Array, logits: jax.Array, num_chosen: Any, capacity_factor: Any
) -> None:
    """Raises `ValueError` where the arguments of a layer do not fit."""
    if tokens.ndim != 2 or logits.shape != (len(tokens), num_experts):
        raise ValueError(
            f"`tokens` must be [T, M] and `logits` [T, {num_experts}], got {tokens.shape} and {logits.shape}."
        )
    for name, array in (("tokens", tokens), ("logits", logits)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`{name}` must be floating point numbers, not {array.dtype}.")
    if not len(tokens) or len(tokens) % num_devices:
        raise ValueError(
            f"`tokens` must be a multiple of the {num_devices} devices of the mesh, got {len(tokens)}. Pad them."
        )
    chosen = whole_number(num_chosen)
    if chosen is None or not 1 <= chosen <= num_experts:
        raise ValueError(f"`num_chosen` must be from 1 to the {num_experts} experts, not {num_chosen!r}.")
    if not is_positive(capacity_factor) or not math.isfinite(capacity_factor):
        raise ValueError(f"`capacity_factor` must be positive and finite, not {capacity_factor!r}.")


def check_expert(result: Any, num_tokens: int) -> None:
    """Raises `ValueError` unless one expert returns a row for each of its tokens; `result` has shape and dtype."""
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != num_tokens:
        raise ValueError(
            f"`expert` must return one row for each of the {num_tokens} tokens that it gets, [{num_tokens}, M], got "
            f"{f'a {type(result).__name__}' if shape is None else shape}."
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"`expert` must return floating point numbers, not {result.dtype}.")


def checked_names(names: Sequence[str] | None, state: Any, num_rows: int) -> frozenset[str] | None:
    """Returns the names of the arrays of experts in a state; None for all arrays."""
    if isinstance(names, str):
        raise ValueError(f"`names` must be a list of names, not the text {names!r}.")
    chosen = None if names is None else frozenset(names)
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = _keys(path)
        if chosen is None or chosen & keys:
            found |= keys
            check_movable({"/".join(map(str, map(_key, path))): leaf}, num_rows, "slots of all devices")
    if chosen is not None and chosen - found:
        raise ValueError(f"`names` has {sorted(chosen - found)}, and no array of `state` has such a name.")
    return chosen


def map_named(function: Callable[[Any], Any], state: Any, names: frozenset[str] | None) -> Any:
    """Applies a function to the list of a state's leaves that have one of the names; all others stay."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    chosen = [index for index, (path, _) in enumerate(leaves) if names is None or names & _keys(path)]
    results = [leaf for _, leaf in leaves]
    for index, result in zip(chosen, function([results[index] for index in chosen]), strict=True):
        results[index] = result
    return jax.tree.unflatten(structure, results)


def _keys(path: Sequence[Any]) -> frozenset[str]:
    return frozenset(str(_key(key)) for key in path)


def _key(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key
