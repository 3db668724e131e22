"""What a whole step gains if its batch is computed in pieces: one piece's collectives run beside another's work.

    python -m experiments.interleaved_pieces [--model decoder] [--mesh 2x4] [--batch 4] [--layers 2] [--compile]

A step of `experiments.timeline` is divided as `in_microbatches` divides it, but its pieces run in one pass: each
operation for the first piece, then for the second one. What does not depend on the piece runs once, loops carry all
pieces, and gradients are added up. Steps with and without pieces are searched, and the plans' programs are played, with
windows and without barriers. They are played again as if the gradients of pieces were added up before they are reduced,
which no plan can do, to bound what pieces would gain if one could. With `--compile` they are also compiled for H100s
that need not be there (the extra `gpu-compile`), without XLA's merging of products that share an operand, and the
timeline plays the compiled programs.

Source: Wang et al., Domino (arXiv:2409.15241); DeepSeek-AI, DeepSeek-V3 (arXiv:2412.19437), section 3.2.1.
"""

import argparse
import functools
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

import diffshard
from cost.streams import play
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import COMPUTE, simulate
from diffshard.pipelines.microbatches import BatchArguments, divided_call, traced_call
from diffshard.sharding_search.layout import layout_of
from experiments.host_devices import parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.schedule import AT_ONCE, windows_of
from experiments.tables import print_table
from experiments.targets import h100_mesh
from experiments.timeline_descent import searched
from experiments.timeline_models import CASES
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.microbatches import MicrobatchedFunction, combined_with, merged
from search_spaces.rematerialisation.program import remat_equation_results
from search_spaces.replay import REMAT, bind, context_of, scan_again, scan_operands
from search_spaces.sharding.graph import Graph, Region, Value, leads_to_contraction
from search_spaces.sharding.interpreter import Environment
from search_spaces.sharding.program_steps import ProgramSteps

WINDOWS = (24, math.inf)  # latencies of the slowest link: as plans run, and without barriers
APART = {"xla_gpu_dot_merger_threshold_mb": 0, AT_ONCE: 4}
PLAYED = [f"{what}, {latencies:g}" for what in ("played ms", "reduced once") for latencies in WINDOWS]
COLUMNS = ("pieces", "sum ms", "arithmetic ms", "on links ms", *PLAYED, "peak GiB")
COMPILED = ("compiled ms", "computing ms", "waiting ms", "on links ms", "peak GiB")


