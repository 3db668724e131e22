"""Sharding rules of jaxpr equations, as Shardy gives them.

With `diffshard/checks/explicit_collectives.py` the only file that touches `jaxlib.mlir`.

An equation is lowered to StableHLO, Shardy's `sdy-populate-op-sharding-rules` writes a rule on every operation, and the
rules of one equation's operations are composed by equating the factors of the values between them. Only what Shardy
cannot see is written by hand: `rules.py`.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from search_spaces.replay import abstract_argument, bind
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls.operations import CUSTOM_CALLS
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.rules import (
    Factors,
    Mark,
    exceptional_rule,
    is_higher_order,
    reduction_adds,
    rule_from_factors,
    shapes_of,
    with_window_halos,
)

_RULES_PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
PLATFORMS = ("tpu", "cuda", "cpu")
"""Platforms for which equations are lowered to see what they are made of, the first one first.

Random bits are a loop on CPU and a custom call on GPU; only the TPU lowering is made of operations that have rules.
"""
_CACHE_SIZE = 16384
_cache: OrderedDict[Hashable, Rule | None] = OrderedDict()


def operation_rules(equations: Sequence[JaxprEqn]) -> list[Rule | None]:
    """Returns the sharding rule of each equation, or None where there is none (replicate its operands and results).

    Higher-order equations (loops, calls, conditionals, custom derivatives, remat, shard_map) and equations with effects
    have none. Equal equations are looked up once, all new ones are lowered in a single module, and the newest
    16,384 rules are kept for later calls, but for custom calls and higher-order equations.

    Returns:
      One entry for each equation. `rule.operands` follows `equation.invars`, literals included.
    """
    keys = [signature_of(equation) for equation in equations]
    missing = {key: equation for key, equation in zip(keys, equations, strict=True) if key not in _cache}
    new_rules = dict(zip(missing, _new_rules(list(missing.values())), strict=True))
    rules = [new_rules[key] if key in new_rules else _cache[key] for key in keys]
    _cache.update((key, rule) for key, rule in new_rules.items() if _is_kept(missing[key]))
    while len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return rules


def _is_kept(equation: JaxprEqn) -> bool:
    """Returns whether a rule is cached: not where parameters hold a user's functions, and so arrays of closures."""
    return equation.primitive.name not in CUSTOM_CALLS and not is_higher_order(equation)


def signature_of(equation: JaxprEqn) -> Hashable:
    """Returns a key that equations share that compute the same: the primitive, its parameters, shapes and types."""
    avals = [[v.aval for v in variables] for variables in (equation.invars, equation.outvars)]
    types = tuple(tuple((getattr(x, "shape", None), str(getattr(x, "dtype", x))) for x in own) for own in avals)
    params = tuple((name, _hashable(value)) for name, value in equation.params.items())
    return equation.primitive.name, types, params


