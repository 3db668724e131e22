"""An objective as a JAX function of a choice's amounts, with its price and its tangents in float64."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import FORBIDDEN, Problem, load_groups
from cost.quantities import Quantities, Quantity, amounts_of

CostFunction = Callable[[dict[str, jax.Array]], jax.Array]
"""A differentiable function from amounts, by the names of the quantities, to a scalar."""


class Objective(NamedTuple):
    """A cost that is not a sum: a function of quantities, which is added to the cost of a problem.

    Attributes:
      function: takes the amounts of a choice or of a mixture by the names of `quantities`, float64 arrays of their
        shapes, and returns a scalar below 1e18. JAX differentiates it.
      quantities: what the function reads.
      convex_below: a convex function that is nowhere above `function`, from which the lower bound is taken; None where
        `function` is convex itself. A sum of maxima of sums with weights that are not negative is convex.
      name: for errors.
    """

    function: CostFunction
    quantities: Quantities
    convex_below: CostFunction | None = None
    name: str = "objective"


class Affine(NamedTuple):
    """An affine function of amounts: `constant + <gradient, amounts>`.

    Attributes:
      constant: its value where all amounts are zero.
      gradient: `[N]`, in the order of `PricedObjective.flat`.
    """

    constant: float
    gradient: np.ndarray

    def at(self, amounts: np.ndarray) -> np.ndarray:
        """Returns its values at amounts `[N]` or `[K, N]`."""
        return self.constant + amounts @ self.gradient


class Tangent(NamedTuple):
    """The tangent of a function at some amounts.

    Attributes:
      value: of the function there.
      affine: touches the function there.
    """

    value: float
    affine: Affine


class PricedObjective:
    """An objective on one problem: amounts of choices as flat vectors `[N]`, prices and tangents.

    Args:
      objective: the function and its quantities.
      problem: whose choices are priced.

    Raises:
      TypeError, ValueError: the function does not return a scalar, or reads a quantity that does not exist.
    """

    def __init__(self, objective: Objective, problem: Problem):
        self.objective, self._problem = objective, problem
        self._shapes = {name: quantity.shape for name, quantity in objective.quantities.items()}
        for function in (objective.function, objective.convex_below):
            if function is not None:
                _check(function, self._shapes, objective.name)

    @property
    def size(self) -> int:
        """N, the number of amounts."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def amounts(self, choice: np.ndarray) -> np.ndarray:
        """Returns the amounts of a choice, `[N]`."""
        return self.flat(amounts_of(self.objective.quantities, self._problem, choice))

    def flat(self, amounts: dict[str, np.ndarray]) -> np.ndarray:
        """Returns amounts as one vector `[N]`, or as `[S, N]` where each has an axis of S in front."""
        parts = []
        for name, shape in self._shapes.items():
            before = np.shape(amounts[name])[: np.ndim(amounts[name]) - len(shape)]
            parts.append(np.reshape(amounts[name], (*before, math.prod(shape))))
        return np.concatenate(parts, axis=-1)

    def by_name(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Returns vectors `[..., N]` as arrays by the names of quantities."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()])
        parts = zip(self._shapes.items(), np.split(flat, ends[:-1], axis=-1), strict=True)
        return {name: part.reshape((*flat.shape[:-1], *shape)) for (name, shape), part in parts}

    def price(self, amounts: np.ndarray) -> float:
        """Returns the objective at amounts `[N]`.

        Raises:
          ValueError: it is not finite.
        """
        return self.tangent(amounts).value

    def check_size(self, amounts: np.ndarray) -> None:
        """Raises `ValueError` where the objective at amounts `[N]` is no cost: tangents would forbid everything."""
        value = self.price(amounts)
        if abs(value) >= FORBIDDEN:
            raise ValueError(
                f"`{self.objective.name}` is {value:.2g} at the first plan; it must stay between -1e18 and 1e18: "
                "divide it by a number."
            )

    def prices(self, amounts: np.ndarray) -> np.ndarray:
        """Returns the objective at many amounts `[K, N]`, `[K]`; what is not finite there is infinite."""
        if not len(amounts):
            return np.zeros(0)
        padded = np.concatenate([amounts, np.repeat(amounts[-1:], _padding(len(amounts)), axis=0)])
        with jax.enable_x64(True):
            values = np.asarray(_compiled_batch(self.objective.function)(self.by_name(padded)))[: len(amounts)]
        return np.where(np.isfinite(values), values, np.inf)

    def tangent(self, amounts: np.ndarray) -> Tangent:
        """Returns the tangent of the objective at amounts `[N]`; raises as `price`."""
        return self._tangent(self.objective.function, amounts)

    def tangent_below(self, amounts: np.ndarray) -> Tangent:
        """Returns the tangent of the convex function from which bounds are taken; raises as `price`."""
        return self._tangent(self.objective.convex_below or self.objective.function, amounts)

    def _tangent(self, function: CostFunction, amounts: np.ndarray) -> Tangent:
        with jax.enable_x64(True):
            value, gradient = _compiled(function)(self.by_name(amounts))
            value, flat = float(value), self.flat({name: np.asarray(part) for name, part in gradient.items()})
        if not (math.isfinite(value) and np.isfinite(flat).all()):
            what = "value" if not math.isfinite(value) else "gradient"
            names = [name for name, part in gradient.items() if not np.isfinite(np.asarray(part)).all()]
            where = f" with respect to {', '.join(map(repr, names))}" if names and what == "gradient" else ""
            raise ValueError(
                f"`{self.objective.name}` must be finite at every mixture of choices, but its {what}{where} is "
                f"{value if what == 'value' else 'not finite'}. Amounts may be zero: guard divisions, logs and roots."
            )
        return Tangent(value, Affine(value - float(flat @ amounts), flat))


@functools.lru_cache(maxsize=64)
def _compiled(function: CostFunction) -> Callable[..., Any]:
    """Returns the jitted value and gradient of a function, one for all searches with it."""
    return jax.jit(jax.value_and_grad(function))


@functools.lru_cache(maxsize=64)
def _compiled_batch(function: CostFunction) -> Callable[..., Any]:
    """Returns the jitted function of many amounts."""
    return jax.jit(jax.vmap(function))


def _padding(number: int) -> int:
    """Returns how many rows make the next power of four, at least 64, so that few shapes are compiled."""
    size = 64
    while size < number:
        size *= 4
    return size - number


def _check(function: CostFunction, shapes: dict[str, tuple[int, ...]], name: str) -> None:
    with jax.enable_x64(True):
        amounts = {key: jax.ShapeDtypeStruct(shape, jnp.float64) for key, shape in shapes.items()}
        try:
            result = jax.eval_shape(function, amounts)
        except KeyError as error:
            raise ValueError(f"`{name}` reads {error}, which is no quantity; there are {', '.join(shapes)}.") from None
        except TypeError as error:  # what JAX says of other results and of operations that are not JAX's
            raise TypeError(f"`{name}` must be a function of JAX that returns a floating scalar: {error}") from None
    if not hasattr(result, "shape") or result.shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
        found = f"{result.dtype}{list(result.shape)}" if hasattr(result, "shape") else type(result).__name__
        raise TypeError(f"`{name}` must return a floating scalar, but it returns {found}.")


_LOADS = "loads of the problem"


def split_loads(problem: Problem, objective: Objective | None = None) -> tuple[Problem, Objective]:
    """Returns a problem without its loads, and the sum of their groups' largest ones as an objective."""
    groups = tuple(tuple(group.tolist()) for group in load_groups(problem))
    loads = Quantity(problem.load, problem.edge_load)
    rest = problem._replace(load=(), edge_load=(), load_group=())
    if objective is None:
        return rest, Objective(_largest(groups), {_LOADS: loads}, name="loads")
    below = None if objective.convex_below is None else _largest(groups, objective.convex_below)
    function = _largest(groups, objective.function)
    return rest, Objective(function, {**objective.quantities, _LOADS: loads}, below, objective.name)


@functools.lru_cache(maxsize=64)
def _largest(groups: tuple[tuple[int, ...], ...], more: CostFunction | None = None) -> CostFunction:
    """Returns the sum of the groups' largest loads, and of another function; equal ones are compiled once."""

    def cost(amounts: dict[str, jax.Array]) -> jax.Array:
        loads = amounts[_LOADS]
        largest = sum((jnp.max(loads[jnp.array(group)]) for group in groups), start=jnp.zeros((), loads.dtype))
        if more is None:
            return largest
        return largest + more({name: amount for name, amount in amounts.items() if name != _LOADS})

    return cost
