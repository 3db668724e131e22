"""A training state with what its planned step carries beside it: residuals of sums, and maxima for delayed scales.

A step with residuals takes and returns `Carried` in the place of its state, and a step without takes and returns the
state itself, so that a training loop is the same for all plans. `Plan.shard` makes the one of the other.
"""

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diffshard.base import PlanError
from diffshard.plans.base import PlanData, Tensor
from diffshard.plans.sections import DelayedScale
from diffshard.sharding_search.call import Structure
from diffshard.sharding_search.options import with_automatic_axes
from diffshard.sharding_search.placing_arrays import parameter_of
from diffshard.sharding_search.tracing import TracedFunction
from search_spaces.partition_specs import named_spec
from search_spaces.sharding.base import Layout
from search_spaces.sharding.delayed_scales import HISTORY, NAME, Scales
from search_spaces.sharding.graph import Graph, Value
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.sum_residuals import MAXIMA, refitted, residuals_of


class Carried(NamedTuple):
    """A training state with residuals.

    Attributes:
      state: the user's own.
      residuals: what devices have not sent yet of each sum that is sent with error feedback, float32,
        `[devices, trips of loops, value]`. Its key is the number of its operation and a hash of how the operations of
        the step depend on each other, so that after an edit no residual goes to another sum. Under "maxima" are the
        largest magnitudes that operands with delayed scales had in the last steps.
    """

    state: Any
    residuals: Mapping[str, Any]

    @property
    def overflows(self) -> int:
        """How often an operand had numbers that its delayed scale cut off, over all steps and operands."""
        counts = [array[..., HISTORY:].sum() for key, array in self.residuals.items() if key.startswith("maxima")]
        return int(sum(counts))


def carrying_parameter(traced_function: TracedFunction) -> str | None:
    """Returns the argument that residuals go with: the largest that a result replaces; None if none does."""
    call, num_bytes = traced_function.call, Counter[str]()
    for argument in sorted(a for a in traced_function.graph.feedback if a is not None):
        array = call.arrays[argument]
        num_bytes[call.parameters[call.numbers[argument]]] += math.prod(array.shape) * array.dtype.itemsize
    return max(num_bytes, key=lambda name: num_bytes[name], default=None)


def planned_residuals(traced_function: TracedFunction, space: ShardingSpace, layout: Layout) -> tuple[Tensor, ...]:
    """Returns the residuals of a layout as arrays of a plan."""
    name, digest = carrying_parameter(traced_function), _digest_of_dependencies(space.graph)
    residuals = residuals_of(space.reshard_costs.path, space.graph, layout)
    keys = [f"{'maxima' if r.vertex == MAXIMA else r.vertex} of {digest}" for r in residuals]
    return tuple(
        Tensor(f"{name}.residuals['{key}']", r.shape, "float32", named_spec(r.spec, space.axis_names))
        for key, r in zip(keys, residuals, strict=True)
    )


def planned_scales(graph: Graph, layout: Layout) -> tuple[DelayedScale, ...]:
    """Returns the operands of which a layout's maxima are; none where no product has delayed scales."""
    if all(name != NAME for _, name in layout.rounded):
        return ()
    scales, named = Scales.of(graph), []
    for (vertex, position), trips in zip(scales.read_by, scales.trips, strict=True):
        place = " ".join(filter(None, (vertex.scope, vertex.source)))
        named.append(DelayedScale(f"{place} operand {position + 1}", math.prod(trips)))
    return tuple(named)


def overflows_of(plan: PlanData, state: Carried) -> dict[str, int]:
    """Returns how often operands had numbers that their delayed scales cut off, by their names, the most often first.

    Raises:
      PlanError: the state's maxima are of another plan.
    """
    counts = [np.asarray(array)[0, :, HISTORY] for key, array in state.residuals.items() if key.startswith("maxima")]
    rows = sum(scale.num_rows for scale in plan.delayed_scales)
    if any(len(own) != rows for own in counts):
        raise PlanError("The maxima of the state are those of another plan.")
    found = Counter[str]()
    for own in counts:
        ends = np.cumsum([scale.num_rows for scale in plan.delayed_scales])[:-1]
        for scale, part in zip(plan.delayed_scales, np.split(own, ends), strict=True):
            found[scale.name] += int(part.sum())
    return {name: count for name, count in found.most_common() if count}


def _digest_of_dependencies(graph: Graph) -> str:
    """Returns a hash of the operations of a function and of what they read, whatever the shapes are."""
    digest = hashlib.blake2b(digest_size=4)
    for vertex in graph.vertices:
        read = [operand.id if isinstance(operand, Value) else None for operand in vertex.operands]
        digest.update(f"{vertex.kind} {vertex.primitive} {read}\n".encode())
    digest.update(str([output.id if isinstance(output, Value) else None for output in graph.outputs]).encode())
    return digest.hexdigest()


def residual_key(tensor: Tensor) -> str:
    """Returns the key of a plan's array in `Carried.residuals`."""
    return tensor.path.rsplit("'", 2)[1]


def without_residuals(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Mapping[str, Any] | None]:
    """Returns arguments with states in place of `Carried`, and the residuals, if any are given."""
    given = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Carried)]
    if not given:
        return tuple(args), dict(kwargs), None
    args = tuple(a.state if isinstance(a, Carried) else a for a in args)
    kwargs = {name: a.state if isinstance(a, Carried) else a for name, a in kwargs.items()}
    return args, kwargs, given[0].residuals


