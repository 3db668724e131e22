"""Divides the steps that run again into regions, says what each of them waits for, and makes their equations.

A region is a part of the forward pass that no kept value divides, such as a layer. What is made of arguments without
any product, such as a mask or a parameter in another type, does not join two parts to one: each computes it for itself.
A region's equations stand behind a barrier, so that the compiler does not merge them with those that ran before.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.rematerialisation.passes import (
    Passes,
    ScanPair,
    Step,
    backward_reads,
    made_by,
    results_of,
    step_key,
    values_read,
    vertices_of,
)
from search_spaces.replay import bind, context_of, source_of
from search_spaces.sharding.fusion import PICKS
from search_spaces.sharding.graph import Region, Value, Vertex, is_contraction


@dataclass
class RunAgain:
    """A region of steps that run again: what it reads, what it leaves, what it waits for, and the loop they are in."""

    steps: list[Step]
    inputs: list[Value]
    outputs: list[Value]
    trigger: Value | None
    around: Region | None


@dataclass
class ScanCopies:
    """What a pair of scans hands over.

    Attributes:
      saved: values of the forward body that are stacked for the regions.
      read: values that regions read and the backward body has anyway: by their ids those of its slices.
      pieces: slices of the forward scan that the backward one needs, too.
      dropped: ids of stacks that are not kept.
      offloaded: ids of values of the forward body that wait in the host's memory.
    """

    pair: ScanPair
    saved: list[Value] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)
    pieces: list[Vertex] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    offloaded: set[int] = field(default_factory=set)


def regions_of_choice(passes: Passes, recomputed: frozenset[int]) -> list[RunAgain]:
    """Returns the regions in which a choice's steps run again for what the backward pass itself reads."""
    steps = [step for step in passes.forward if step_key(step) in recomputed]
    maker, demanded = made_by(steps), {}
    for position, value in backward_reads(passes):
        if value.id in maker:
            demanded[value.id] = min(position, demanded.get(value.id, position))
    return regions_of(passes, steps, maker, demanded)


def regions_of(
    passes: Passes, steps: Sequence[Step], maker: Mapping[int, Step], demanded: Mapping[int, int]
) -> list[RunAgain]:
    """Divides the steps that run again into regions between which only kept values go.

    Args:
      steps: those that run again, in order.
      maker: which of them makes a value, by the value's id.
      demanded: for each of these values that the backward pass reads, by id, the position of its first reader.
    """
    free = _free_steps(passes)
    root = _joined(steps, maker, free)
    values = {v.id: v for step in steps for v in results_of(step)}
    members: dict[int, list[Value]] = defaultdict(list)  # the demanded values of each region
    for value in demanded:
        members[root[step_key(maker[value])]].append(values[value])
    closures = {key: _closure(outputs, maker) for key, outputs in members.items()}

    def first_read(key: int) -> int:
        return min(demanded[v.id] for v in members[key])

    for key in [key for key in members if key in free]:  # what one region alone needs is left by it, if early enough
        users = [other for other, closure in closures.items() if other != key and key in closure]
        if len(users) == 1 and users[0] in members and first_read(users[0]) <= first_read(key):
            members[users[0]] += members.pop(key)
    regions = []
    for outputs in members.values():
        keys = _closure(outputs, maker)
        inside = [step for step in steps if step_key(step) in keys]
        own = {v.id for step in inside for v in results_of(step)}
        inputs = {v.id: v for step in inside for v in values_read(step) if v.id not in own}
        outputs = sorted(outputs, key=lambda v: v.id)
        regions.append(RunAgain(inside, list(inputs.values()), outputs, None, passes.around))
    return regions


