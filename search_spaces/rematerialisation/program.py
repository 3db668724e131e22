"""Runs a training step with some of its forward pass computed again in the backward pass.

Steps that run again are collected in regions, one for each part of the forward pass that no kept value divides, such as
a layer. A region stands before the first step of the backward pass that reads what it makes, and is what
`jax.checkpoint` makes: a rematerialised region, whose operands pass a barrier, so that a compiler cannot merge it with
the forward pass. One of its operands is what the backward pass has reached by then, which goes on from behind the
barrier: so the region cannot start earlier. What is made of arguments without any product, such as a mask or a
parameter in another type, is computed in each region that needs it.
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
    passes_of,
    results_of,
    step_key,
    vertices_of,
)
from search_spaces.rematerialisation.regions import RunAgain, regions_of, trigger_of
from search_spaces.replay import REMAT, bind, context_of, scan_again, source_of
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Value, Vertex


@dataclass
class _Scans:
    """What a pair of scans hands over.

    Attributes:
      pair: the scans.
      saved: values of the forward body that are stacked for the regions.
      read: values that regions read and the backward body has anyway: by their ids those of its slices.
      pieces: slices of the forward scan that the backward one needs, too.
      dropped: ids of stacks that are not kept.
    """

    pair: ScanPair
    saved: list[Value] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)
    pieces: list[Vertex] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)


class RematerialisedFunction:
    """A function of flat arguments that computes some of its forward pass again.

    Args:
      graph: the traced function.
      recomputed: keys of the steps that run again (`passes.step_key`).
    """

    def __init__(self, graph: Graph, recomputed: frozenset[int]):
        self.graph = graph
        self._before: dict[int, list[RunAgain]] = defaultdict(list)  # by the key of the step of the backward pass
        self._aliases: dict[int, list[int]] = defaultdict(list)
        self._forward_of: dict[int, _Scans] = {}
        self._backward_of: dict[int, _Scans] = {}
        self._outer_reads: list[tuple[int, Value]] = []  # by the key of the scan that reads it
        all_passes = passes_of(graph)
        self._loops = {step_key(p.around) for p in all_passes if p.around is not None and p.pair is None}
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
        steps = [step for step in passes.forward if step_key(step) in recomputed]
        maker = made_by(steps)
        reads = backward_reads(passes)
        if passes.pair is None:
            place = {step_key(step): i for i, step in enumerate(passes.backward)}
            reads += [(place[key], value) for key, value in self._outer_reads if key in place]
        demanded: dict[int, int] = {}
        for position, value in reads:
            if value.id in maker:
                demanded[value.id] = min(position, demanded.get(value.id, position))
        regions = regions_of(passes, steps, maker, demanded)
        for region in regions:
            position = min(demanded[v.id] for v in region.outputs)
            region.trigger = trigger_of(passes, position)
            key = step_key(passes.backward[position]) if position < len(passes.backward) else -1
            self._before[key].append(region)
        if passes.pair is not None:
            self._plan_scans(passes.pair, regions, maker)

    def _plan_scans(self, pair: ScanPair, regions: Sequence[RunAgain], maker: Mapping[int, Step]) -> None:
        scans = _Scans(pair)
        for piece in pair.backward.slices:
            value = pair.aliases.get(piece.results[0].id)
            if value is not None and value.id in maker:
                scans.dropped.add(piece.operands[0].id)  # pyright: ignore[reportAttributeAccessIssue]
                self._aliases[value.id].append(piece.results[0].id)
        body = pair.forward.blocks[0]
        own = {v.id: v for step in body.steps for v in results_of(step)}
        own |= {carry.results[0].id: carry.results[0] for carry in pair.forward.carries}
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
            for again in self._before.get(key, ()):
                self._run_again(env, again, step, region)
            with _context(step, region):
                self._run_step(env, step)

    def _run_step(self, env: dict[Any, Any], step: Step) -> None:
        if isinstance(step, Region):
            key = step_key(step)
            if key in self._forward_of:
                return self._forward_scan(env, step, self._forward_of[key])
            if key in self._backward_of:
                return self._backward_scan(env, step, self._backward_of[key])
            if key in self._loops:
                return self._scan(env, step)
            is_remat = step.equation.primitive.name in REMAT
            outputs = step.blocks[0].outputs if is_remat else step.results
            results = bind(step.equation, [_read(env, o) for o in step.operands])
            env.update({o.id: r for o, r in zip(outputs, results, strict=True) if isinstance(o, Value)})
            return None
        assert step.equation is not None
        results = bind(step.equation, [_read(env, o) for o in step.operands])
        env.update(zip((v.id for v in step.results), results, strict=True))
        return None

    def _run_again(self, env: dict[Any, Any], again: RunAgain, reader: Step, region: Region | None) -> None:
        """Runs a region of steps again."""
        inputs = [*again.inputs] if again.trigger is None else [*again.inputs, again.trigger]
        arrays = [env[v.id] for v in inputs]

        def run(*arrays: Any) -> list[Any]:
            inner = dict(zip((v.id for v in inputs), arrays, strict=True))
            for step in again.steps:
                with _context(step, again.around):
                    self._run_step(inner, step)
            outputs = [inner[v.id] for v in again.outputs]
            return outputs if again.trigger is None else [*outputs, inner[again.trigger.id]]

        types = [jax.typeof(array) for array in arrays]
        avals = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=getattr(t, "weak_type", False)) for t in types]
        body = jax.make_jaxpr(run)(*avals)
        with _context(reader, region):
            results = _remat_equation_results(body, arrays)
        for value, array in zip(again.outputs, results, strict=False):
            env[value.id] = array
            env.update(dict.fromkeys(self._aliases[value.id], array))
        if again.trigger is not None:
            env[again.trigger.id] = results[-1]

    def _scan(self, env: dict[Any, Any], region: Region) -> None:
        """Runs a scan in whose body something runs again."""
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]
        self._run_scan(env, region, stacks, [], region.slices, {}, {})

    def _forward_scan(self, env: dict[Any, Any], region: Region, scans: _Scans) -> None:
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]
        stacks = [stack for stack in stacks if stack.results[0].id not in scans.dropped]
        self._run_scan(env, region, stacks, scans.saved, region.slices, {}, {})

    def _backward_scan(self, env: dict[Any, Any], region: Region, scans: _Scans) -> None:
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]
        slices = [p for p in region.slices if getattr(p.operands[0], "id", None) not in scans.dropped]
        extra = {value.id: env[_stacked(value)] for value in scans.saved}
        extra |= {piece.results[0].id: _read(env, piece.operands[0]) for piece in scans.pieces}
        self._run_scan(env, region, stacks, [], slices, extra, scans.read)

    def _run_scan(
        self,
        env: dict[Any, Any],
        region: Region,
        stacks: Sequence[Vertex],
        saved: Sequence[Value],
        slices: Sequence[Vertex],
        extra: Mapping[int, Any],
        read: Mapping[int, int],
    ) -> None:
        """Runs a scan that stacks some values more (`saved`) and reads some arrays more (`extra`, by value id).

        `read` has values of another scan's body that are slices of this one, by ids.
        """

        def body(carry: list[Any], xs: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            inner = dict(env)
            inner.update(zip((c.results[0].id for c in region.carries), carry, strict=True))
            inner.update(zip((s.results[0].id for s in slices), xs[0], strict=True))
            inner.update(zip(extra, xs[1], strict=True))
            inner.update({value: inner[piece] for value, piece in read.items()})
            self._run(inner, region.blocks[0], region)
            following = [_array(inner, c.operands[1], c.results[0].dtype) for c in region.carries]
            left = [_array(inner, s.operands[0], s.results[0].dtype) for s in stacks]
            return following, [*left, *(inner[v.id] for v in saved)]

        first = [_array(env, c.operands[0], c.results[0].dtype) for c in region.carries]
        xs = [_read(env, s.operands[0]) for s in slices], list(extra.values())
        carries, ys = scan_again(region.equation, body, first, xs)
        env.update({c.results[1].id: array for c, array in zip(region.carries, carries, strict=True)})
        env.update({s.results[0].id: array for s, array in zip(stacks, ys, strict=False)})
        env.update({_stacked(v): array for v, array in zip(saved, ys[len(stacks) :], strict=True)})


@cache
def _remat_template() -> core.JaxprEqn:
    """Returns an equation of a rematerialised region, which says how this version of JAX writes one."""
    (equation,) = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns
    return equation


def _remat_equation_results(body: core.ClosedJaxpr, arrays: Sequence[Any]) -> Sequence[Any]:
    """Adds a rematerialised region of a backward pass to the program that is traced, and returns its results."""
    arrays = [*body.consts, *arrays]
    jaxpr = body.jaxpr
    if body.consts:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return bind(_remat_template(), arrays, jaxpr=jaxpr, prevent_cse=True, differentiated=True)


@contextmanager
def _context(step: Step, region: Region | None) -> Any:
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


def _stacked(value: Value) -> tuple[str, int]:
    """Returns the key under which the environment has the stack of a value of all trips."""
    return "stacked", value.id


def _read(env: Mapping[Any, Any], operand: Operand) -> Any:
    return env[operand.id] if isinstance(operand, Value) else operand.val


def _array(env: Mapping[Any, Any], operand: Operand, dtype: Any) -> Any:
    return env[operand.id] if isinstance(operand, Value) else jnp.asarray(operand.val, dtype)
