"""The arithmetic of a Pallas call that does not say it itself: its body at each place of its grid.

A causal kernel runs its loop only up to where it stands. Such bounds are made of whole numbers that depend on the place
alone, so they are computed for many places at once, and the loop counts as often as it runs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

MOST_PLACES = 4096
"""The most places of a grid that are looked at; of larger grids evenly spread ones. They take about a millisecond."""

_Numbers = Mapping[Any, np.ndarray]
"""`[places]` whole numbers, for each variable of which they are known."""
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sign": np.sign,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": lambda a: ~a if a.dtype != bool else np.logical_not(a),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int64), cases),
    "convert_element_type": lambda a: a.astype(np.int64),
    "multiple_of": lambda a: a,
}


def pallas_flops(equation: core.JaxprEqn, equation_flops: Callable[[core.JaxprEqn], float]) -> float:
    """Counts the arithmetic of a Pallas call: its own estimate, or else its body at each place of its grid."""
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    mapping = equation.params["grid_mapping"]
    grid = [n if isinstance(n, int) else 1 for n in mapping.grid]
    logical_grid = [n for axis, n in enumerate(grid) if axis not in mapping.vmapped_dims]
    jaxpr = equation.params["jaxpr"]
    asked_axes = sorted({axis for axis in _asked_axes(jaxpr) if axis < len(logical_grid)})
    count = _Count(_places(logical_grid, asked_axes), logical_grid, equation_flops)
    return float(np.mean(count(jaxpr, {}))) * math.prod(grid)


def _places(grid: Sequence[int], axes: Sequence[int]) -> dict[int, np.ndarray]:
    """Returns `[places]` the position along each of some axes, of all places or of evenly spread ones."""
    sizes = [grid[axis] for axis in axes]
    total = math.prod(sizes)
    chosen = np.arange(total) if total <= MOST_PLACES else np.linspace(0, total - 1, MOST_PLACES).astype(np.int64)
    positions = np.unravel_index(chosen, sizes) if sizes else ()
    return {-1: chosen, **dict(zip(axes, positions, strict=True))}


def _asked_axes(jaxpr: Any) -> Iterator[int]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "program_id":
            yield equation.params["axis"]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                    yield from _asked_axes(inner)


class _Count:
    """The arithmetic of a body at some places of the grid.

    Args:
      places: `[places]` the position along each axis of which the body asks.
      equation_flops: counts equations without bodies.
    """

    def __init__(
        self,
        places: Mapping[int, np.ndarray],
        grid: Sequence[int],
        equation_flops: Callable[[core.JaxprEqn], float],
    ):
        self.places, self.grid, self.equation_flops = places, grid, equation_flops
        self.num_places = len(places[-1])

    def __call__(self, jaxpr: Any, known: _Numbers) -> np.ndarray:
        """Returns `[places]` the arithmetic of a jaxpr, given the numbers that are known of its invars."""
        return self._run(jaxpr, known)[0]

    def _run(self, jaxpr: Any, known: _Numbers) -> tuple[np.ndarray, _Numbers]:
        """Returns `[places]` the arithmetic of a jaxpr, and the whole numbers that are known at its end."""
        numbers, flops = dict(known), np.zeros(self.num_places)
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name, params = equation.primitive.name, equation.params
            values = [self._value(v, numbers) for v in equation.invars]
            result = None
            if name == "program_id" and params["axis"] in self.places:
                result = self.places[params["axis"]]
            elif name == "num_programs":
                result = np.full(self.num_places, self.grid[params["axis"]])
            elif name in _ARITHMETIC and not getattr(equation.outvars[0].aval, "shape", None):
                if all(value is not None for value in values):
                    result = _ARITHMETIC[name](*values)
            elif name in _CALLS:
                body = params.get("jaxpr", params.get("call_jaxpr"))
                added, inside = self._run(body, self._bound(body, values))
                flops = flops + added
                for var, out in zip(equation.outvars, _open(body).outvars, strict=True):
                    value = self._value(out, inside)
                    if value is not None:
                        numbers[var] = value
            else:
                flops = flops + self._of_equation(equation, values)
            if result is not None:
                numbers[equation.outvars[0]] = np.asarray(result)
        return flops, numbers

    def _of_equation(self, equation: core.JaxprEqn, values: Sequence[np.ndarray | None]) -> np.ndarray | float:
        name, params = equation.primitive.name, equation.params
        if name == "while":
            return self._trips(equation, values) * self(params["body_jaxpr"], {})
        if name == "scan":
            return params["length"] * self(params["jaxpr"], {})
        if name == "cond":
            branches = [self(b, self._bound(b, values[1:])) for b in params["branches"]]
            if values[0] is None:
                return np.max(branches, axis=0)
            return np.choose(np.clip(values[0].astype(np.int64), 0, len(branches) - 1), branches)
        if name == "run_scoped":
            return self(params["jaxpr"], {})
        return self.equation_flops(equation)

    def _trips(self, equation: core.JaxprEqn, values: Sequence[np.ndarray | None]) -> np.ndarray | float:
        """Returns how often a loop runs that counts up by one to a bound; 1 for every other loop."""
        params = equation.params
        condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        carried = values[params["cond_nconsts"] + params["body_nconsts"] :]
        inside = list(condition.invars[params["cond_nconsts"] :])
        if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
            return 1.0
        counter, bound = condition.eqns[0].invars
        if isinstance(counter, core.Literal) or counter not in inside:
            return 1.0
        place = inside.index(counter)
        first = carried[place]
        last = self._value(bound, {}) if isinstance(bound, core.Literal) else None
        if not isinstance(bound, core.Literal) and bound in inside:
            last = carried[inside.index(bound)]
        step = next((e for e in body.eqns if e.outvars[0] is body.outvars[place]), None)
        counts_up = step is not None and step.primitive.name == "add" and _is_one(step.invars[1])
        if first is None or last is None or not counts_up:
            return 1.0
        return np.maximum(last - first, 0)

    def _value(self, var: Any, numbers: _Numbers) -> np.ndarray | None:
        if isinstance(var, core.Literal):
            return np.full(self.num_places, var.val) if np.ndim(var.val) == 0 and _is_whole(var.val) else None
        return numbers.get(var)

    @staticmethod
    def _bound(jaxpr: Any, values: Sequence[np.ndarray | None]) -> dict[Any, np.ndarray]:
        return {v: x for v, x in zip(_open(jaxpr).invars, values, strict=True) if x is not None}


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_whole(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "iub"


def _is_one(var: Any) -> bool:
    return isinstance(var, core.Literal) and np.ndim(var.val) == 0 and var.val == 1