def _free_steps(passes: Passes) -> set[int]:
    """Returns the keys of steps that are made of arguments without any product, lookup or loop, such as a mask."""
    made = made_by(passes.forward)
    carried = set() if passes.pair is None else {c.results[0].id for c in passes.pair.forward.carries}
    free: set[int] = set()
    for step in passes.forward:
        read = [v.id for v in values_read(step)]
        is_cheap = isinstance(step, Vertex) and not is_contraction(step) and step.primitive not in PICKS
        if is_cheap and not any(v in carried or (v in made and step_key(made[v]) not in free) for v in read):
            free.add(step_key(step))
    return free


def _joined(steps: Sequence[Step], maker: Mapping[int, Step], free: set[int]) -> dict[int, int]:
    """Returns for each step, by key, the key of the first step of its region; a free step is a region of its own."""
    root = {step_key(step): step_key(step) for step in steps}

    def find(key: int) -> int:
        while root[key] != key:
            key = root[key]
        return key

    for step in steps:
        own = step_key(step)
        others = {step_key(maker[v.id]) for v in values_read(step) if v.id in maker}
        for other in () if own in free else others - free:
            root[find(own)] = find(other)
    return {key: find(key) for key in root}


def _closure(values: Sequence[Value], maker: Mapping[int, Step]) -> set[int]:
    """Returns the keys of the steps that run again to make some values."""
    keys: set[int] = set()
    waiting = [v.id for v in values]
    while waiting:
        value = waiting.pop()
        if value in maker and step_key(maker[value]) not in keys:
            keys.add(step_key(maker[value]))
            waiting += [v.id for v in values_read(maker[value])]
    return keys


def trigger_of(passes: Passes, position: int) -> Value | None:
    """Returns the largest array of the backward pass that the first reader of a region reads beside it."""
    made = set(made_by(passes.backward[:position]))
    if passes.pair is not None:
        made |= {c.results[0].id for c in passes.pair.backward.carries}
    for step in passes.backward[position:]:
        before = [v for v in values_read(step) if v.id in made and v.shape]
        if before:
            return max(before, key=lambda v: v.num_bytes)
    return None


def goes_on_from(steps: Sequence[Step], position: int) -> Value | None:
    """Returns the largest array that was made before a step and that it, or else a later one, reads."""
    made = set(made_by(steps[:position]))
    for step in steps[position:]:
        before = [v for v in values_read(step) if v.id in made and v.shape]
        if before:
            return max(before, key=lambda v: v.num_bytes)
    return None


@cache
def _remat_template() -> core.JaxprEqn:
    """Returns an equation of a rematerialised region, which says how this version of JAX writes one."""
    (equation,) = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns
    return equation


def remat_equation_results(body: core.ClosedJaxpr, arrays: Sequence[Any]) -> Sequence[Any]:
    """Adds a rematerialised region of a backward pass to the program that is traced, and returns its results."""
    arrays = [*body.consts, *arrays]
    jaxpr = body.jaxpr
    if body.consts:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return bind(_remat_template(), arrays, jaxpr=jaxpr, prevent_cse=True, differentiated=True)


def joined(*arrays: Any) -> Sequence[Any]:
    """Returns arrays behind a barrier that waits for all of them: an empty region, which needs no sharding rule."""
    types = [jax.typeof(array) for array in arrays]
    return remat_equation_results(jax.make_jaxpr(lambda *inner: inner)(*types), arrays)


@contextmanager
def step_context(step: Step, region: Region | None) -> Any:
    """Restores the name scopes of a step in the body of a region, those of the calls around it included."""
    vertex = step if isinstance(step, Vertex) else next(vertices_of(step))
    callers = list(vertex.callers)
    around = [i for i, caller in enumerate(callers) if region is not None and caller is region.equation]
    callers = callers[around[0] + 1 if around else 0 :]
    own = [i for i, caller in enumerate(callers) if isinstance(step, Region) and caller is step.equation]
    callers = callers[: own[0]] if own else callers
    assert step.equation is not None
    with ExitStack() as stack:
        for caller in callers:
            stack.enter_context(source_of(caller))
        stack.enter_context(context_of(step.equation))
        yield
