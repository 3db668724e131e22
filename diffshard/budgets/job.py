"""A function in several phases: what each costs alone, what moves cost, and what choices for all of them amount to."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cost.base import Link
from cost.evaluation import evaluate
from diffshard.base import OPTIMAL_GAP, InfeasibleError, Solution
from diffshard.budgets.base import Phase, PhasePlans
from diffshard.budgets.joint import MoveSeconds
from diffshard.plans.plan_record import relative_gap
from diffshard.resharding import Devices, Move, links_between, move_s, moved_bytes
from diffshard.sharding_search.call import call_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import start_of
from diffshard.sharding_search.planning import make_plan, solve_problem_of
from diffshard.sharding_search.remat import find_plan_with_remat
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import best_step, step_s
from diffshard.sharding_search.tracing import space_of, trace_call
from search_spaces.base import Choice
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.graph import Value
from search_spaces.sharding.space import ShardingSpace

_NOTE = "Chosen together with the plans of other phases and the moves between them, see `diffshard.elastic.budget`."


class PhaseChoice(NamedTuple):
    """A choice for one phase.

    Attributes:
      step_s: seconds of a step.
    """

    choice: Choice
    step_s: float
    specs: tuple[IndexedSpec, ...]


class JobChoice(NamedTuple):
    """Choices for all phases, with the moves between them and the steps that they make."""

    candidates: tuple[PhaseChoice, ...]
    moves: tuple[Move, ...]
    num_steps: tuple[float, ...]


class PhaseAlone(NamedTuple):
    """A phase without regard to the others.

    Attributes:
      request: of the function; what is computed again is chosen already.
      solution: its fastest step. The bound holds whatever is computed again.
      plan: of the solution, where a search for what is computed again has made it; None without such a search.
    """

    request: PlanRequest
    solution: Solution
    plan: Plan | None


class Job(NamedTuple):
    """A function with its phases. Those that are equal share what they are alone.

    Attributes:
      links: for each move, the links of which the slowest counts.
    """

    phases: tuple[Phase, ...]
    alone: tuple[PhaseAlone, ...]
    devices: tuple[Devices, ...]
    links: tuple[tuple[Link, ...], ...]

    @property
    def has_durations(self) -> bool:
        """Whether phases last for a time, so that the number of steps counts."""
        return self.phases[0].duration_s is not None

    @property
    def spaces(self) -> list[ShardingSpace]:
        """The space of each phase."""
        return [phase.request.space for phase in self.alone]

    @property
    def is_state(self) -> list[bool]:
        """Returns for each flat argument whether it goes from phase to phase."""
        return self.alone[0].request.traced_function.is_state

    @property
    def _state_bytes(self) -> int:
        arrays = zip(self.spaces[0].graph.inputs, self.is_state, strict=True)
        return sum(vertex.results[0].num_bytes for vertex, is_state in arrays if is_state)

    @property
    def most_preference_s(self) -> float:
        """The most that preferences add to the cost of the joint problem."""
        return sum(space.most_preference_s for space in self.spaces)

    @property
    def bound(self) -> float:
        """A bound from each phase alone: the least seconds, or the most steps, if moves took no time."""
        least_s = [max(one.solution.lower_bound - one.request.space.most_preference_s, 0.0) for one in self.alone]
        if self.has_durations:
            return sum(
                phase.duration_s / s if s else float("inf")
                for phase, s in zip(self.phases, least_s, strict=True)
                if phase.duration_s
            )
        return sum(phase.num_steps * s for phase, s in zip(self.phases, least_s, strict=True) if phase.num_steps)

    @property
    def moves_s(self) -> list[MoveSeconds]:
        """The seconds of one array's move into each phase but the first, as functions."""
        return [lambda *array, i=i: self._array_move(i, *array)[0] for i in range(1, len(self.phases))]

    def candidate(self, phase: int, choice: Sequence[int]) -> PhaseChoice:
        """Returns a choice for a phase with its price."""
        space = self.spaces[phase]
        return PhaseChoice(tuple(choice), step_s(space.predict(choice)), space.layout(choice).input_specs)

    def outcome(self, candidates: Sequence[PhaseChoice]) -> JobChoice:
        """Returns the total of choices for all phases."""
        moves = [self.move(i, candidates[i - 1], candidates[i]) for i in range(1, len(candidates))]
        seconds = (0.0, *(move.seconds for move in moves))
        num_steps = [self.num_steps(i, *pair) for i, pair in enumerate(zip(candidates, seconds, strict=True))]
        return JobChoice(tuple(candidates), tuple(moves), tuple(num_steps))

    def num_steps(self, phase: int, candidate: PhaseChoice, move_s: float) -> float:
        """Returns the steps of a phase after a move into it; 0 where the move takes longer than the phase."""
        steps, duration_s = self.phases[phase].num_steps, self.phases[phase].duration_s
        if steps is not None or duration_s is None:
            return float(steps or 0)
        if not candidate.step_s:
            name = self.alone[phase].request.options.hardware.name
            raise ValueError(
                f"`Phase.duration_s` {duration_s!r} of phase {phase} has no number of steps: a step takes no time by "
                f"the rates of the hardware {name!r}. Give `num_steps`, or hardware with rates."
            )
        return max(duration_s - move_s, 0.0) / candidate.step_s

    def cost(self, phase: int, candidate: PhaseChoice, move_s: float) -> float:
        """Returns the share of a phase and the move into it in the total: seconds, or steps, counted negative."""
        num_steps = self.num_steps(phase, candidate, move_s)
        return -num_steps if self.has_durations else num_steps * candidate.step_s + move_s

    def total(self, outcome: JobChoice) -> float:
        """Returns the seconds of all steps and moves, or the number of steps, which counts as negative."""
        moves_s = (0.0, *(move.seconds for move in outcome.moves))
        return sum(self.cost(i, *pair) for i, pair in enumerate(zip(outcome.candidates, moves_s, strict=True)))

    def move(self, phase: int, before: PhaseChoice, after: PhaseChoice) -> Move:
        """Returns the move of the state into a phase."""
        arrays = zip(self.spaces[phase].graph.inputs, before.specs, after.specs, self.is_state, strict=True)
        moves = [self._array_move(phase, vertex.results[0], b, a) for vertex, b, a, is_state in arrays if is_state]
        return Move(sum(s for s, _ in moves), sum(n for _, n in moves), sum(n > 0 for _, n in moves))

    def plans(self, outcome: JobChoice) -> PhasePlans:
        """Writes an outcome down as plans."""
        plans, keys = {}, []
        for (request, solution, alone), candidate in zip(self.alone, outcome.candidates, strict=True):
            choice = candidate.choice
            key = id(request), choice
            keys.append(key)
            if key not in plans and tuple(solution.choice) == choice:
                plans[key] = make_plan(request, solution) if alone is None else alone
            elif key not in plans:
                plan = make_plan(request, solution._replace(choice=choice, status="finished"))
                if alone is not None:
                    plan = replace(plan, remat=alone.remat, function_digest=alone.function_digest)
                plans[key] = replace(plan, notes=(*plan.notes, _NOTE))
        return PhasePlans(tuple(plans[key] for key in keys), outcome.moves, outcome.num_steps)

    def _array_move(self, phase: int, value: Value, before: IndexedSpec, after: IndexedSpec) -> tuple[float, float]:
        """Returns the seconds of one array's move, and the bytes that are sent."""
        pairs = (self.devices[phase - 1], before), (self.devices[phase], after)
        moved = moved_bytes(value.shape, value.num_bytes, *pairs)
        share = value.num_bytes / max(self._state_bytes, 1)
        return move_s(moved, self.links[phase - 1], share), float(moved.sent.sum())