def residual_shardings(plan: PlanData, mesh: Mesh) -> dict[str, NamedSharding]:
    """Returns where the residuals of a plan are, by their keys."""
    return {residual_key(tensor): tensor.sharding_on(mesh) for tensor in plan.residuals}


def residuals_for_call(plan: PlanData, mesh: Any, residuals: Mapping[str, Any] | None, arrays: Sequence[Any]) -> Any:
    """Returns the residuals that a call takes beside its flat arrays; zeros if none are given, as at the first step.

    Those that are committed to other devices are moved, as arguments are.
    """
    if residuals is None and any(isinstance(array, Tracer) for array in arrays):
        return [jnp.zeros(tensor.shape, tensor.dtype) for tensor in plan.residuals]
    if residuals is None:
        return list(placed_residuals(plan, mesh, {}).values())
    shapes = {key: jnp.shape(array) for key, array in residuals.items()}
    if shapes != {residual_key(tensor): tensor.shape for tensor in plan.residuals}:
        raise PlanError(
            "The residuals of the state are those of another plan: give the state to `plan.shard` of the one that runs."
        )
    return [_moved(residuals[key], sharding) for key, sharding in residual_shardings(plan, mesh).items()]


def _moved(array: Any, sharding: NamedSharding) -> Any:
    is_free = isinstance(array, Tracer) or not isinstance(array, jax.Array) or not array.committed
    return (
        array if is_free or array.sharding.is_equivalent_to(sharding, array.ndim) else jax.device_put(array, sharding)
    )


def placed_residuals(plan: PlanData, mesh: Mesh, residuals: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the residuals of a plan on its mesh.

    Those of a plan with another mesh or other shardings are divided anew, so that each sum lacks as much as before.

    Args:
      residuals: of any plan of the same function; what is missing is 0. Those of another version of the function are
        left out.
    """
    placed, shardings, used = {}, residual_shardings(plan, mesh), set[str]()
    for tensor, (key, sharding) in zip(plan.residuals, shardings.items(), strict=True):
        array, shape = residuals.get(key), tensor.shape
        if array is None or math.prod(jnp.shape(array)[1:]) != math.prod(shape[1:]):
            placed[key] = jax.jit(lambda shape=shape: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()
            continue
        used.add(key)
        if jnp.shape(array) == shape:
            placed[key] = jax.device_put(array, sharding)
        else:
            array = _with_automatic_axes(array)
            if not isinstance(array, jax.Array) or array.sharding.device_set != sharding.device_set:
                of_one = NamedSharding(mesh, PartitionSpec(None, *sharding.spec[1:]))
                array = jax.device_put(refitted(array, (1, *shape[1:])), of_one)
            placed[key] = jax.jit(refitted, static_argnums=1, out_shardings=sharding)(array, shape)
    if dropped := residuals.keys() - used:
        warnings.warn(
            f"{len(dropped)} of the residuals that are given are of sums that are sent without error feedback here, of "
            "scales that are not delayed here, or of another version of the function: they are left out.",
            stacklevel=4,
        )
    return placed


def _with_automatic_axes(array: Any) -> Any:
    """Returns an array whose type says nothing of how it is split, which a reshape of explicit axes would need."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return array
    return jax.device_put(array, NamedSharding(with_automatic_axes(array.sharding.mesh), array.sharding.spec))


def with_residuals(plan: PlanData, result: Any, residuals: Sequence[Any]) -> Any:
    """Returns the result of a step with `Carried` in the place of the new state.

    Args:
      plan: of the step; knows the pytrees.
      residuals: the next ones, in the order of the plan.
    """
    by_key = dict(zip(map(residual_key, plan.residuals), residuals, strict=True))
    return _changed_at(result, _place_of_state(plan), lambda state: Carried(state, by_key))


def _place_of_state(plan: PlanData) -> tuple[int, ...]:
    """Returns which part of the result is the new state: numbers of parts, from the whole result down."""
    name = parameter_of(plan.residuals[0])
    call, result = plan.structures
    positional, keyword = call.treedef.children()
    wanted = [*positional.children(), *keyword.children()][plan.parameters.index(name)]
    types = [(t.shape, t.dtype) for t in plan.arguments if parameter_of(t) == name]
    outputs = [(t.shape, t.dtype) for t in plan.outputs]
    place = _find(result, result.treedef, 0, wanted, types, outputs)
    assert place is not None, "a plan has residuals only where a result replaces the argument"
    return place


def _find(
    result: Structure, tree: Any, first_leaf: int, wanted: Any, types: list[Any], outputs: list[Any]
) -> tuple[int, ...] | None:
    """Returns the place of the first part of a result that has a structure and arrays of some types."""
    first = first_leaf - sum(position < first_leaf for position, _ in result.constants)
    if tree == wanted and outputs[first : first + len(types)] == types:
        return ()
    if tree.node_data() is None or tree.node_data()[0] not in (tuple, list):
        return None
    for number, child in enumerate(tree.children()):
        place = _find(result, child, first_leaf, wanted, types, outputs)
        if place is not None:
            return (number, *place)
        first_leaf += child.num_leaves
    return None


def _changed_at(tree: Any, place: tuple[int, ...], change: Any) -> Any:
    if not place:
        return change(tree)
    parts = list(tree)
    parts[place[0]] = _changed_at(parts[place[0]], place[1:], change)
    return type(tree)(parts)
