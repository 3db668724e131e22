"""The search over the shapes of a mesh: each physically distinct one is searched, until its bound shows that it loses.

The function is traced once. A plan of one shape is a limit for the next ones: where the dual's bound of a shape reaches
it, no plan on that mesh is predicted to be faster, and its search ends. The smallest bound of all shapes bounds the
whole search. A shape for which there was no time has the bound of one device's seconds, divided by the devices:
splitting an operation over n devices leaves each of them at least 1/n of its arithmetic and of its memory traffic.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost.base import Hardware
from cost.memory import least_memory
from diffshard.base import InfeasibleError
from diffshard.plans.base import TriedShape
from diffshard.sharding_search.mesh_candidates import MeshCandidate
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planning import find_plan
from diffshard.sharding_search.request import CutOffError, PlanRequest
from diffshard.sharding_search.warm_start import is_made_for
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.space import ShardingSpace

CUT_OFF_GAIN = 1e-4
"""A shape is searched on only while it may be faster by this share: as much as equal layers may cost (`TIE_GAP`)."""


def plan_of_best_shape(find: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """Returns the plan of the best shape of the mesh; where the mesh is given, just the plan of `find`.

    An earlier plan that the options have is returned if it was made for the same function on one of the shapes.

    Args:
      find: makes the plan of the best shape, which is the start of its search. Shapes are compared by `find_plan`.
      request: with the candidates in its options.

    Raises:
      InfeasibleError: no plan of any shape fits the memory limit; or as `find`.
    """
    options = request.options
    if not options.candidates:
        return find(request)
    start = options.start
    if isinstance(start, Plan) and is_made_for(start, request):
        return find(request.on(options.candidate_with(start.mesh_axes)))
    shapes = _Shapes(request)
    for number, candidate in enumerate(options.candidates):
        shapes.search(candidate, len(options.candidates) - number)
    best = shapes.result()
    if find is find_plan:
        return best
    chosen = request.on(options.candidate_with(best.mesh_axes))
    judged = find(
        chosen._replace(options=replace(chosen.options, start=best, time_limit_s=shapes.deadline.remaining_s()))
    )
    return shapes.with_joint_bound(judged)


def least_step_s(graph: Graph, donated: Sequence[bool], hardware: Hardware, num_devices: int) -> float:
    """Returns a bound on the step of every mesh: the seconds of one device with the whole step, divided by the devices.

    Args:
      graph: the traced function.
      donated: for each flat argument, whether its memory may be used again.
      hardware: of a device.
      num_devices: of the mesh.
    """
    space = ShardingSpace(graph, ("one",), (1,), hardware, {}, tuple(donated))
    whole = [0] * len(space.problem.node_cost)
    return float(space.predict(whole).compute_s.sum()) / num_devices


@dataclass
class _Shapes:
    """The shapes of one search; mutable.

    Attributes:
      request: with the candidates in its options.
      best: the best plan so far.
      tried: what became of each shape.
      infeasible: the errors of shapes without a plan.
    """

    request: PlanRequest
    best: Plan | None = None
    tried: list[TriedShape] = field(default_factory=list)
    infeasible: list[InfeasibleError] = field(default_factory=list)

    def __post_init__(self):
        request = self.request
        num_devices = math.prod(request.options.axis_sizes)
        self._least_s = least_step_s(
            request.traced_function.graph, request.space.donated, request.options.hardware, num_devices
        )
        _ = request.space.problem  # built before the solver's time begins, as of a single mesh
        self.deadline = request.options.deadline()

    def search(self, candidate: MeshCandidate, num_left: int) -> None:
        """Searches one shape with an equal part of the remaining time, of which `num_left` shapes have one each."""
        begin_s = time.perf_counter()
        if self.best is not None and self.deadline.is_over():
            self._add(candidate, None, self._least_s, begin_s, "not tried")
            return
        request = self.request
        request = request if candidate.mesh is request.options.mesh else request.on(candidate)
        options = replace(request.options, candidates=(), time_limit_s=self.deadline.remaining_s(1 / num_left))
        limit_s = math.inf if self.best is None else (1 - CUT_OFF_GAIN) * self.best.step_s
        progress = self._progress(is_last=num_left == 1)
        request = request._replace(options=options, step_limit_s=limit_s, progress=progress)
        try:
            plan = find_plan(request)
        except CutOffError as cut_off:
            self._add(candidate, None, cut_off.lower_bound_s, begin_s, "cut off")
        except InfeasibleError as error:
            self.infeasible.append(error)
            least_bytes = float(np.max(least_memory(request.space.problem)[1]))
            if least_bytes > options.memory_limit_bytes:
                self._add(candidate, None, math.inf, begin_s, "infeasible")
            else:
                self._add(candidate, None, self._least_s, begin_s, "no plan")
        else:
            self._add(candidate, plan.step_s, max(plan.lower_bound_s, self._least_s), begin_s, plan.status)
            if self.best is None or plan.step_s < self.best.step_s:
                self.best = plan

    def result(self) -> Plan:
        """Returns the best plan with all shapes, and with the bound of all.

        Raises:
          InfeasibleError: there is none.
        """
        if self.best is None:
            first = self.infeasible[0]
            count = len(self.tried)
            raise InfeasibleError(f"No plan was found on any of {count} shapes of the mesh. The first one: {first}")
        return self.with_joint_bound(replace(self.best, search_s=time.perf_counter() - self.request.start_s))

    def with_joint_bound(self, plan: Plan) -> Plan:
        """Returns a plan with all shapes, and with the bound of all."""
        bound_s = min(plan.step_s, *(shape.lower_bound_s for shape in self.tried))
        shapes = sorted(self.tried, key=lambda s: (s.step_s is None, s.step_s or 0.0, s.lower_bound_s))
        gap = (plan.step_s - bound_s) / plan.step_s if plan.step_s else 0.0
        return replace(plan, lower_bound_s=bound_s, gap=gap, shapes=tuple(shapes))

    def _add(
        self, candidate: MeshCandidate, step_s: float | None, lower_bound_s: float, begin_s: float, status: str
    ) -> None:
        search_s = time.perf_counter() - begin_s
        self.tried.append(TriedShape(candidate.axes, step_s, lower_bound_s, search_s, status))

    def _progress(self, *, is_last: bool) -> Callable[[float, float, float], None] | None:
        """Returns what the solver of one shape tells its progress to: the best cost and the least bound of all."""
        tell = self.request.progress
        if tell is None:
            return None
        best_s = math.inf if self.best is None else self.best.step_s
        others_s = min((shape.lower_bound_s for shape in self.tried), default=math.inf) if is_last else self._least_s

        def progress(seconds: float, cost: float, lower_bound: float) -> None:
            tell(seconds, min(cost, best_s), min(max(lower_bound, self._least_s), others_s))

        return progress