def requests_of(all_options: Sequence[Options], args: Sequence[Any]) -> tuple[PlanRequest, ...]:
    """Traces the function for each phase; those that are planned alike share a request.

    Raises:
      ValueError: the function does not return the state that it changes; or as in `search`.
    """
    requests: list[PlanRequest] = []
    for options in all_options:
        known = next((request for request in requests if _is_same(request.options, options)), None)
        if known is None:
            start_s = time.perf_counter()
            traced_function = trace_call(options, call_of(options, args, {}), _refuse_lost_changes)
            known = PlanRequest(options, traced_function, space_of(options, traced_function), start_s)
        requests.append(known)
    return tuple(requests)


def job_of(phases: Sequence[Phase], requests: Sequence[PlanRequest], move_link: Link | None) -> Job:
    """Solves each different phase alone.

    Raises:
      InfeasibleError: no plan fits the memory limit of a phase.
      ValueError: no link is known over which state could move.
    """
    links = tuple(
        _links_between(i + 1, (phases[i], requests[i].options), (phases[i + 1], requests[i + 1].options), move_link)
        for i in range(len(phases) - 1)
    )
    known: dict[int, PhaseAlone] = {}
    for i, request in enumerate(requests):
        if id(request) not in known:
            known[id(request)] = _solve_alone(i, request)
    devices = tuple(
        Devices(phase.devices, request.options.axis_sizes) for phase, request in zip(phases, requests, strict=True)
    )
    return Job(tuple(phases), tuple(known[id(request)] for request in requests), devices, links)


