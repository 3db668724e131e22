"""A training state that a function makes, split from the start."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from diffshard.sharding_search.call import Structure, array_paths, split


class FreshState:
    """A state that is not made yet: its shapes are known, and no device ever holds all of it."""

    def __init__(self, init: Callable[..., Any], *args: Any):
        self._init, self._args = init, args
        self._seen: list[tuple[Structure, Any]] = []
        self.arrays: list[jax.ShapeDtypeStruct] = jax.eval_shape(self._flat, *args)
        self.structure, self._paths = self._seen[-1]

    @property
    def shapes(self) -> Any:
        """The state as a pytree of `jax.ShapeDtypeStruct`."""
        return self.structure.unflatten(self.arrays)

    def paths(self, name: str) -> tuple[str, ...]:
        """Returns the path of each array in a state that is called so."""
        return tuple(name + path for path in self._paths)

    def make(self, shardings: Sequence[NamedSharding]) -> Any:
        """Computes the state, each device its own part; what is on other devices is computed there, by itself."""
        made: dict[int, Any] = {}
        for devices in dict.fromkeys(frozenset(sharding.device_set) for sharding in shardings):
            own = [i for i, sharding in enumerate(shardings) if frozenset(sharding.device_set) == devices]
            arrays = jax.jit(
                lambda *args, own=own: [self._flat(*args)[i] for i in own], out_shardings=[shardings[i] for i in own]
            )(*self._args)
            made.update(zip(own, arrays, strict=True))
        return self.structure.unflatten([made[i] for i in range(len(shardings))])

    def _flat(self, *args: Any) -> list[Any]:
        state = self._init(*args)
        arrays, structure = split(state)
        self._seen.append((structure, array_paths("", state)))
        return [_strongly_typed(array) for array in arrays]


def _strongly_typed(array: Any) -> Any:
    """Returns an array whose dtype does not give way to others, as that of an array from a file."""
    is_key = jax.numpy.issubdtype(jax.typeof(array).dtype, jax.dtypes.prng_key)
    return array if is_key else lax.convert_element_type(array, jax.typeof(array).dtype)
