"""Runs a training step with some of its forward pass computed again in the backward pass.

Steps that run again are collected in regions, one for each part of the forward pass that no kept value divides, such as
a layer. A region stands before the first step of the backward pass that reads what it makes, and is what
`jax.checkpoint` makes: a rematerialised region, whose operands pass a barrier, so that a compiler cannot merge it with
the forward pass. One of its operands is what the backward pass has reached by then, which goes on from behind the
barrier: so the region cannot start earlier. What is made of arguments without any product, such as a mask or a
parameter in another type, is computed in each region that needs it.

What is offloaded is copied to the host's memory before a barrier of the forward pass, and from there behind one of the
backward pass; both join the copy with an array that the pass goes on from (`offloading.py`).
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

from search_spaces.rematerialisation.offloading import Offload
from search_spaces.rematerialisation.passes import (
    Passes,
    RunAgain,
    ScanPair,
    goes_on_from,
    passes_of,
    regions_of,
    step_key,
    vertices_of,
)
from search_spaces.replay import REMAT, abstract_argument, bind, context_of, scan_again, source_of
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Step, Value, Vertex


@dataclass
class _ScanCopies:
    """The values that one scan of a pair hands over to the other.

    Attributes:
      saved: values of the forward body that are stacked for the regions.
      read: values that regions read and the backward body has anyway: by their ids those of its slices.
      pieces: slices of the forward scan that the backward one needs, too.
      dropped: ids of stacks that are not kept.
      leaving: ids of values of the forward body that wait in the host's memory.
      coming: ids of the same in the backward body.
    """

    saved: list[Value] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)
    pieces: list[Vertex] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)


_NOTHING = _ScanCopies()


class RematerialisedFunction:
    """A function of flat arguments that computes some of its forward pass again.

    Args:
      graph: the traced function.
      recomputed: keys of the steps that run again (`passes.step_key`).
      offloads: what waits in the host's memory.
    """

    def __init__(self, graph: Graph, recomputed: frozenset[int], offloads: Sequence[Offload] = ()):
        self.graph, self._offloads = graph, offloads
        self._leaving: dict[int, list[tuple[Value, Value | None]]] = defaultdict(list)  # with what goes on from there
        self._coming: dict[int, list[tuple[Value, Value | None]]] = defaultdict(list)
        self._before: dict[int, list[RunAgain]] = defaultdict(list)  # by the key of the step of the backward pass
        self._aliases: dict[int, list[int]] = defaultdict(list)
        self._forward_of: dict[int, _ScanCopies] = {}
        self._backward_of: dict[int, _ScanCopies] = {}
        self._outer_reads: list[tuple[int, Value]] = []  # by the key of the scan that reads it
        all_passes = passes_of(graph)
        self._loops = {step_key(p.around) for p in all_passes if p.around is not None}
        self._loops |= {step_key(p.pair.backward) for p in all_passes if p.pair is not None}
        for passes in sorted(all_passes, key=lambda p: p.pair is None):
            self._plan(passes, recomputed)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Returns the flat results."""
        env: dict[Any, Any] = {}
        for vertex, array in zip(
            (*self.graph.inputs, *self.graph.constants), (*arguments, *self.graph.constant_arrays), strict=True
        ):
            env[vertex.results[0].id] = array
        self._run(env, self.graph.block, None)
        return [_read(env, o) for o in self.graph.outputs]

    # Planning: which regions there are, and where they stand.

    def _plan(self, passes: Passes, recomputed: frozenset[int]) -> None:
        pair, place = passes.pair, {step_key(step): i for i, step in enumerate(passes.backward)}
        outer_reads = [] if pair else [(place[key], value) for key, value in self._outer_reads if key in place]
        regions = regions_of(passes, recomputed, outer_reads)
        for region in regions:
            region.trigger = goes_on_from(passes.backward, region.position, pair.backward.carries if pair else ())
            is_inside = region.position < len(passes.backward)
            self._before[step_key(passes.backward[region.position]) if is_inside else -1].append(region)
        if pair is not None:
            self._plan_scans(pair, regions, recomputed)
        else:
            self._plan_copies(passes)

    def _plan_copies(self, passes: Passes) -> None:
        made = {v.id: v for step in passes.forward for v in step.results}
        place = {step_key(step): i for i, step in enumerate((*passes.forward, *passes.backward))}
        for offload in self._offloads:
            if offload.value not in made:
                continue
            value, gone, back = made[offload.value], place[offload.gone_before], place[offload.back_from]
            self._leaving[offload.gone_before].append((value, goes_on_from(passes.forward, gone)))
            self._coming[offload.back_from].append((value, goes_on_from(passes.backward, back - len(passes.forward))))

    def _plan_scans(self, pair: ScanPair, regions: Sequence[RunAgain], recomputed: frozenset[int]) -> None:
        steps, offloaded = pair.forward.blocks[0].steps, {offload.value for offload in self._offloads}
        coming = {piece for piece, value in pair.aliases.items() if value.id in offloaded}
        scans = _ScanCopies(leaving=offloaded, coming=offloaded | coming)
        made_again = {v.id for step in steps if step_key(step) in recomputed for v in step.results}
        for piece in pair.backward.slices:
            value = pair.aliases.get(piece.results[0].id)
            if value is not None and value.id in made_again:
                scans.dropped.add(piece.operands[0].id)  # pyright: ignore[reportAttributeAccessIssue]
                self._aliases[value.id].append(piece.results[0].id)
        own = {v.id for step in steps for v in step.results} | {carry.results[0].id for carry in pair.forward.carries}
        pieces = {piece.results[0].id: piece for piece in pair.forward.slices}
        slice_of = {value.id: piece for piece, value in pair.aliases.items()}
        seen: set[int] = set()
        for region in regions:
            for value in region.inputs:
                if value.id in seen:
                    continue
                seen.add(value.id)
                if value.id in slice_of:
                    scans.read[value.id] = slice_of[value.id]
                elif value.id in own:
                    scans.saved.append(value)
                elif value.id in pieces:
                    scans.pieces.append(pieces[value.id])
                    operand = pieces[value.id].operands[0]
                    if isinstance(operand, Value):
                        self._outer_reads.append((step_key(pair.backward), operand))
                else:
                    self._outer_reads.append((step_key(pair.backward), value))
        self._forward_of[step_key(pair.forward)] = scans
        self._backward_of[step_key(pair.backward)] = scans

    # Running.

    def _run(self, env: dict[Any, Any], block: Block, region: Region | None) -> None:
        for step in block.steps:
            key = step_key(step)
            for value, beside in self._leaving.get(key, ()):
                self._leave(env, value, beside, step, region)
            for value, beside in self._coming.get(key, ()):
                self._come_back(env, value, beside, step, region)
            for again in self._before.get(key, ()):
                self._run_again(env, again, step, region)
            with step_context(step, region):
                self._run_step(env, step)

    def _run_step(self, env: dict[Any, Any], step: Step) -> None:
        outputs: Sequence[Operand] = step.results
        if isinstance(step, Region):
            if step_key(step) in self._loops:
                self._scan(env, step)
                return
            if step.equation.primitive.name in REMAT:
                outputs = step.blocks[0].outputs
        assert step.equation is not None
        results = bind(step.equation, [_read(env, o) for o in step.operands])
        env.update({o.id: array for o, array in zip(outputs, results, strict=True) if isinstance(o, Value)})

    def _run_again(self, env: dict[Any, Any], again: RunAgain, reader: Step, region: Region | None) -> None:
        """Runs a region of steps again."""
        inputs = [*again.inputs] if again.trigger is None else [*again.inputs, again.trigger]
        arrays = [env[v.id] for v in inputs]

        def run(*arrays: Any) -> list[Any]:
            inner = dict(zip((v.id for v in inputs), arrays, strict=True))
            for step in again.steps:
                with step_context(step, again.around):
                    self._run_step(inner, step)
            outputs = [inner[v.id] for v in again.outputs]
            return outputs if again.trigger is None else [*outputs, inner[again.trigger.id]]

        body = jax.make_jaxpr(run)(*(abstract_argument(jax.typeof(array)) for array in arrays))
        with step_context(reader, region):
            results = remat_equation_results(body, arrays)
        for value, array in zip(again.outputs, results, strict=False):
            env[value.id] = array
            env.update(dict.fromkeys(self._aliases[value.id], array))
        if again.trigger is not None:
            env[again.trigger.id] = results[-1]

    def _leave(
        self, env: dict[Any, Any], value: Value, beside: Value | None, step: Step, region: Region | None
    ) -> None:
        """Copies an array to the host, and lets another one go on only when it is there."""
        with step_context(step, region):
            array = jax.device_put(env[value.id], jax.memory.Space.Host)
            if beside is not None:
                array, env[beside.id] = joined(array, env[beside.id])
        env[_on_host(value)] = array

    def _come_back(
        self, env: dict[Any, Any], value: Value, beside: Value | None, step: Step, region: Region | None
    ) -> None:
        """Copies an array from the host when another one is there."""
        array = env[_on_host(value)]
        with step_context(step, region):
            if beside is not None:
                array, env[beside.id] = joined(array, env[beside.id])
            env[value.id] = jax.device_put(array, jax.memory.Space.Device)

    def _scan(self, env: dict[Any, Any], region: Region) -> None:
        """Runs a scan in whose body something runs again, or that hands over what runs again to another one."""
        key = step_key(region)
        to, come = self._forward_of.get(key, _NOTHING), self._backward_of.get(key, _NOTHING)
        results = region.results[len(region.carries) :]
        stacks = [self.graph.vertices[v.vertex] for v in results if v.id not in to.dropped]
        slices = [p for p in region.slices if getattr(p.operands[0], "id", None) not in come.dropped]
        extra = {value.id: env[_stacked(value)] for value in come.saved}
        extra |= {piece.results[0].id: _read(env, piece.operands[0]) for piece in come.pieces}
        own = {s.results[0].id for s in slices} | set(extra)
        coming = [v for v in come.coming if v in own]

        def stored(operand: Operand, array: Any) -> Any:
            is_leaving = isinstance(operand, Value) and operand.id in to.leaving
            return jax.device_put(array, jax.memory.Space.Host) if is_leaving else array

        def body(carry: list[Any], xs: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            inner = dict(env)
            inner.update(zip((c.results[0].id for c in region.carries), carry, strict=True))
            inner.update(zip((s.results[0].id for s in slices), xs[0], strict=True))
            inner.update(zip(extra, xs[1], strict=True))
            inner.update({v: jax.device_put(inner[v], jax.memory.Space.Device) for v in coming})
            inner.update({value: inner[piece] for value, piece in come.read.items()})
            self._run(inner, region.blocks[0], region)
            following = [_array(inner, c.operands[1], c.results[0].dtype) for c in region.carries]
            left = [stored(s.operands[0], _array(inner, s.operands[0], s.results[0].dtype)) for s in stacks]
            return following, [*left, *(stored(v, inner[v.id]) for v in to.saved)]

        first = [_array(env, c.operands[0], c.results[0].dtype) for c in region.carries]
        xs = [_read(env, s.operands[0]) for s in slices], list(extra.values())
        carries, ys = scan_again(region.equation, body, first, xs)
        env.update({c.results[1].id: array for c, array in zip(region.carries, carries, strict=True)})
        env.update({s.results[0].id: array for s, array in zip(stacks, ys, strict=False)})
        env.update({_stacked(v): array for v, array in zip(to.saved, ys[len(stacks) :], strict=True)})


def _on_host(value: Value) -> tuple[str, int]:
    """Returns the key under which the environment has the copy of a value in the host's memory."""
    return "host", value.id


def _stacked(value: Value) -> tuple[str, int]:
    """Returns the key under which the environment has the stack of a value of all trips."""
    return "stacked", value.id


def _read(env: Mapping[Any, Any], operand: Operand) -> Any:
    return env[operand.id] if isinstance(operand, Value) else operand.val


def _array(env: Mapping[Any, Any], operand: Operand, dtype: Any) -> Any:
    return env[operand.id] if isinstance(operand, Value) else jnp.asarray(operand.val, dtype)


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
