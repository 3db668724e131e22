"""`budget` plans a function for several phases with different devices, together with the moves of its state."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from cost.base import Link, Problem
from diffshard.base import Solution
from diffshard.budgets.base import Budget, Phase, PhasePlans, mean_step_s
from diffshard.budgets.job import Job, JobChoice, job_of, requests_of
from diffshard.budgets.joint import choices_of, joint_problem, joint_tied
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.fingerprints import facts_of, run_facts
from diffshard.sharding_search.options import Remat, options_of
from diffshard.sharding_search.planning import LAST_PROBLEM_SHARE
from diffshard.sharding_search.predictions import warn_of_whole_work
from diffshard.sharding_search.request import PlanRequest
from diffshard.solving.objectives.minimise import minimise
from diffshard.solving.solve import SolverOptions, solve, solver_options

_MOST_PROBLEMS = 5
"""Tangents of the joint objective that are solved at most. Later ones seldom lead to a better outcome."""
_LEAST_GAIN = 1e-4
"""The relative gap at which the search for all phases together ends."""


def budget(
    fn: Callable[..., Any],
    phases: Sequence[Phase],
    *args: Any,
    move_link: Link | None = None,
    in_shardings: Any = None,
    remat: Remat | None = None,
    donate_argnums: int | Sequence[int] | None = (),
    static_argnums: int | Sequence[int] | None = (),
    **options: Unpack[SolverOptions],
) -> Budget:
    """Plans a function for devices that change by a known or measured schedule, together with the moves of its state.

    >>> phases = [Phase(mesh=mesh, num_steps=500), Phase(mesh=smaller_mesh, num_steps=20)]
    >>> print(diffshard.elastic.budget(train_step, phases, state, batch))

    The arguments that the function updates, such as a training state, go from phase to phase; the others are loaded
    anew. In total, steps and moves are never predicted to take longer than with a plan for each phase alone.

    With `jax.distributed`, each process that owns devices of some phase calls this with the same arguments. The first
    of them plans, and the others wait for its plans.

    Args:
      fn: as in `search`.
      phases: in order, two or more: all with `num_steps`, so that the fewest seconds are looked for, or all with
        `duration_s`, so that the most steps are. `phases_of_log` makes them from a measured log.
      *args: as for the function itself, in all phases: arrays or `jax.ShapeDtypeStruct`.
      move_link: the link over which state moves; None takes the slowest link of the two phases' hardware.
      in_shardings: as in `search`, in all phases.
      remat: as in `search`: what each phase computes again is chosen for it alone, before all are planned together. The
        bound then counts no moves.
      donate_argnums: as in `search`.
      static_argnums: as in `search`.
      **options: `SolverOptions`; the time limit is that of each different phase, and of all of them together.

    Raises:
      InfeasibleError: no plan fits the memory limit of a phase; names the phase.
      ProcessesError: the processes ask for different things, or another one failed.
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    start_s, mesh = time.perf_counter(), _mesh_of_all(phases)
    what = f"plan a budget of {getattr(fn, '__name__', 'a function')}"
    with errors_for_all(mesh, what):
        _check(phases, move_link)
        of_all: dict[str, Any] = {
            "in_shardings": in_shardings,
            "remat": remat,
            "progress": "none",
            "donate_argnums": donate_argnums,
            "static_argnums": static_argnums,
            **solver_options(options, function=budget),
        }
        all_options = [options_of(fn, p.mesh, p.hardware, p.memory_limit_bytes, **of_all) for p in phases]
        processes = processes_of(mesh)
        requests = processes.alike(
            what, lambda: requests_of(all_options, args), lambda made: _facts(phases, made, move_link)
        )
        pack, unpack = (lambda made: json.dumps(Budget._file.to_json(made)).encode()), _unpack
        found = processes.shared(what, lambda: _planned(phases, requests, move_link, start_s), pack=pack, unpack=unpack)
    chosen, alone = (_completed(plans, requests) for plans in (found.chosen, found.alone))
    phases = tuple(replace(phase, device_ids=phase.devices) for phase in phases)
    return replace(found, phases=phases, chosen=chosen, alone=alone, fn=fn)