def in_pieces(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Returns a function that computes its batch, argument 1, in pieces in one pass, with the results of the whole."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        traced = traced_call(fn, count, BatchArguments.checked(1, ()), args, {}, "count")
        divided = divided_call(traced, count, "count", estimates_sums=True)
        return traced.result.unflatten(InterleavedFunction(divided.graph, divided.flow, count)(*traced.arrays))

    return call if count > 1 else fn


class InterleavedFunction(MicrobatchedFunction):
    """A function of flat arguments that runs its micro-batches in turns, in one pass."""

    def _run_microbatches(self, env: Environment) -> None:
        kept, batch = self.values_read_afterwards(), [value.id for value in self._batch()]

        def run(number: Any, *parts: Any) -> list[Any]:
            inner: Environment = ChainMap({**env, **dict(zip(batch, parts, strict=True))})
            self.run_each(inner, number)
            return [inner[value.id] for value in kept]

        numbers, stacks = self._of_trips(env)
        pieces = [[numbers[i], *(stack[i] for stack in stacks)] for i in range(self.num_microbatches)]
        results = interleaved(jax.make_jaxpr(run)(*pieces[0]), pieces)
        for value, parts in zip(kept, zip(*results, strict=True), strict=True):
            state = self.flow.states[value.id]
            if isinstance(state, Split):
                env[value.id] = merged(jnp.stack(parts), state)
            elif state == "whole":
                env[value.id] = parts[-1]
            else:
                env[value.id] = functools.reduce(functools.partial(combined_with, state), parts)

    def _interpreter(self, position: Any, totals: Any = None) -> Any:
        interpreter = super()._interpreter(position, totals)

        def remat(env: Environment, region: Region) -> None:
            """Keeps the region, whose barrier would otherwise be a barrier for each piece."""
            values = [operand for operand in region.operands if isinstance(operand, Value)]

            def run(*arrays: Any) -> list[Any]:
                inner = env.new_child(dict(zip((value.id for value in values), arrays, strict=True)))
                interpreter.run(inner, region.blocks[0].steps)
                return [inner[value.id] for value in region.results]

            arrays = [env[value.id] for value in values]
            results = remat_equation_results(jax.make_jaxpr(run)(*arrays), arrays)
            env.update(zip((value.id for value in region.results), results, strict=True))

        inlined = interpreter._remat
        setattr(  # noqa: B010, a method of this interpreter alone
            interpreter, "_remat", lambda env, region: (remat if _has_barrier(region) else inlined)(env, region)
        )
        return interpreter


def _has_barrier(region: Region) -> bool:
    bars = region.equation.params["prevent_cse"]
    return region.equation.params["differentiated"] and (bars if isinstance(bars, bool) else any(bars))


def interleaved(program: core.ClosedJaxpr, operands: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Runs a program for each piece's operands, equation by equation; what all pieces share runs once."""
    jaxpr = program.jaxpr
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    envs: list[dict[Any, Any]] = [constants | dict(zip(jaxpr.invars, own, strict=True)) for own in operands]

    def read(env: dict[Any, Any], atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        given = [[read(env, atom) for atom in equation.invars] for env in envs]
        with context_of(equation):
            if all(x is first for own in given for x, first in zip(own, given[0], strict=True)):
                results = [bind(equation, given[0])] * len(envs)
            elif equation.primitive.name == "scan":
                results = _scan(equation, given)
            elif equation.primitive.name in REMAT:
                results = _remat(equation, given)
            else:
                results = [bind(equation, own) for own in given]
        for env, made in zip(envs, results, strict=True):
            env.update(zip(equation.outvars, made, strict=True))
    return [[read(env, atom) for atom in jaxpr.outvars] for env in envs]


def _scan(equation: core.JaxprEqn, given: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Runs one scan that carries all pieces."""
    parts = [scan_operands(equation, own) for own in given]
    places, slices = _shared([part.slices for part in parts])
    num_carries = len(parts[0].carries)

    def trip(carries: list[list[Any]], slices: list[Any]) -> tuple[list[list[Any]], list[list[Any]]]:
        own = [[slices[i] for i in numbers] for numbers in places]
        rows = [[*part.constants, *carry, *x] for part, carry, x in zip(parts, carries, own, strict=True)]
        made = interleaved(equation.params["jaxpr"], rows)
        return [row[:num_carries] for row in made], [row[num_carries:] for row in made]

    carries, stacks = scan_again(equation, trip, [part.carries for part in parts], slices)
    return [[*carry, *stack] for carry, stack in zip(carries, stacks, strict=True)]


def _remat(equation: core.JaxprEqn, given: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Runs one rematerialised region with all pieces."""
    places, arrays = _shared(given)
    body = core.ClosedJaxpr(equation.params["jaxpr"], ())

    def run(*arrays: Any) -> list[list[Any]]:
        return interleaved(body, [[arrays[i] for i in numbers] for numbers in places])

    results = iter(remat_equation_results(jax.make_jaxpr(run)(*arrays), arrays))
    return [[next(results) for _ in equation.outvars] for _ in given]


def _shared(lists: Sequence[Sequence[Any]]) -> tuple[list[list[int]], list[Any]]:
    """Returns where each element of some lists is in a list of all, which has shared elements once."""
    first = {id(x): x for one in lists for x in one}
    place = {key: i for i, key in enumerate(first)}
    return [[place[id(x)] for x in one] for one in lists], list(first.values())


def reduced_once(program: ProgramSteps, graph: Graph, count: int) -> ProgramSteps:
    """Returns a program whose reductions of what no product reads, such as gradients of weights, take 1 / count."""
    leads = leads_to_contraction(graph)
    is_last = [o.kind in ("reduce_scatter", "all_reduce") and not leads[o.vertex] for o in program.origins]
    pairs = zip(program.steps, is_last, strict=True)
    return program._replace(steps=tuple(s._replace(seconds=s.seconds / (count if last else 1)) for s, last in pairs))


def cells(model: Model, mesh: Mesh | AbstractMesh, count: int, time_limit_s: float, is_compiled: bool) -> Iterator[str]:
    """Yields the cells of a row: a plan of the step in pieces, and its programs."""
    fn = in_pieces(model.step, count)
    request, plan = searched(model._replace(step=fn), mesh, time_limit_s, executor="program")
    layout = layout_of(plan, request.space)
    assert plan.timeline is not None
    on_links_s = sum(seconds for stream, seconds in plan.timeline.busy_s.items() if stream != COMPUTE)
    programs: list[ProgramSteps] = []
    for latencies in WINDOWS:
        with windows_of(latencies):
            programs.append(request.space.program_steps(layout))
    programs += [reduced_once(program, request.space.graph, count) for program in programs]
    played_s = [play(program.steps).seconds for program in programs]
    yield str(count)
    yield from (f"{1e3 * seconds:.2f}" for seconds in (plan.step_s, plan.compute_s, on_links_s, *played_s))
    yield f"{plan.peak_bytes / 2**30:.2f}"
    if is_compiled:
        compiled = plan.apply(fn).lower(*abstract_arguments(model)).compile(compiler_options=APART)
        timeline = simulate(
            compiled.as_text() or "", mesh.shape, achievable_rates(diffshard.preset("h100", dict(mesh.shape)))
        )
        links_s = sum(seconds for stream, seconds in timeline.busy_s.items() if stream != COMPUTE)
        times = (timeline.step_s, timeline.busy_s[COMPUTE], sum(timeline.waited_s.values()), links_s)
        yield from (f"{1e3 * seconds:.2f}" for seconds in times)
        yield f"{compiled.memory_analysis().peak_memory_in_bytes / 2**30:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, default="decoder")
    parser.add_argument("--mesh", default="2x4", help="data x model, in hosts of 8")
    parser.add_argument("--batch", type=int, default=4, help="rows in a batch; the pieces have equal parts")
    parser.add_argument("--layers", type=int, default=2, help="of the model, which is as wide as in the timeline")
    parser.add_argument("--pieces", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of the solver for each plan")
    parser.add_argument("--compile", action="store_true", help="also compile the programs with windows")
    options = parser.parse_args(argv)
    sizes = CASES[options.model].full if options.sizes == "full" else CASES[options.model].small
    model, rows = CASES[options.model].make(batch=options.batch, **{**sizes, "layers": options.layers}), []
    mesh = h100_mesh(parse_mesh(options.mesh))
    for count in options.pieces:
        rows.append(tuple(cells(model, mesh, count, options.time_limit, options.compile)))
        print(*rows[-1], sep="  ", flush=True)
    title = f"{options.model}, {options.layers} layers, {options.mesh}, batch {options.batch}"
    print_table(title, COLUMNS + (COMPILED if options.compile else ()), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