def _hashable(value: Any) -> Hashable:
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return str(value)  # equal jaxprs of two traces are different objects
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # may hold jaxprs, as a Pallas call's grid does
        return type(value).__name__, tuple(
            _hashable(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare
        )
    if isinstance(value, tuple | list):
        return tuple(_hashable(entry) for entry in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _new_rules(equations: list[JaxprEqn]) -> list[Rule | None]:
    rules: list[Rule | None] = [None] * len(equations)
    remaining = []
    for index, equation in enumerate(equations):
        if is_higher_order(equation) or equation.effects:
            continue
        custom_call = CUSTOM_CALLS.get(equation.primitive.name)
        rules[index] = exceptional_rule(equation) if custom_call is None else custom_call.rule(equation)
        if rules[index] is None and custom_call is None:
            remaining.append(index)
    for platform in PLATFORMS:
        lowered_rules = _lowered_rules([equations[index] for index in remaining], platform)
        for index, rule in zip(remaining, lowered_rules, strict=True):
            rules[index] = rule
        remaining = [index for index in remaining if rules[index] is None]
    return rules


def _lowered_rules(equations: list[JaxprEqn], platform: str) -> list[Rule | None]:
    """Returns the rules of all equations from one module; halves the list where something cannot be lowered."""
    if not equations:
        return []
    try:
        return _rules_of_module(equations, platform)
    except Exception:  # whatever a foreign primitive's lowering raises: it has no rule
        if len(equations) == 1:
            return [None]
    half = len(equations) // 2
    return _lowered_rules(equations[:half], platform) + _lowered_rules(equations[half:], platform)


def _rules_of_module(equations: list[JaxprEqn], platform: str) -> list[Rule | None]:
    functions = [_as_function(equation, f"equation_{index}") for index, equation in enumerate(equations)]
    arguments = [[abstract_argument(v.aval) for v in equation.invars] for equation in equations]

    def all_equations(*arguments):
        return [function(*args) for function, args in zip(functions, arguments, strict=True)]

    module: Any = (
        jax.jit(all_equations, keep_unused=True)
        .trace(*arguments)
        .lower(lowering_platforms=(platform,))
        .compiler_ir("stablehlo")
    )
    with module.context:
        PassManager.parse(_RULES_PASS).run(module.operation)
    composer = _Composer(module)
    rules: list[Rule | None] = []
    for index, equation in enumerate(equations):
        # Random keys have a trailing dimension in StableHLO that they do not have in a jaxpr.
        factors, operands, results = composer.compose(f"equation_{index}")
        operands = [dims[: len(shape)] for dims, shape in zip(operands, shapes_of(equation.invars), strict=True)]
        results = [dims[: len(shape)] for dims, shape in zip(results, shapes_of(equation.outvars), strict=True)]
        rule = rule_from_factors(factors, operands, results, reduction_is_sum=reduction_adds(equation))
        rules.append(with_window_halos(equation, rule))
    return rules


def _as_function(equation: JaxprEqn, name: str) -> Callable:
    def call(*args):
        with equation.ctx.manager:
            return bind(equation, args)

    call.__name__ = name
    return jax.jit(call, keep_unused=True)


_Dims = list[list[int]]  # of one array: for each dimension its factors, major to minor


class _Composer:
    """Composes the rules of a function's operations into one for the whole function, calls included."""

    def __init__(self, module: Any) -> None:
        self._functions = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
        self._rules: dict[str, Rule] = {}

    def compose(self, name: str) -> tuple[Factors, list[_Dims], list[_Dims]]:
        """Returns the factors of a function's arguments and results."""
        factors = Factors()
        block = self._functions[name].regions[0].blocks[0]
        dims: dict[Any, _Dims] = {arg: [[factors.new(n)] for n in _shape(arg.type)] for arg in block.arguments}
        arguments = list(dims.values())
        reaches_return: dict[Any, bool] = {}
        for op in block.operations:
            operation = op.operation
            if operation.name == "func.return":
                return factors, arguments, [dims[value] for value in operation.operands]
            rule = self._operation_rule(operation)
            partial = bool(rule.reduction) and _may_stay_partial(operation, reaches_return)
            self._apply(rule, operation, Mark.REDUCTION if partial else Mark.NEED_REPLICATION, factors, dims)
        raise ValueError(f"`{name}` has no return.")

    @staticmethod
    def _apply(rule: Rule, operation: Any, reduction: Mark, factors: Factors, dims: dict[Any, _Dims]) -> None:
        marks = dict.fromkeys(range(len(rule.sizes)), Mark.NONE)
        for members, mark in (
            (rule.reduction, reduction),
            (rule.need_replication, Mark.NEED_REPLICATION),
            (rule.permutation, Mark.PERMUTATION),
            (rule.blocked_propagation, Mark.BLOCKED_PROPAGATION),
        ):
            for member in members:
                marks[member] |= mark
        rule_factors = [factors.new(size, marks[index]) for index, size in enumerate(rule.sizes)]
        for value, array in zip(operation.operands, rule.operands, strict=True):
            for size, value_factors, dimension in zip(_shape(value.type), dims[value], array, strict=True):
                factors.equate(value_factors, [rule_factors[index] for index in dimension])
                # A convolution's rule gives the window's dimensions factors of size one: they stay whole.
                if math.prod(rule.sizes[index] for index in dimension) < size:
                    factors.mark(value_factors, Mark.NEED_REPLICATION)
        for value, array in zip(operation.results, rule.results, strict=True):
            dims[value] = [[rule_factors[index] for index in dimension] for dimension in array]

    def _operation_rule(self, operation: Any) -> Rule:
        if "sdy.sharding_rule" in operation.attributes:
            return _rule_from_attribute(sdy.OpShardingRuleAttr(operation.attributes["sdy.sharding_rule"]))
        if operation.name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            if callee not in self._rules:
                self._rules[callee] = rule_from_factors(*self.compose(callee))
            return self._rules[callee]
        return _rule_without_shardy(operation)


def _rule_from_attribute(attribute: Any) -> Rule:
    def arrays(mappings: Any) -> tuple:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(array).dim_mappings)
            for array in mappings
        )

    return Rule(
        operands=arrays(attribute.operand_mappings),
        results=arrays(attribute.result_mappings),
        sizes=tuple(attribute.factor_sizes),
        reduction=frozenset(attribute.reduction_factors),
        need_replication=frozenset(attribute.need_replication_factors),
        permutation=frozenset(attribute.permutation_factors),
        blocked_propagation=frozenset(attribute.blocked_propagation_factors),
    )