def _planned(
    phases: Sequence[Phase], requests: Sequence[PlanRequest], move_link: Link | None, start_s: float
) -> Budget:
    """Plans all phases, in one process."""
    job = job_of(phases, requests, move_link)
    alone = job.outcome([job.candidate(i, phase.solution.choice) for i, phase in enumerate(job.alone)])
    solution = _solve_together(job, alone)
    together = job.outcome([job.candidate(i, c) for i, c in enumerate(choices_of(job.spaces, solution.choice))])
    best, bound = min(alone, together, key=job.total), job.bound
    if not job.has_durations and requests[0].options.remat is None:  # else it holds for what they compute again only
        bound = max(bound, solution.lower_bound - job.most_preference_s)
    chosen = job.plans(best)
    for plan in {id(plan): plan for plan in chosen.plans}.values():  # equal phases share a plan
        warn_of_whole_work(plan)
    # With durations the bound is a number of steps that nothing exceeds.
    lower_bound_s = mean_step_s(phases, bound, bound if job.has_durations else chosen.total_steps)
    lower_bound_s = min(lower_bound_s, mean_step_s(phases, chosen.total_s, chosen.total_steps))
    return Budget(
        phases=tuple(phases),
        chosen=chosen,
        alone=job.plans(alone),
        lower_bound_s=lower_bound_s if math.isfinite(lower_bound_s) else 0.0,  # durations too short for any step
        status=solution.status,
        search_s=time.perf_counter() - start_s,
    )


def _completed(plans: PhasePlans, requests: Sequence[PlanRequest]) -> PhasePlans:
    """Returns plans on the meshes of this process, also those that another process has sent."""
    pairs = zip(plans.plans, requests, strict=True)
    return plans._replace(plans=tuple(request.complete(plan) for plan, request in pairs))


def _unpack(content: bytes) -> Budget:
    return Budget._file.from_json(json.loads(content), "the budget of the first process", Budget)


def _facts(phases: Sequence[Phase], requests: Sequence[PlanRequest], move_link: Link | None) -> dict[str, str]:
    """Returns the facts that have to be the same in all processes, by names for errors."""
    facts = {"`move_link`": repr(move_link)}
    for i, (phase, request) in enumerate(zip(phases, requests, strict=True)):
        steps = {"`num_steps`": repr(phase.num_steps), "`duration_s`": repr(phase.duration_s)}
        of_phase = {**steps, "`device_ids`": str(phase.devices), **run_facts(request.options)}
        of_phase |= facts_of(request.options, request.traced_function)
        facts |= {f"of phase {i}, {name}": text for name, text in of_phase.items()}
    return facts


def _mesh_of_all(phases: Any) -> Mesh | AbstractMesh:
    """Returns a mesh of the devices of all phases, by which their processes are known; an abstract one of none."""
    meshes = [getattr(phase, "mesh", None) for phase in phases] if isinstance(phases, Sequence) else []
    devices = dict.fromkeys(d for mesh in meshes if isinstance(mesh, Mesh) for d in mesh.devices.flat)
    return Mesh(np.array(list(devices)), ("devices",)) if devices else AbstractMesh((1,), ("devices",))


def _solve_together(job: Job, alone: JobChoice) -> Solution:
    """Solves the joint problem from the choices of each phase alone."""
    options = job.alone[0].request.options
    problem, objective = joint_problem(job.phases, job.spaces, job.moves_s, job.is_state)
    deadline = options.deadline()

    def solve_within_limits(tangent: Problem, start: np.ndarray | None, stop_gap: float) -> Solution:
        return solve(
            tangent,
            stop_gap=stop_gap,
            solver=options.solver,
            time_limit_s=deadline.remaining_s(),
            key=options.key,
            tied=joint_tied(job.spaces),
        )

    return minimise(
        problem,
        objective,
        solve_within_limits,
        np.array([strategy for candidate in alone.candidates for strategy in candidate.choice]),
        is_over=lambda: deadline.is_over(LAST_PROBLEM_SHARE),
        stop_gap=_LEAST_GAIN,
        most_problems=_MOST_PROBLEMS,
    )


def _check(phases: Sequence[Phase], move_link: Link | None) -> None:
    if not isinstance(phases, Phase | Sequence):
        raise TypeError(f"`phases` must be a list of Phase, not {type(phases).__name__}.")
    if isinstance(phases, Phase) or len(phases) < 2:
        raise ValueError("`phases` must be two or more; for a single one use `diffshard.search`.")
    for i, phase in enumerate(phases):
        if not isinstance(phase, Phase):
            raise TypeError(f"`phases[{i}]` must be a Phase, not {type(phase).__name__}.")
        if (phase.duration_s is None) != (phases[0].duration_s is None):
            raise ValueError(
                f"`phases` must all have `num_steps` or all `duration_s`; phases 0 and {i} differ. Steps times the "
                "seconds of a step are a duration."
            )
    if move_link is not None and not isinstance(move_link, Link):
        raise TypeError(f"`move_link` must be a Link or None, not {type(move_link).__name__}.")
