"""Which dimension of each array goes over the layers of a scan, and which operations can run on a part of the layers.

The sharding rules of operations say which dimensions belong together. From the stacked operands and results of a scan
the layers are followed through the whole program, in both directions: to the scan of the backward pass, which reads
what the forward scan stacks, to the weights and to an optimiser's moments.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.pipelines.step_parts import is_transposed
from search_spaces.replay import REMAT, abstract_argument, bind, scan_operands
from search_spaces.sharding.base import Rule
from search_spaces.sharding.shardy import operation_rules

COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("reduce_sum", "dot_general"), lax.add),
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
"""How the results of parts are put together by operations that reduce the layers."""


class PartedOperation(NamedTuple):
    """An operation that runs on parts of the layers.

    Attributes:
      operands: for each operand which of its dimensions goes over the layers; None if it has none.
      results: the same of each result; one that has none is put together from its parts.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


@dataclass
class LayerFlow:
    """How the layers of a scan flow through a program.

    Attributes:
      length: L, the number of layers.
      scans: indices of the equations that are scans over these layers.
      operations: by index, the equations that run on parts of the layers.
      arguments: for each argument that is divided its dimension over the layers, by position.
      in_parts: of all variables that are made in parts their dimension over the layers.
    """

    length: int
    scans: set[int]
    operations: dict[int, PartedOperation] = field(default_factory=dict)
    arguments: dict[int, int] = field(default_factory=dict)
    in_parts: dict[core.Var, int] = field(default_factory=dict)

    def regions_of_all_layers(self, jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
        """Returns the rematerialised regions that read all layers at once, so that they cannot run in parts."""
        return [e for e in jaxpr.eqns if e.primitive.name in REMAT and any(v in self.in_parts for v in _variables(e))]


def layer_flow(program: core.ClosedJaxpr, scan: int, whole_arguments: Collection[int]) -> LayerFlow:
    """Follows the layers of a scan through a program.

    Args:
      program: without calls.
      whole_arguments: positions of arguments that are not to be divided, such as the batch. Those that the forward pass
        needs whole are not divided either.
    """
    tracer = _Tracer(program.jaxpr, scan)
    tracer.follow()
    whole = set(whole_arguments)
    while True:
        flow, needed_whole = tracer.flow(whole)
        if needed_whole <= whole:
            return flow
        whole |= needed_whole


class _Tracer:
    def __init__(self, jaxpr: core.Jaxpr, scan: int):
        self.jaxpr, self.rules = jaxpr, operation_rules(jaxpr.eqns)
        self.length: int = jaxpr.eqns[scan].params["length"]
        self.scans = {scan}
        self.dims: dict[core.Var, int] = {}  # of everything that has the layers as a dimension
        self.fits: dict[tuple[int, PartedOperation], bool] = {}

    def follow(self) -> None:
        """Finds everything that has the layers as a dimension, and the scans over them."""
        num_found = -1
        while num_found != len(self.dims) + len(self.scans):
            num_found = len(self.dims) + len(self.scans)
            for index in (*range(len(self.jaxpr.eqns)), *reversed(range(len(self.jaxpr.eqns)))):
                equation = self.jaxpr.eqns[index]
                if equation.primitive.name == "scan":
                    self._follow_scan(index, equation)
                elif (operation := self.operation(index, self.dims)) is not None:
                    for variable, dim in _dims_of(equation, operation):
                        self.dims.setdefault(variable, dim)

    def _follow_scan(self, index: int, equation: core.JaxprEqn) -> None:
        if equation.params["length"] != self.length:
            return
        stacked = stacked_of(equation)
        if index in self.scans or any(self.dims.get(v) == 0 for v in stacked):
            self.scans.add(index)
            for variable in stacked:
                self.dims.setdefault(variable, 0)

    def operation(self, index: int, dims: dict[core.Var, int]) -> PartedOperation | None:
        """Returns how an operation runs on parts of the layers, where some of its arrays have them; None if not."""
        equation, rule = self.jaxpr.eqns[index], self.rules[index]
        if rule is None:
            return None
        arrays = zip((*equation.invars, *equation.outvars), (*rule.operands, *rule.results), strict=True)
        factors = [array[dims[v]] for v, array in arrays if isinstance(v, core.Var) and v in dims]
        for dimension in dict.fromkeys(factors):
            operation = _operation_on(equation, rule, dimension, self.length)
            if operation is None:
                continue
            if (index, operation) not in self.fits:
                self.fits[index, operation] = _runs_on_part(equation, operation)
            if self.fits[index, operation]:
                return operation
        return None

    def flow(self, whole_arguments: Collection[int]) -> tuple[LayerFlow, set[int]]:
        """Returns the steps that run in parts if some arguments stay whole, and the arguments that must."""
        flow = LayerFlow(self.length, self.scans)
        origins: dict[core.Var, frozenset[int]] = {}  # the arguments that something is made of, part by part
        backward: set[core.Var] = set()
        needed_whole: set[int] = set()
        for position, variable in enumerate(self.jaxpr.invars):
            is_number = jnp.issubdtype(variable.aval.dtype, jnp.number)  # type: ignore[attr-defined]
            if variable in self.dims and position not in whole_arguments and is_number:
                flow.arguments[position] = flow.in_parts[variable] = self.dims[variable]
                origins[variable] = frozenset((position,))
        for index, equation in enumerate(self.jaxpr.eqns):
            operands = _variables(equation)
            is_backward = is_transposed(equation) or any(v in backward for v in operands)
            if is_backward:
                backward.update(equation.outvars)
            wanted: Sequence[int | None] = [None] * len(equation.invars)
            if index in self.scans:
                num_slices = len(scan_operands(equation, equation.invars).slices)
                wanted = [*wanted[num_slices:], *([0] * num_slices)]
                flow.in_parts.update((v, 0) for v in stacked_of(equation) if v in equation.outvars)
            elif (operation := self._operation_in_parts(index, flow)) is not None:
                flow.operations[index], wanted = operation, operation.operands
                made_of = frozenset().union(*(origins.get(v, frozenset()) for v in operands))
                for variable, dim in zip(equation.outvars, operation.results, strict=True):
                    if dim is not None:
                        flow.in_parts[variable], origins[variable] = dim, made_of
            for operand, dim in zip(equation.invars, wanted, strict=True):
                if isinstance(operand, core.Var) and flow.in_parts.get(operand, dim) != dim and not is_backward:
                    needed_whole |= origins.get(operand, frozenset())
        return flow, needed_whole

    def _operation_in_parts(self, index: int, flow: LayerFlow) -> PartedOperation | None:
        """Returns how an operation runs in parts if it reads parts or makes them of a number; None if it is whole."""
        equation = self.jaxpr.eqns[index]
        operands = {v: flow.in_parts[v] for v in _variables(equation) if v in flow.in_parts}
        if not operands and equation.primitive.name == "broadcast_in_dim":
            operands = {v: self.dims[v] for v in equation.outvars if v in self.dims}
        return self.operation(index, operands) if operands else None


def stacked_of(equation: core.JaxprEqn) -> list[core.Var]:
    """Returns the variables that a scan reads slice by slice, and those that it stacks."""
    body = equation.params["jaxpr"].jaxpr
    slices = scan_operands(equation, equation.invars).slices
    pairs = zip(equation.outvars, body.outvars, strict=True)
    return [
        *(v for v in slices if isinstance(v, core.Var)),
        *(outer for outer, inner in pairs if len(outer.aval.shape) > len(inner.aval.shape)),  # type: ignore[attr-defined]
    ]


def part_parameters(equation: core.JaxprEqn, operation: PartedOperation, size: int) -> dict[str, Any]:
    """Returns the parameters of an operation that differ on a part of the layers.

    Args:
      size: the number of layers of the part.
    """
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        return {"shape": _resized(params["shape"], operation.results[0], size)}
    if name == "reshape":
        return {"new_sizes": _resized(params["new_sizes"], operation.results[0], size)}
    if name == "slice":
        return {"limit_indices": _resized(params["limit_indices"], operation.operands[0], size)}
    if name == "dynamic_slice":
        return {"slice_sizes": _resized(params["slice_sizes"], operation.operands[0], size)}
    return {}


def _variables(equation: core.JaxprEqn) -> list[core.Var]:
    """Returns the operands of an equation that are variables."""
    return [v for v in equation.invars if isinstance(v, core.Var)]


def _resized(shape: Sequence[int], dim: int | None, size: int) -> tuple[int, ...]:
    return tuple(size if d == dim else n for d, n in enumerate(shape))


def _dims_of(equation: core.JaxprEqn, operation: PartedOperation) -> list[tuple[core.Var, int]]:
    arrays = zip((*equation.invars, *equation.outvars), (*operation.operands, *operation.results), strict=True)
    return [(v, dim) for v, dim in arrays if isinstance(v, core.Var) and dim is not None]


def _operation_on(
    equation: core.JaxprEqn, rule: Rule, dimension: tuple[int, ...], length: int
) -> PartedOperation | None:
    """Returns how an operation runs on parts of a dimension, given by its factors; None if its rule does not tell."""
    if len(dimension) != 1:
        return None
    (factor,) = dimension
    if factor in rule.need_replication or factor in rule.permutation or rule.sizes[factor] != length:
        return None
    arrays = (*rule.operands, *rule.results)
    if any(factor in dim and dim != dimension for array in arrays for dim in array):
        return None
    dims = [array.index(dimension) if dimension in array else None for array in arrays]
    operation = PartedOperation(tuple(dims[: len(rule.operands)]), tuple(dims[len(rule.operands) :]))
    variables = (*equation.invars, *equation.outvars)
    if any(
        dim is not None and abstract_argument(v.aval).shape[dim] != length
        for v, dim in zip(variables, dims, strict=True)
    ):
        return None
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    if all(dim is None for dim in operation.operands) and not is_broadcast:
        return None
    is_reduced = any(dim is None for dim in operation.results)
    return None if is_reduced and equation.primitive.name not in COMBINATIONS else operation


def _runs_on_part(equation: core.JaxprEqn, operation: PartedOperation) -> bool:
    """Returns whether an operation can be bound for a part of the layers, with results of the right shapes."""

    def part(variable: Any, dim: int | None) -> Any:
        shape = abstract_argument(variable.aval)
        return jax.ShapeDtypeStruct(_resized(shape.shape, dim, 1), shape.dtype, weak_type=shape.weak_type)

    operands = [part(v, dim) for v, dim in zip(equation.invars, operation.operands, strict=True)]
    wanted = [part(v, dim).shape for v, dim in zip(equation.outvars, operation.results, strict=True)]
    try:
        found = jax.eval_shape(lambda *x: bind(equation, x, **part_parameters(equation, operation, 1)), *operands)
    except (TypeError, ValueError):  # of an operation whose other parameters depend on the number of layers
        return False
    return [x.shape for x in found] == wanted
