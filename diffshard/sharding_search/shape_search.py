"""The search over the shapes of a mesh: each physically distinct one is a candidate of the outer search.

The function is traced once. A plan of one shape is a limit for the next ones: where the dual's bound of a shape reaches
it, no plan on that mesh is predicted to be faster, and its search ends. The smallest bound of all shapes bounds the
whole search. A shape for which there was no time has the bound of one device's seconds, divided by the devices:
splitting an operation over n devices leaves each of them at least 1/n of its arithmetic and of its memory traffic.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cost.base import Hardware
from diffshard.base import Deadline, InfeasibleError, Progress
from diffshard.outer_search import Candidate, Outcome, OuterSearch
from diffshard.plans.base import PlannedObjective, TriedShape
from diffshard.sharding_search.format_rounds import find_plan_with_formats
from diffshard.sharding_search.mesh_candidates import MeshCandidate
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import earlier_plan_of
from diffshard.sharding_search.planning import find_plan
from diffshard.sharding_search.remat import find_plan_with_remat
from diffshard.sharding_search.request import PlanRequest
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.space import ShardingSpace

CUT_OFF_GAIN = 1e-4
"""A shape is searched on only while it may be faster by this share: as much as equal layers may cost (`TIE_GAP`)."""


def find_on_mesh(request: PlanRequest) -> Plan:
    """Returns the plan for the mesh of a request, with what its options leave to the search beside the shardings."""
    if request.options.formats is not None:
        return find_plan_with_formats(request)
    return find_plan(request) if request.options.remat is None else find_plan_with_remat(request)


def plan_of_best_shape(judge: Callable[[PlanRequest], Plan] | None, request: PlanRequest) -> Plan:
    """Returns the plan of the best shape of the mesh; where the mesh is given, just the plan for it.

    An earlier plan that the options have is returned if it was made for the same function on one of the shapes.

    Args:
      judge: makes the plan of the best shape, whose search starts with what was found; None keeps what was found.
    """
    options = request.options
    find_and_judge = judge or find_on_mesh
    if not options.candidates:
        return find_and_judge(request)
    if earlier := earlier_plan_of(request):
        return find_and_judge(request.on(options.candidate_with(earlier.mesh_axes)))
    shapes = _searched(request)
    if shapes.best is None:
        first, count = shapes.errors[0], len(shapes.tried)
        where = f"any of {count} shapes of the mesh. The first one" if count > 1 else "the only shape of the mesh"
        raise InfeasibleError(
            f"No plan was found on {where}: {first}",
            is_proven=shapes.lower_bound == math.inf,
        )
    best = shapes.best.result
    if judge is not None:
        chosen = request.on(options.candidate_with(best.mesh_axes))
        rest_s = shapes.deadline.remaining_s()
        best = judge(chosen._replace(options=replace(chosen.options, start=best, time_limit_s=rest_s)))
    return _with_all_shapes(replace(best, search_s=time.perf_counter() - request.start_s), shapes)


def least_step_s(graph: Graph, donated: Sequence[bool], hardware: Hardware, num_devices: int) -> float:
    """Returns a bound on the step of every mesh: the seconds of one device with the whole step, divided by the devices.

    Args:
      donated: for each flat argument, whether its memory may be used again.
    """
    space = ShardingSpace(graph, ("one",), (1,), hardware, {}, tuple(donated))
    whole = [0] * len(space.problem.node_cost)
    return float(space.predict(whole).compute_s.sum()) / num_devices


def _searched(request: PlanRequest) -> OuterSearch[Plan]:
    """Searches all shapes, of which each has an equal part of the remaining time.

    An objective of the user's is the cost itself. No shape is cut off then: a bound on seconds is none on it.
    """
    options, least_s = request.options, 0.0
    if options.objective is not None:
        least_s = -math.inf
    elif options.remat is None and options.formats is None:  # these have other arithmetic
        num_devices = math.prod(options.axis_sizes)
        least_s = least_step_s(request.traced_function.graph, request.space.donated, options.hardware, num_devices)
    _ = request.space.problem  # built before the solver's time begins, as of a single mesh
    shapes = OuterSearch[Plan](options.deadline(), CUT_OFF_GAIN)

    def candidate(shape: MeshCandidate) -> Candidate[Plan]:
        def solve(deadline: Deadline, cut_off_s: float) -> Outcome[Plan]:
            on_shape = request if shape.mesh is options.mesh else request.on(shape)
            alone = replace(on_shape.options, candidates=(), time_limit_s=deadline.remaining_s())
            is_last = len(shapes.tried) == len(options.candidates) - 1
            if options.objective is not None:
                plan = find_on_mesh(on_shape._replace(options=alone, progress=None))
                assert plan.objective is not None
                return Outcome(plan, plan.objective.value, plan.objective.lower_bound, plan.status)
            progress = _progress(shapes, request.progress, least_s, is_last=is_last)
            plan = find_on_mesh(on_shape._replace(options=alone, step_limit_s=cut_off_s, progress=progress))
            return Outcome(plan, plan.step_s, plan.lower_bound_s, plan.status)

        return Candidate(shape.axes, least_s, solve)

    shapes.run([candidate(shape) for shape in options.candidates])
    return shapes


def _with_all_shapes(plan: Plan, shapes: OuterSearch[Plan]) -> Plan:
    """Returns a plan with all shapes, and with the bound of all."""
    tried = sorted(shapes.tried, key=lambda t: (t.cost is None, t.cost or 0.0, t.lower_bound))
    if plan.objective is None:
        by_s = [TriedShape(t.name, t.cost, t.lower_bound, t.search_s, t.status) for t in tried]
        return replace(plan, lower_bound_s=min(plan.step_s, shapes.lower_bound), shapes=tuple(by_s))
    objective = replace(plan.objective, lower_bound=min(plan.objective.value, shapes.lower_bound))
    by_value = []
    for t in tried:
        value = None if t.cost is None else PlannedObjective(objective.name, t.cost, min(t.lower_bound, t.cost))
        by_value.append(TriedShape(t.name, None, 0.0, t.search_s, t.status, value))
    return replace(plan, objective=objective, shapes=tuple(by_value))


def _progress(shapes: OuterSearch[Plan], tell: Progress | None, least_s: float, *, is_last: bool) -> Progress | None:
    """Returns the callback of one shape's solver, which reports the best cost and the least bound of all."""
    if tell is None:
        return None
    best_s = math.inf if shapes.best is None else shapes.best.cost
    others_s = shapes.lower_bound if is_last else least_s

    def progress(seconds: float, cost: float, lower_bound: float) -> None:
        tell(seconds, min(cost, best_s), min(max(lower_bound, least_s), others_s))

    return progress
