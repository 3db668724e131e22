"""The first results of a planned function, held against the same function run another way.

What XLA's partitioner makes of a plan is held against the plan's explicit program for each device, which leaves it
nothing to decide; and that program against the function on one device. Both runs get the same arguments. They may
differ by rounding only, and how much that is depends on the function. So where a result differs by more than a few
roundings of its own, the function runs once more on arguments that are off by one rounding: what that changes shows how
the function amplifies rounding.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh, SingleDeviceSharding

from diffshard.base import NumbersError, PlanError
from diffshard.plans.base import PlanData
from diffshard.processes import Processes, processes_of
from diffshard.sharding_search.call import is_random_key
from diffshard.sharding_search.executors import flat_function
from diffshard.sharding_search.tracing import TracedFunction
from diffshard.staged_array import StagedArray
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.given import is_constrained
from search_spaces.sharding.replicated_operations import impossible_operations
from search_spaces.sharding.space import ShardingSpace

_ROUNDINGS = 4
"""Roundings of a result's largest magnitude by which it may differ in any case: sums of few terms differ by less."""
_NOISE_FACTOR = 10
"""How many times what one rounding of the arguments changes a result may differ: each operation adds roundings."""


FAULT = "a fault of diffshard, not of the function"
"""Whose fault a difference between a program of diffshard and one device is."""