def _rule_without_shardy(operation: Any) -> Rule:
    """Returns a rule by name: constants and iotas are free, CHLO is elementwise but for `top_k`, the rest is whole."""
    factors = Factors()
    operands = [_shape(value.type) for value in operation.operands]
    results = [_shape(value.type) for value in operation.results]
    if operation.name == "stablehlo.custom_call":
        raise ValueError("nothing is known of the dimensions of a custom call")
    if operation.name == "stablehlo.optimization_barrier":
        shared_factors = [[[factors.new(n)] for n in shape] for shape in operands]
        return rule_from_factors(factors, shared_factors, shared_factors)
    is_chlo = operation.name.startswith("chlo.")
    if operation.name == "chlo.top_k":
        *batch, _ = operands[0]
        shared_factors = [[factors.new(n)] for n in batch]
        last = [factors.new(operands[0][-1], Mark.NEED_REPLICATION)]
        return rule_from_factors(factors, [[*shared_factors, last]], [[*shared_factors, last] for _ in results])
    if is_chlo and len({*operands, *results}) == 1:
        shared_factors = [[factors.new(n)] for n in results[0]]
        return rule_from_factors(factors, [shared_factors for _ in operands], [shared_factors for _ in results])
    mark = Mark.NEED_REPLICATION if operands else Mark.NONE
    fresh = [[[factors.new(n, mark)] for n in shape] for shape in (*operands, *results)]
    return rule_from_factors(factors, fresh[: len(operands)], fresh[len(operands) :])


def _may_stay_partial(operation: Any, reaches_return: dict[Any, bool]) -> bool:
    """Returns whether all partial results of an operation reach the function's end, and keep their shape on the way.

    A reduction that is used up inside (a mean that is subtracted, an index found by comparing values) would need its
    own all-reduce in between, which a rule cannot say.
    """
    return all(_reaches_return(value, reaches_return) for value in operation.results)


def _reaches_return(value: Any, memo: dict[Any, bool]) -> bool:
    if value not in memo:
        owners = [use.owner.operation for use in value.uses]
        memo[value] = bool(owners) and all(
            owner.name == "func.return"
            or (
                len(owner.results) == 1
                and _num_elements(owner.results[0]) == _num_elements(value)
                and _reaches_return(owner.results[0], memo)
            )
            for owner in owners
        )
    return memo[value]


def _num_elements(value: Any) -> int:
    return math.prod(_shape(value.type))


def _shape(type_: Any) -> tuple[int, ...]:
    return tuple(type_.shape) if isinstance(type_, ir.ShapedType) and type_.has_rank else ()


def rules_of(graph: Graph) -> list[Rule | None]:
    """Returns for each vertex its rule; None for arguments, loops' borders, and operations that have none."""
    operations = list(graph.operations())
    rules: list[Rule | None] = [None] * len(graph.vertices)
    equations = [v.equation for v in operations if v.equation is not None]
    for vertex, rule in zip(operations, operation_rules(equations), strict=True):
        rules[vertex.index] = rule
    return rules
