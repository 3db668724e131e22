"""Random functions of arrays with dimensions of 8, and their gradients, as numpy and JAX programs are made of.

A function keeps a few arrays, and in each step makes another one of them: products with and without a batch, sums,
lookups and their scatter-adds, slices, scans and so on. Values stay of order one, so that a wrong sum is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 8
"""Of every dimension: each of the meshes divides it."""
_PRODUCTS = ("ik,kj->ij", "bk,bk->b", "bk,bjk->bj", "bik,bkj->bij", "k,bk->b", "ikl,klj->ij", "abk,abk->ab", "i,j->ij")
_NUM_STEPS = 4  # enough for several layouts to meet, and compiled in a few seconds


@dataclass(frozen=True)
class RandomFunction:
    """A function of a seed, with its arguments.

    Attributes:
      seed: of everything random.
      args: the arguments.
    """

    seed: int
    args: tuple[Any, ...]

    @staticmethod
    def of(seed: int) -> "RandomFunction":
        """Returns the function of a seed; its arguments are float64 where JAX is set so, and numbers of rows."""
        rng = np.random.default_rng(seed)
        arrays = [rng.normal(size=(SIZE,) * int(rng.integers(1, 4))) for _ in range(3)]
        return RandomFunction(seed, (*arrays, rng.integers(0, SIZE, (SIZE, SIZE)[: int(rng.integers(1, 3))])))

    def __call__(self, *args: Any) -> Any:
        """Returns the value, and in half of the cases a step along the gradients of it in place of the arguments."""
        *arrays, rows = args
        if self.seed % 2:
            return self._value(arrays, rows)
        gradients = jax.grad(lambda arrays: self._value(arrays, rows).sum())(list(arrays))
        return [array - 0.1 * gradient for array, gradient in zip(arrays, gradients, strict=True)]

    def _value(self, arrays: Sequence[Any], rows: Any) -> Any:
        rng, pool = np.random.default_rng(self.seed), list(map(jnp.asarray, arrays))
        for _ in range(_NUM_STEPS):
            make = _STEPS[int(rng.integers(len(_STEPS)))]
            pool.append(jnp.tanh(make(rng, pool, rows)))
        return sum((array.sum() for array in pool[:-1]), 0.0) / SIZE**2 + pool[-1]


def _any(rng: np.random.Generator, pool: Sequence[Any], rank: int | None = None) -> Any:
    """Returns an array of the pool, with dimensions added or summed to have a rank."""
    array = pool[int(rng.integers(len(pool)))]
    rank = int(rng.integers(1, 4)) if rank is None else rank
    while array.ndim > rank:
        array = array.sum(int(rng.integers(array.ndim))) / SIZE**0.5
    while array.ndim < rank:
        array = jnp.expand_dims(array, int(rng.integers(array.ndim + 1)))
        array = jnp.broadcast_to(array, (SIZE,) * array.ndim)
    return array


def _product(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    equation = _PRODUCTS[int(rng.integers(len(_PRODUCTS)))]
    left, right = equation.split("->")[0].split(",")
    return jnp.einsum(equation, _any(rng, pool, len(left)), _any(rng, pool, len(right))) / SIZE**0.5


def _sum(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    array = _any(rng, pool, int(rng.integers(2, 4)))
    reduce = (jnp.sum, jnp.max, jnp.mean, jnp.cumsum)[int(rng.integers(4))]
    return reduce(array, axis=int(rng.integers(array.ndim)))


def _together(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    one, other = _any(rng, pool), _any(rng, pool)
    return one * other + jnp.where(one > 0, one, other)


def _moved(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    array = _any(rng, pool, 3)
    if rng.random() < 0.5:
        return array.transpose(rng.permutation(3))
    return jnp.concatenate([array.reshape(SIZE**2, SIZE)[: SIZE * (SIZE // 2)], array[::2].reshape(-1, SIZE)]).reshape(
        array.shape
    )


def _lookup(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    return _any(rng, pool, int(rng.integers(1, 3)))[rows[..., 0] if rows.ndim > 1 and rng.random() < 0.5 else rows]


def _scattered(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    table = _any(rng, pool, 2)
    return table.at[rows].add(_any(rng, pool, rows.ndim + 1))


def _along(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    array = _any(rng, pool, 2)
    return jnp.take_along_axis(array, jnp.broadcast_to(rows, (SIZE, SIZE)), axis=int(rng.integers(2)))


def _sliced(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    array, start = _any(rng, pool, 2), rows.ravel()[0]
    part = lax.dynamic_slice(array, (start, 0), (SIZE // 2, SIZE))
    return lax.dynamic_update_slice(array, 0.5 * part, (rows.ravel()[1], 0))


def _convolved(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    images, kernel = _any(rng, pool, 3), _any(rng, pool, 3)[..., :3]
    return lax.conv_general_dilated(images, kernel, (1,), "SAME") / SIZE


def _looped(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    start, matrices = _any(rng, pool, 2), _any(rng, pool, 3)

    def step(carry: Any, matrix: Any) -> tuple[Any, Any]:
        carry = jnp.tanh(carry @ matrix / SIZE**0.5)
        return carry, carry.sum(0)

    last, sums = lax.scan(step, start, matrices)
    return last + sums


def _attended(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    queries, keys = _any(rng, pool, 3), _any(rng, pool, 3)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", queries, keys)), keys)


def _sorted(rng: np.random.Generator, pool: Sequence[Any], rows: Any) -> Any:
    del rows
    array = _any(rng, pool, 2)
    return jnp.sort(array, axis=int(rng.integers(2))) + jnp.argmax(array, axis=0) / SIZE


_Step = Callable[[np.random.Generator, Sequence[Any], Any], Any]
_STEPS: tuple[_Step, ...] = (
    _product, _product, _product, _sum, _together, _moved, _lookup, _scattered, _along, _sliced, _convolved, _looped,
    _attended, _sorted,
)  # fmt: skip