@dataclass(frozen=True)
class TwoRuns:
    """A function of flat arrays that runs in one way, and another way that its results are held against.

    Args:
      way: how it runs, as in "`executor` "program"".
      reference: what it is held against, as in "one device".
      refer: runs it in that other way, and donates nothing.
      epsilon: one rounding of the coarsest type in the function, relative.
    """

    way: str
    reference: str
    refer: Callable[[Sequence[Any]], list[Any]]
    fault: str
    paths: Sequence[str]
    epsilon: float
    processes: Processes

    def results(self, run: Callable[..., Any], donated: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
        """Runs the function in both ways, and returns its own flat results.

        Donated arrays are given up once the results are found to be right, and not before.

        Raises:
          NumbersError: a result differs by more than rounding; has both numbers and the name of the result.
          PlanError: the call is under another transformation, where there are no numbers.
        """
        if any(isinstance(array, Tracer) for array in arrays):
            raise PlanError(
                f"By {self.way} the first call is held against {self.reference}, and under "
                'another transformation there are no numbers. Take `executor="program"` without `check`, or call the '
                "function once with arrays before."
            )
        expected = self.refer(arrays)
        copies = [_copied(array) if i in donated else array for i, array in enumerate(arrays)]
        results = list(run(*copies))
        worst = self._worst(expected, results)
        if any(difference.is_large for difference in worst):
            noise = self._worst(expected, self.refer(self._nudged(arrays)))
            self._check([d for d, n in zip(worst, noise, strict=True) if d.is_above(n)])
        for array, copy in zip(arrays, copies, strict=True):
            for part, copied in zip(parts_of(array), parts_of(copy), strict=True):
                if copied is not part and copied.is_deleted():
                    part.delete()
        return results

    def _nudged(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns arrays whose numbers are off by a rounding of the coarsest type in the function, up or down."""
        epsilon = self.epsilon

        def nudged(array: Any) -> Any:
            is_up = (jnp.arange(array.size) * 40503 >> 4) % 2 == 0  # a fixed pattern whose period is no dimension
            if jax.typeof(array).memory_space == jax.memory.Space.Host:
                array = jax.device_put(array, jax.memory.Space.Device)
            return array * (1 + jnp.where(is_up, epsilon, -epsilon).reshape(array.shape))

        def of(array: Any) -> Any:
            array = as_one_array(array)
            if not _is_inexact(jnp.result_type(array)):
                return array
            is_placed = _is_array(array) and array.committed
            return jax.jit(nudged, out_shardings=array.sharding if is_placed else None)(array)

        return list(map(of, arrays))

    def _worst(self, expected: Sequence[Any], results: Sequence[Any]) -> list["_Difference"]:
        """Returns the largest difference of each result, over the devices of all processes."""
        triples = zip(self.paths, expected, results, strict=True)

        def own() -> list[list[_Difference]]:
            with _without_context_mesh():
                return [list(_differences(path, *map(_numbers, pair))) for path, *pair in triples]

        everywhere = self.processes.gathered("compare numbers", own)
        found = [[_Difference(*d) for process in everywhere for d in process[i]] for i in range(len(results))]
        scales = [max((d.scale for d in differences), default=0.0) for differences in found]
        return [
            max(differences, default=_Difference(), key=lambda d: d.distance)._replace(scale=scale)
            for differences, scale in zip(found, scales, strict=True)
        ]

    def _check(self, large: Sequence["_Difference"]) -> None:
        """Raises `NumbersError` if there are differences that rounding does not explain."""
        if not large:
            return
        worst = max(large, key=lambda d: d.distance / d.scale if d.scale else float("inf"))
        more = f", and {len(large) - 1} more results differ" * (len(large) > 1)
        raise NumbersError(
            f"`{worst.where}` is {worst.actual} by {self.way}, and {worst.expected} by {self.reference}: more than "
            f"rounding explains{more}. This is {self.fault}."
        )


def numbers_check(plan: PlanData, traced_function: TracedFunction, space: ShardingSpace, mesh: Mesh) -> TwoRuns:
    """Returns the run of a planned function, by its executor, and the other one that its first call is held against.

    Raises:
      PlanError: the function cannot run in the other way.
    """
    way, graph, processes = f'`executor` "{plan.executor}"', space.graph, processes_of(mesh)
    if plan.executor == "program":
        reference, fault = "one device", FAULT
        impossible = [vertex for vertex in graph.operations() if is_constrained(vertex)]
        why = "names devices of the mesh, and cannot run on one device"
        if not processes.is_one:
            raise PlanError(
                'The numbers of `executor` "program" are held against one device, which the devices of several '
                'processes have no room for. Leave out `check` "numbers", or check in one process.'
            )
    else:
        reference, fault = "the program for each device", 'a fault of XLA\'s partitioner; take `executor="program"`'
        impossible = impossible_operations(graph)
        why = 'runs only where XLA partitions the function, by `executor="constraints"`'
    for name, sources in sources_of(impossible):
        raise PlanError(f"By {way} the first call cannot be held against {reference}: {name} ({sources}) {why}.")
    if plan.executor == "program":
        refer = on_one_device(core.jaxpr_as_fun(traced_function.jaxpr), mesh.devices.flat[0])
    else:
        refer = _as_program(plan, traced_function, space, mesh)
    paths = [tensor.path for tensor in plan.outputs]
    return TwoRuns(way, reference, refer, fault, paths, coarsest_epsilon(v.dtype for v in graph.values), processes)


def _as_program(
    plan: PlanData, traced_function: TracedFunction, space: ShardingSpace, mesh: Mesh
) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function of flat arrays as the plan's program for each device, which is built when it is first run."""

    @functools.cache
    def jitted() -> Callable[..., Any]:
        flat = flat_function(replace(plan, executor="program"), traced_function, space, mesh)
        return flat._replace(donate_argnums=()).jit("reference")

    return lambda arrays: list(jitted()(*arrays))


class _Difference(NamedTuple):
    """How much a result differs at most.

    Attributes:
      where: the result, with the place of the number that differs most.
      distance: the largest distance of two numbers; of integers the share of unequal ones.
      scale: the largest finite magnitude; 1 for integers.
      epsilon: what one rounding is, relative to the magnitude; 0 for integers.
    """

    where: str = ""
    distance: float = 0.0
    scale: float = 0.0
    epsilon: float = 0.0
    expected: str = ""
    actual: str = ""

    @property
    def is_large(self) -> bool:
        """Returns whether it is more than a few roundings of the result itself."""
        return self.distance > _ROUNDINGS * self.epsilon * self.scale

    def is_above(self, noise: "_Difference") -> bool:
        """Returns whether it is also more than roundings in the function explain."""
        return self.is_large and not self.distance <= _NOISE_FACTOR * noise.distance


def _differences(path: str, expected: jax.Array, actual: jax.Array) -> Iterator[_Difference]:
    """Yields the largest difference on each device of this process; each compares its own block."""
    blocks = {shard.device: shard.data for shard in expected.addressable_shards}
    is_alike = expected.sharding.is_equivalent_to(actual.sharding, actual.ndim)
    for shard in actual.addressable_shards if actual.size else ():
        block = blocks[shard.device] if is_alike else jax.device_put(expected[shard.index], shard.device)
        distance, scale, at, numbers = jax.device_get(_compared(block, shard.data))
        offsets = [s.start or 0 for s in shard.index]
        place = [int(o + i) for o, i in zip(offsets, np.unravel_index(at, shard.data.shape), strict=True)]
        epsilon = float(jnp.finfo(actual.dtype).eps) if _is_inexact(actual.dtype) else 0.0
        where = f"{path}{place}" if place else path
        texts = [f"{number:.6g}" if epsilon else str(number) for number in numbers]
        yield _Difference(where, float(distance), float(scale), epsilon, *texts)


@jax.jit
def _compared(expected: jax.Array, actual: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Returns the distance, the scale, the place of the largest distance, and both numbers there."""
    is_inexact = _is_inexact(expected.dtype)
    if is_inexact and jnp.finfo(expected.dtype).bits < 32:
        expected, actual = expected.astype(jnp.float32), actual.astype(jnp.float32)
    is_equal = expected == actual
    if is_inexact:
        is_equal |= jnp.isnan(expected) & jnp.isnan(actual)
        apart = jnp.abs(expected - actual)
        apart = jnp.where(is_equal, 0, jnp.where(jnp.isnan(apart), jnp.inf, apart))
        distance, scale = apart.max(), jnp.where(jnp.isfinite(expected), jnp.abs(expected), 0).max()
    else:
        apart = ~is_equal
        distance, scale = apart.mean(dtype=jnp.float32), jnp.float32(1)
    at = jnp.argmax(apart)
    return distance, scale, at, (expected.ravel()[at], actual.ravel()[at])


def on_one_device(function: Callable[..., Sequence[Any]], device: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function of flat arrays as it runs on one device."""
    jitted = jax.jit(function)

    def refer(arrays: Sequence[Any]) -> list[Any]:
        with _without_context_mesh():
            placed = jax.device_put(list(map(as_one_array, arrays)), SingleDeviceSharding(device))
            return list(jitted(*placed))

    return refer


def coarsest_epsilon(types: Iterable[Any]) -> float:
    """Returns one rounding of the coarsest type of some, relative; 0 where none is inexact."""
    return max((float(jnp.finfo(t).eps) for t in types if t is not None and _is_inexact(t)), default=0.0)


def as_one_array(array: Any) -> Any:
    """Returns an array that several stages of a pipeline have parts of as one array; others as they are."""
    return np.asarray(array) if isinstance(array, StagedArray) else array


def parts_of(array: Any) -> list[Any]:
    """Returns the parts of an array that several stages have; of another one itself."""
    return array.parts if isinstance(array, StagedArray) else [array]


def _copied(array: Any) -> Any:
    if isinstance(array, StagedArray):
        return StagedArray([part.copy() for part in array.parts], array.dim)
    return array.copy() if _is_array(array) else array


def _without_context_mesh() -> Any:
    """Lets arrays of single devices be computed with where the user has set a mesh."""
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def _numbers(array: Any) -> Any:
    if isinstance(array, StagedArray):
        array = jnp.asarray(as_one_array(array))
    return jax.random.key_data(array) if is_random_key(array) else array


def _is_array(array: Any) -> bool:
    return isinstance(array, jax.Array)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
