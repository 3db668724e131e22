"""What each device computes in a training step: its share of the loss, and how its gradients are sent.

The traced loss runs with a strategy at each operation. What is selected for an operation may be an index that is known
when the step is compiled, which costs nothing; a traced index, which branches; or weights, for the weighted sum of the
results of all strategies. A call site has two operations, so a `custom_vjp` stands there, whose forward part runs the
forward operation and whose backward part runs the backward operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.base import Choice, NodeSelection, Selection
from search_spaces.communication.base import CollectiveOp, Direction, Group, Operation
from search_spaces.communication.collectives import run_exact
from search_spaces.communication.operations import TracedLoss
from search_spaces.communication.strategies import without_schedules


@dataclass(frozen=True)
class DeviceStep:
    """A traced loss with strategies at its operations; its methods run inside a mapping over the mesh's axes."""

    traced_loss: TracedLoss
    operations: tuple[Operation, ...]
    groups: tuple[Group, ...]
    num_devices: int

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each operation."""
        return {o: g for g, group in enumerate(self.groups) for o in group.operations}

    @cached_property
    def operation_at(self) -> dict[tuple[Direction, int], int]:
        """The operation of a call site in a direction."""
        return {
            (operation.direction, operation.call_site): o
            for o, operation in enumerate(self.operations)
            if operation.call_site is not None
        }

    def loss(self, params: Any, batch: Any, key: jax.Array, step: jax.Array, selection: Selection) -> jax.Array:
        """Returns this device's share of the training loss for a selection."""

        def dynamic_part(o: int | None) -> Any:
            """Returns a selection that `custom_vjp` must get as an argument, because it cannot capture tracers."""
            node_selection = None if o is None else selection[self.group_of[o]]
            return None if isinstance(node_selection, int) else node_selection

        def run(o: int, x: jax.Array, dynamic: Any, key: jax.Array, step: jax.Array) -> jax.Array:
            node_selection = selection[self.group_of[o]] if dynamic is None else dynamic
            return self.run_selected(o, node_selection, x, None, key, step)[0]

        def at_collective(c: int, x: jax.Array, key: jax.Array) -> jax.Array:
            forward_operation, backward_operation = (
                self.operation_at["forward", c],
                self.operation_at.get(("backward", c)),
            )
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return run_exact(self.collective(forward_operation), x)

            def forward(x: jax.Array, dynamic: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                return run(forward_operation, x, dynamic, keys[0], step)

            def backward(cotangent: jax.Array, dynamic: Any, keys: jax.Array, step: jax.Array) -> jax.Array:
                if backward_operation is None:  # no parameter's gradient needs it, but another derivative may
                    return run_exact(self.collective(forward_operation).transpose(), cotangent)
                return run(backward_operation, cotangent, dynamic, keys[1], step)

            dynamic = dynamic_part(forward_operation), dynamic_part(backward_operation)
            return _with_backward(forward, backward, x, *dynamic, self.keys(c, key), step)

        def at_alternatives(c: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            return _run_selected(branches, selection[self.group_of[self.operation_at["forward", c]]], *operands)

        return self.loss_with(params, batch, key, at_collective, at_alternatives)

    def send_gradients(
        self,
        gradients: Any,
        residuals: dict[str, jax.Array],
        key: jax.Array,
        step: jax.Array,
        selection: Selection,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the gradients as they arrive, and the residuals for the next step, `[1, *local shape]` each."""
        leaves, structure = jax.tree.flatten(gradients)
        next_residuals = {}
        for g, numbers in self.gradient_groups():
            parts = [leaves[leaf] for leaf in numbers]
            names = [self.traced_loss.param_names[leaf] for leaf in numbers]
            kept = [residuals[name][0] for name in names if name in residuals]
            before = as_vector(kept) if kept else None
            first, operand = self.groups[g].operations[0], as_vector(parts)
            y, residual = self.run_selected(first, selection[g], operand, before, gradient_key(key, g), step)
            by_leaf = zip(numbers, names, _split(y, parts), _split(residual, parts), strict=True)
            for leaf, name, gradient, leaf_residual in by_leaf:
                leaves[leaf] = gradient.astype(operand.dtype)
                if name in residuals:
                    next_residuals[name] = leaf_residual[None].astype(jnp.float32)
        return jax.tree.unflatten(structure, leaves), next_residuals

    def sum_gradients(self, gradients: Any) -> Any:
        """Returns the parameters' gradients summed exactly over devices."""
        leaves, structure = jax.tree.flatten(gradients)
        for o, operation in enumerate(self.operations):
            if operation.leaf is not None:
                leaves[operation.leaf] = run_exact(self.collective(o), leaves[operation.leaf])
        return jax.tree.unflatten(structure, leaves)

    def loss_with(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        at_collective: Callable[..., jax.Array],
        at_alternatives: Callable[..., Any],
        at_custom_vjp: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """Returns this device's share of the loss with other functions at call sites; see `call_sites.Interpreter`."""
        loss = self.traced_loss.loss(params, batch, key, at_collective, at_alternatives, at_custom_vjp)
        return loss / self.num_devices

    def keys(self, call_site: int, key: jax.Array) -> jax.Array:
        """Returns the random keys of the forward and of the backward operation of a call site, `[2]`."""
        return jax.random.split(jax.random.fold_in(key, call_site))

    def gradient_groups(self) -> list[tuple[int, list[int]]]:
        """Returns the groups of gradient operations with the parameter leaves of each, which are sent as one vector."""
        leaves = [[self.operations[o].leaf for o in group.operations] for group in self.groups]
        of_gradients = [(g, [leaf for leaf in numbers if leaf is not None]) for g, numbers in enumerate(leaves)]
        return [(g, numbers) for g, numbers in of_gradients if numbers]

    def collective(self, o: int) -> CollectiveOp:
        """Returns the collective of an operation; alternatives have none."""
        collective = self.operations[o].collective
        assert collective is not None
        return collective

    def run_selected(
        self, o: int, node_selection: NodeSelection, x: jax.Array, residual: Any, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Runs what is selected for an operation; see `CollectiveStrategy.run`."""
        if isinstance(node_selection, int):
            strategy = self.groups[self.group_of[o]].strategies[node_selection]
            return strategy.run(self.collective(o), x, residual, key, step)
        functions, numbers = self.functions_at(o, step)
        if jnp.ndim(node_selection) == 0:
            selected = numbers[node_selection]
        else:
            selected = total_by_function(node_selection, functions, numbers)
        return _run_selected(functions, selected, x, residual, key, step)

    def functions_at(self, o: int, step: jax.Array) -> tuple[list[Callable[..., Any]], jax.Array]:
        """Returns the functions that an operation's strategies run, of operand, residual, key and step.

        Each stands there once, whatever schedules there are; `[S]` are the numbers of those that run now.
        """
        strategies, numbers = without_schedules(self.groups[self.group_of[o]].strategies, step)
        return [partial(strategy.run, self.collective(o)) for strategy in strategies], numbers


def partition_selection(groups: Sequence[Group], selection: Selection) -> tuple[list[int | None], list[Any]]:
    """Splits a selection into static and dynamic entries, `[V]` each, with None where an entry is of the other kind.

    Static indices are known when the step is compiled; traced indices and weights are dynamic.
    """
    if len(selection) != len(groups):
        raise ValueError(f"`choice` must have one entry for each of {len(groups)} groups, got {len(selection)}.")
    static: list[int | None] = []
    dynamic: list[Any] = []
    for group, node_selection in zip(groups, selection, strict=True):
        number = isinstance(node_selection, (int, np.integer)) and not isinstance(node_selection, bool)
        if number and not 0 <= int(node_selection) < len(group.names):
            raise ValueError(f"`choice` of {group.name!r} must be 0 to {len(group.names) - 1}, not {node_selection}.")
        whole = jnp.ndim(node_selection) == 0 and jnp.issubdtype(jnp.asarray(node_selection).dtype, jnp.integer)
        if not number and not whole and jnp.shape(node_selection) != (len(group.names),):
            raise ValueError(
                f"`choice` of {group.name!r} must be an integer or {len(group.names)} weights, not {node_selection!r}."
            )
        static.append(int(node_selection) if number else None)  # type: ignore[arg-type]
        dynamic.append(None if number else jnp.asarray(node_selection))
    return static, dynamic


def combine(static: Sequence[Any], dynamic: Sequence[Any]) -> list[Any]:
    """Undoes `partition_selection`."""
    return [d if s is None else s for s, d in zip(static, dynamic, strict=True)]


def choice_as_indices(groups: Sequence[Group], choice: Sequence[int]) -> Choice:
    """Returns a choice as integers; raises as `partition_selection`, and for weights and traced indices."""
    static, _ = partition_selection(groups, choice)
    for group, strategy in zip(groups, static, strict=True):
        if strategy is None:
            raise ValueError(f"`choice` of {group.name!r} must be a strategy's index, an int; got weights or a tracer.")
    return tuple(strategy for strategy in static if strategy is not None)


def total_by_function(values: jax.Array, functions: Sequence[Any], numbers: jax.Array) -> jax.Array:
    """Adds up values of strategies, `[S]`, for each function that some of them run; see `DeviceStep.functions_at`."""
    return jnp.zeros(len(functions), values.dtype).at[numbers].add(values)


def gradient_key(key: jax.Array, group: int) -> jax.Array:
    """Returns the random key by which a group of gradients is sent; call sites count from 0 and never reach 2³¹ - 1."""
    return jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), group)


def as_vector(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays as one vector."""
    return jnp.concatenate([x.ravel() for x in arrays])


def _split(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Cuts a vector into arrays of the shapes of `like`."""
    ends = list(accumulate(y.size for y in like))
    return [part.reshape(y.shape) for part, y in zip(jnp.split(x, ends[:-1]), like, strict=True)]


def _run_selected(functions: Sequence[Callable[..., Any]], node_selection: NodeSelection, *operands: Any) -> Any:
    """Returns the selected function's result, or for weights the weighted sum of all results."""
    if isinstance(node_selection, int):
        return functions[node_selection](*operands)
    if jnp.ndim(node_selection) == 0:
        return lax.switch(node_selection, functions, *operands)
    results = [function(*operands) for function in functions]

    def weighted_sum(*xs: jax.Array) -> jax.Array:
        return reduce(jnp.add, [w * x for w, x in zip(node_selection, xs, strict=True)]).astype(xs[0].dtype)

    return jax.tree.map(weighted_sum, *results)


def _with_backward(
    forward: Callable[..., jax.Array],
    backward: Callable[..., jax.Array],
    x: jax.Array,
    forward_dynamic: Any,
    backward_dynamic: Any,
    *others: Any,
) -> jax.Array:
    """Returns `forward(x, forward_dynamic, *others)`; its backward is `backward(cotangent, backward_dynamic, *others)`.

    Derivatives with respect to `forward_dynamic` are those of `forward`; with respect to the others they are zero.
    """

    @jax.custom_vjp
    def op(x: jax.Array, forward_dynamic: Any, backward_dynamic: Any, others: Any) -> jax.Array:
        return forward(x, forward_dynamic, *others)

    def op_forward(x: jax.Array, forward_dynamic: Any, backward_dynamic: Any, others: Any) -> Any:
        y, pull = jax.vjp(lambda dynamic: forward(x, dynamic, *others), forward_dynamic)
        return y, (pull, backward_dynamic, others)

    def op_backward(saved_values: Any, cotangent: jax.Array) -> Any:
        pull, backward_dynamic, others = saved_values
        return backward(cotangent, backward_dynamic, *others), *pull(cotangent), None, None

    op.defvjp(op_forward, op_backward)
    return op(x, forward_dynamic, backward_dynamic, others)