def _is_same(one: Options, other: Options) -> bool:
    """Returns whether two phases are planned alike: they differ in their mesh, hardware and limit only."""
    return (one.mesh, one.hardware, one.memory_limit_bytes) == (other.mesh, other.hardware, other.memory_limit_bytes)


def _solve_alone(phase: int, request: PlanRequest) -> PhaseAlone:
    options, space = request.options, request.space
    try:
        if options.remat is not None:
            return _with_remat(request, find_plan_with_remat(request))
        solution = best_step(
            space,
            lambda problem, start, gap: solve_problem_of(options, problem, space, start, None, gap),
            options.memory_limit_bytes,
            OPTIMAL_GAP,
        )
    except InfeasibleError as error:
        raise InfeasibleError(f"Phase {phase}: {error}") from None
    return PhaseAlone(request, solution, None)


def _with_remat(request: PlanRequest, plan: Plan) -> PhaseAlone:
    """Returns the phase of a plan that computes something again, as a choice of the space of that function."""
    request = request.with_recomputed(plan)
    start = start_of(plan, request.space)
    assert start is not None
    choice = tuple(start.choice.tolist())
    cost = float(evaluate(request.space.problem, choice).cost)
    bound = plan.lower_bound_s + request.space.most_preference_s
    solution = Solution(choice, cost, bound, relative_gap(cost, bound), True, 0.0, (), plan.status)
    return PhaseAlone(request, solution, plan)


def _refuse_lost_changes(sentence: str) -> None:
    raise ValueError(
        f"`fn` of `budget` must return the state that it changes. {sentence} Return it beside the result; or give "
        "modules that are changed in place to `diffshard.nnx.budget`."
    )


def _links_between(
    phase: int, before: tuple[Phase, Options], after: tuple[Phase, Options], move_link: Link | None
) -> tuple[Link, ...]:
    """Returns the links over which state may move into a phase."""
    if move_link is not None:
        return (move_link,)
    links = links_between(*((options.hardware, options.mesh.shape) for _, options in (before, after)))
    if not links and before[0].devices != after[0].devices:
        raise ValueError(
            f"`move_link` must be given: phases {phase - 1} and {phase} have one device each, of the numbers "
            f"{before[0].devices[0]} and {after[0].devices[0]}, and no mesh axis says how they are linked."
        )
    return links
