"""Results of a function in parallel, compared with those on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_equal_results(
    function: Callable[..., Any], parallel: Callable[..., Any], args: tuple[Any, ...], *, tolerance: float = 1e-5
) -> float:
    """Runs a function on one device and in parallel, and compares all results.

    Args:
      parallel: the same function with a plan; it may donate its arguments, as it gets copies.
      args: pytrees of arrays and random keys.
      tolerance: bound on the largest difference in an array, relative to the array's largest magnitude; integers must
        be equal.

    Returns:
      The largest relative difference of all arrays.
    """
    expected = jax.device_get(_without_keys(jax.jit(function)(*_copies(args))))
    actual = jax.device_get(_without_keys(parallel(*_copies(args))))
    expected_leaves, tree = jax.tree_util.tree_flatten_with_path(expected)
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    if tree != actual_tree:
        raise AssertionError(f"results differ in structure: {tree} on one device, {actual_tree} in parallel.")
    worst, where = 0.0, ""
    for (path, single), (_, parallel_leaf) in zip(expected_leaves, actual_leaves, strict=True):
        difference = _difference(single, parallel_leaf)
        if not difference <= worst:
            worst, where = difference, jax.tree_util.keystr(path)
    if not worst <= tolerance:
        raise AssertionError(
            f"results differ by {worst:.3g} of the largest magnitude at {where}; allowed {tolerance:.3g}."
        )
    return worst


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


def _difference(single: Any, parallel: Any) -> float:
    """Returns the largest difference of two arrays, relative to the largest finite magnitude of the first."""
    single, parallel = np.asarray(single), np.asarray(parallel)
    if single.shape != parallel.shape or single.dtype != parallel.dtype:
        types = f"{single.dtype}{single.shape} on one device, {parallel.dtype}{parallel.shape} in parallel"
        raise AssertionError(f"results differ in type: {types}.")
    if single.size == 0:
        return 0.0
    if not jnp.issubdtype(single.dtype, np.inexact):
        return 0.0 if np.array_equal(single, parallel) else float("inf")
    wide = np.complex128 if jnp.issubdtype(single.dtype, np.complexfloating) else np.float64
    single, parallel = single.astype(wide), parallel.astype(wide)
    same = (single == parallel) | (np.isnan(single) & np.isnan(parallel))
    difference = np.where(same, 0.0, np.abs(single - parallel)).max()
    scale = np.abs(single[np.isfinite(single)]).max(initial=0.0)
    return 0.0 if difference == 0 else float("inf") if np.isnan(difference) else float(difference / max(scale, 1e-30))
