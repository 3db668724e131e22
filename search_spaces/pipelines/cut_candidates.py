"""Where the forward pass of a micro-batch can be cut: before an equation, or between trips of a scan over layers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from cost.compute import equation_flops
from search_spaces.pipelines.forward_backward import num_bytes, places
from search_spaces.pipelines.layer_flow import stacked_of
from search_spaces.pipelines.step_parts import StepParts, parameters_of
from search_spaces.replay import scan_operands


class Cut(NamedTuple):
    """Where a stage begins.

    Attributes:
      equation: the index of an equation of `StepParts.each`.
      trip: of a scan, 1 to L - 1; 0 for a stage that begins with the whole equation.
    """

    equation: int
    trip: int = 0


class CutCandidate(NamedTuple):
    """A place at which the forward pass can be cut.

    Attributes:
      cut: the place.
      bytes_sent: by the earlier stage in each micro-batch: activations that later equations of the forward pass read.
      flops_before: arithmetic operations of the forward pass before it, of a micro-batch.
    """

    cut: Cut
    bytes_sent: int
    flops_before: float


def cut_candidates(parts: StepParts) -> list[CutCandidate]:
    """Returns all places at which the forward pass can be cut, in order; the first equation is none."""
    jaxpr = parts.each.program.jaxpr
    forward = [i for i, place in enumerate(places(jaxpr, parameters_of(parts))) if place.direction == "forward"]
    last_read = {v: i for i in forward for v in jaxpr.eqns[i].invars if isinstance(v, core.Var)}
    stacked = _of_parameters_alone(parts)
    live: dict[core.Var, int] = {}
    candidates, flops = [], 0.0
    for index in forward:
        equation = jaxpr.eqns[index]
        if index != forward[0]:
            candidates.append(CutCandidate(Cut(index), sum(live.values()), flops))
        equation_total = equation_flops(equation)
        if is_scan_over_layers(equation, stacked):
            candidates += _between_trips(index, equation, live, last_read, flops, equation_total)
        live.update({v: num_bytes(v.aval) for v in equation.outvars if last_read.get(v, -1) > index})
        live = {v: n for v, n in live.items() if last_read[v] > index}
        flops += equation_total
    return candidates


def is_scan_over_layers(equation: core.JaxprEqn, stacked: set[core.Var]) -> bool:
    """Returns whether an equation is a scan that reads stacked parameters slice by slice.

    Args:
      equation: any.
      stacked: the variables that depend on parameters alone.
    """
    if equation.primitive.name != "scan" or equation.params["length"] < 2:
        return False
    return any(v in stacked for v in scan_operands(equation, equation.invars).slices if isinstance(v, core.Var))


def _between_trips(
    index: int,
    equation: core.JaxprEqn,
    live: dict[core.Var, int],
    last_read: dict[core.Var, int],
    flops: float,
    scan_flops: float,
) -> list[CutCandidate]:
    """Returns the cuts between two trips of a scan over layers."""
    constants, carries, slices = scan_operands(equation, equation.invars)
    made = equation.outvars[: len(carries)]
    stacks = [v for v in stacked_of(equation) if v in equation.outvars and last_read.get(v, -1) > index]
    length = equation.params["length"]
    fixed = {v: n for v, n in live.items() if last_read[v] > index or v in constants}
    sliced = {v: n for v, n in live.items() if v in slices and v not in fixed}
    carried = sum(num_bytes(v.aval) for v in made)
    stacked = sum(num_bytes(v.aval) for v in stacks)
    return [
        CutCandidate(
            Cut(index, trip),
            sum(fixed.values()) + carried + stacked * trip // length + sum(sliced.values()) * (length - trip) // length,
            flops + scan_flops * trip / length,
        )
        for trip in range(1, length)
    ]


def _of_parameters_alone(parts: StepParts) -> set[core.Var]:
    """Returns the floats of a micro-batch that depend on parameters, and on nothing of the batch."""
    jaxpr = parts.each.program.jaxpr
    found = set(parameters_of(parts))
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if isinstance(v, core.Var)]
        if operands and all(v in found for v in operands):
            found.update(v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))  # type: ignore[attr-defined]
    return found
