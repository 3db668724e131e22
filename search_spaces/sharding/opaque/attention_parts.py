"""cuDNN's attention on parts of a sequence: by which rules it is split, what that costs, what a device sends.

Beside batch and heads, queries can be split over their sequence. Keys are then split alike and go round (`ring.py`), or
each device has all of them, gathered by the plan; their gradients are then sums that the plan reduces. Either way each
device attends to what its queries see, and nothing is approximated. To split heads instead, a plan needs no rule of its
own: it moves arrays from parts of the sequence to parts of the heads, and back, by all-to-alls (Ulysses).

Source: Jacobs et al., "DeepSpeed Ulysses" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024), section
3.3.2, for whole keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.extend import core

from cost.base import AttentionWork
from search_spaces.sharding.base import Rule
from search_spaces.sharding.opaque.cudnn import FORWARD, named_rule, shapes_of, work_of_attention
from search_spaces.sharding.opaque.notation import NamedDimensions, NamedRule
from search_spaces.sharding.opaque.ring import Ring, attend, is_causal, run_backward, run_forward, sequence_dimension
from search_spaces.sharding.opaque.work import Parts
from search_spaces.sharding.own_collectives import OwnCollective
from search_spaces.sharding.spec import parts_of

_SEQUENCE = "sequence"
_SUM_BYTES = 4  # of an element of the float32 sums in which gradients go round


def sequence_rules(equation: core.JaxprEqn) -> tuple[Rule, ...]:
    """Returns the rules by which queries are split over their sequence: with keys alike, and with keys whole.

    None where a ring cannot run. It takes plain attention of as many queries as keys: without bias, dropout, lengths or
    a window, causal or not.
    """
    params, operands, results = equation.params, shapes_of(equation.invars), shapes_of(equation.outvars)
    dim = sequence_dimension(equation)
    is_plain = all(shape == (0,) for shape in operands[3:10])
    is_masked_simply = str(params["mask_type"]).rsplit(".", 1)[-1] in ("NO_MASK", "CAUSAL")
    has_one_length = operands[0][dim] == operands[1][dim]
    if not (is_plain and is_masked_simply and has_one_length) or params["dropout_rate"]:
        return ()
    if params["sliding_window_length"]:
        return ()
    rule = named_rule(equation)

    def renamed(dimensions: NamedDimensions) -> NamedDimensions:
        return tuple((_SEQUENCE,) if names in (("query",), ("key",)) else names for names in dimensions)

    ring = NamedRule(
        tuple(map(renamed, rule.operands)),
        tuple(map(renamed, rule.results)),
        rule.reduction,
        rule.whole - {"query", "key"},
    )
    of_keys = () if equation.primitive.name == FORWARD else (("query", "sum"),)
    whole_keys = replace(rule, reduction=(*rule.reduction, *of_keys), whole=rule.whole - {"query"})
    return ring.rule(operands, results), whole_keys.rule(operands, results)


def sequence_axis(equation: core.JaxprEqn, parts: Parts) -> int | None:
    """Returns the mesh axis that splits the sequence of queries; None where none does."""
    axes = parts.operands[0][sequence_dimension(equation)]
    if len(axes) > 1:
        raise ValueError("a sequence that is split over several mesh axes: a ring goes along one")
    return axes[0] if axes else None


def has_whole_keys(equation: core.JaxprEqn, parts: Parts) -> bool:
    """Returns whether each device has all keys, so that none go round."""
    return not parts.operands[1][sequence_dimension(equation)]


def work_of_parts(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct], share: float) -> AttentionWork:
    """Returns what one device does: its share of the products; in a ring all parts are read in each round."""
    dim = sequence_dimension(equation)
    whole: list[Any] = [v.aval for v in equation.invars]
    rounds = whole[1].shape[dim] // operands[1].shape[dim]
    own = work_of_attention(equation, operands, share)
    return own._replace(flops=share * work_of_attention(equation, whole, 1.0).flops, num_bytes=rounds * own.num_bytes)


def ring_collectives(equation: core.JaxprEqn, parts: Parts) -> list[OwnCollective]:
    """Returns what a device sends: keys and values beside each round but the last, and their gradients.

    Of a causal mask also what changes places before the first round and after the last one.
    """
    axis = sequence_axis(equation, parts)
    if axis is None:
        return []
    num_devices = parts.axis_sizes[axis]

    def sizes(variables: Sequence[Any], specs: Sequence[Any]) -> list[tuple[float, int]]:
        pairs = [(v.aval, parts_of(spec, parts.axis_sizes)) for v, spec in zip(variables, specs, strict=True)]
        return [(prod(x.shape) / prod(split), x.dtype.itemsize) for x, split in pairs]

    operands, results = sizes(equation.invars, parts.operands), sizes(equation.outvars, parts.results)

    def permute(num_bytes: float, count: int, *, is_beside: bool) -> OwnCollective:
        return OwnCollective("collective_permute", axis, num_bytes, count, is_beside)

    moved: list[OwnCollective] = []
    exchanged = [operands[0], *operands[10:], *(results if equation.primitive.name == FORWARD else results[:1])]
    if not has_whole_keys(equation, parts):
        moved = [permute(n * itemsize, num_devices - 1, is_beside=True) for n, itemsize in operands[1:3]]
        exchanged += operands[1:3]
        if equation.primitive.name != FORWARD:
            exchanged += results[1:3]
            for n, _ in results[1:3]:
                moved.append(permute(n * _SUM_BYTES, num_devices - 1, is_beside=True))
                moved.append(permute(n * _SUM_BYTES, 1, is_beside=False))
    if is_causal(equation):
        moved += [permute(n * itemsize / 2, 2, is_beside=False) for n, itemsize in exchanged]
    return moved


def run_attention(equation: core.JaxprEqn, operands: Sequence[Any], parts: Parts) -> list[Any]:
    """Runs attention on one device's parts, as a ring where queries and keys are split over their sequence."""
    axis = sequence_axis(equation, parts)
    whole_keys = has_whole_keys(equation, parts)
    if axis is None or (whole_keys and not is_causal(equation)):
        return attend(equation, operands)
    ring = Ring(equation, parts.axis_names[axis], parts.axis_sizes[axis], whole_keys)
    if is_causal(equation) and operands[0].shape[ring.dim] % 2:
        raise ValueError("parts of an odd length, which do not divide into the two chunks of a causal ring")
    run = run_forward if equation.primitive.name == FORWARD else run_backward
    return run(ring, operands)
