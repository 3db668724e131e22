"""The search for what goes from forward to backward: what is kept in memory, and what is computed again.

What to compute again and how to split arrays depend on each other: a value that is split eight ways takes an eighth of
the memory, and a product that waits for a collective takes longer to run again. So the two take turns. A first sharding
says what each value takes and each operation costs; minimum cuts give the choices that are best for some price of
memory, from keeping everything to keeping the least (`rematerialisation.choices`). Each choice is a program of its own,
whose space is searched like any other. Of those from the first that fits the memory limit on, some that lie evenly are
tried, and then more beside the fastest. One easier problem bounds all choices (`rematerialisation.choices`).

With `remat="offload"` each of these choices is also tried with a part of what it keeps offloaded to the host's memory,
as much as the link can copy beside the forward pass (`rematerialisation.offloading`).
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np

from cost.base import Problem
from cost.memory import least_memory
from diffshard.base import Deadline, InfeasibleError, Proposal, Solution
from diffshard.outer_search import Candidate, CutOffError, Outcome, OuterSearch
from diffshard.plans.sections import How, Rematerialisation, Residual
from diffshard.plans.summary import modules_of
from diffshard.sharding_search.fingerprints import function_digest
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import earlier_plan_of
from diffshard.sharding_search.planning import (
    LAST_PROBLEM_SHARE,
    fastest_choice,
    make_plan,
    memory_advice,
    solve_problem_of,
)
from diffshard.sharding_search.request import PlanRequest
from diffshard.solving.solve import DEFAULT_SOLVER
from diffshard.solving.solvers import gradient
from search_spaces.rematerialisation.choices import Network, RematChoice, relaxed_problem
from search_spaces.rematerialisation.offloading import HostLink, offloadable, offloading
from search_spaces.rematerialisation.passes import Passes, passes_of, regions_of
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.spec import local_bytes

_EVEN_SEARCHES = 4
"""Choices that are searched first: evenly from the first that fits to the one that keeps the least."""
_MOST_SEARCHES = 8
"""Choices that are searched at most; each takes as long as a search without rematerialisation."""
_SHARES = (0.5, 1.0)
"""Parts of the forward pass's seconds in which the link to the host may copy, for which choices are made."""
_NEAR = 1e-3
"""A plan this close to the bound is not improved any further."""


def find_plan_with_remat(request: PlanRequest) -> Plan:
    """Searches for a sharding and for what is computed again, and writes both down as a plan.

    Raises:
      InfeasibleError: no choice fits the memory limit; says how much memory would do.
      CutOffError: no plan is shorter than the limit of the request.
    """
    return earlier_plan_of(request) or _Search(request).run()


def _bounding(problem: Problem, *, time_limit_s: float | None, key: jax.Array) -> Iterator[Proposal]:
    """Raises the bound of a problem whose choices nobody needs."""
    return gradient.solve(problem, time_limit_s=time_limit_s, key=key, phases=lambda _: ())


_Found = tuple[Plan, RematChoice]


class _Search:
    """A search for the fastest choice of what is computed again."""

    def __init__(self, request: PlanRequest):
        self.options = request.options
        is_default = self.options.solver == DEFAULT_SOLVER
        self.quick = (
            request._replace(options=replace(self.options, solver=gradient.solve_quickly)) if is_default else request
        )
        self.bounding = _bounding if is_default else self.options.solver
        self.request = request
        _ = request.space.problem  # built before the solver's time begins
        self.plans = OuterSearch[_Found](self.options.deadline(), _NEAR, LAST_PROBLEM_SHARE)
        self.passes = passes_of(request.traced_function.graph)
        self.requests: dict[int, PlanRequest] = {0: self.quick}
        self.least_bytes: dict[int, float] = {}

    @property
    def deadline(self) -> Deadline:
        """The deadline of the whole search."""
        return self.plans.deadline

    def run(self) -> Plan:
        request = self.request
        plan, reference = self._without_remat()
        self.plans.is_interrupted = reference.status == "interrupted"
        network = self._network(reference)
        if self._link is not None:
            network.freeable |= offloadable(network, self.passes)
        bound_s = self._bound_s(network) if self.passes else 0.0 if plan is None else plan.lower_bound_s
        if bound_s >= request.step_limit_s:
            raise CutOffError(bound_s)
        choices = self._choices(network)
        if plan is not None:
            self.plans.best = Outcome((plan, choices[0]), plan.step_s, bound_s, plan.status)
        self.plans.run(self._candidates(choices, bound_s))
        if self.plans.best is None:
            raise self._infeasible(min(self.least_bytes.values()))
        plan, choice = self.plans.best.result
        bound_s = min(max(bound_s, 0.0), plan.step_s)
        return replace(
            plan,
            lower_bound_s=bound_s,
            status=plan.status if plan.step_s <= (1 + 1e-7) * bound_s or plan.status != "optimal" else "finished",
            search_s=time.perf_counter() - request.start_s,
            function_digest=function_digest(request.traced_function),
            remat=record_of(network, self.passes, choice, self._link),
        )

    def _choices(self, network: Network) -> list[RematChoice]:
        """Returns choices that take less memory the more seconds they take; the first one keeps everything.

        What a region makes is in memory at once, so a choice takes what it keeps and its largest region.
        """
        choices = [network.candidate(frozenset())]
        if self.passes:
            hull = network.candidates()
            choices += hull
            for more, less in pairwise(hull):
                choices += network.between(more, less)
            for one in self.passes:
                choices += network.at_narrow_places(one)
        if self._link is not None:
            link = self._link
            offloaded = (
                offloading(network, self.passes, choice, link, share) for choice in choices for share in _SHARES
            )
            choices = choices + [choice for choice in offloaded if choice is not None]
        best, least = [], math.inf
        for choice in sorted(choices, key=lambda c: (c.seconds, c.kept_bytes)):
            largest = 0.0
            for one in self.passes:
                for region in regions_of(one, choice.recomputed):
                    sizes = [network.bytes[v.id] / one.length for v in region.outputs]
                    largest = max(largest, sum(size for size in sizes if np.isfinite(size)))
            if choice.kept_bytes + largest < least or not best:
                least = choice.kept_bytes + largest
                best.append(choice)
        return best

    @property
    def _link(self) -> HostLink | None:
        """The way to the host's memory, if arrays may be offloaded."""
        rate, exposed_share = self.options.hardware.host_memory_bytes_per_s, self.options.hardware.exposed_share
        return None if rate is None or self.options.remat != "offload" else HostLink(1 / rate, exposed_share)

    def _without_remat(self) -> tuple[Plan | None, Solution]:
        """Returns the plan that keeps everything, None if none fits, and a choice that says what values take."""
        wider = replace(self.quick.options, memory_limit_bytes=math.inf)
        free = fastest_choice(self.quick._replace(options=wider), self.deadline)
        space, limit = self.request.space, self.options.memory_limit_bytes
        if space.summarize(free.choice).peak_bytes <= limit:
            return self._plan(self.request, free), free
        if float(np.max(least_memory(space.problem)[1])) > limit:
            return None, free
        try:
            return self._plan(self.request, fastest_choice(self.quick, self.deadline)), free
        except InfeasibleError:
            return None, free

    def _plan(self, request: PlanRequest, solution: Solution) -> Plan:
        return make_plan(request._replace(options=self.options), solution)

    def _network(self, reference: Solution) -> Network:
        space = self.request.space
        layout, prediction = space.layout(reference.choice), space.predict(reference.choice)
        seconds = prediction.compute_s.copy()
        for transfer in prediction.transfers:
            seconds[transfer.vertex] += transfer.seconds

        def step_s(vertex: Vertex) -> float:
            return float(seconds[vertex.index])

        def kept_bytes(value: Value) -> float:
            return local_bytes(value, layout.value_specs[value.id], space.axis_sizes)

        def is_written(value: Value) -> bool:
            return bool(space.lifetimes.is_written[value.id])

        return Network(space.graph, self.passes, step_s, kept_bytes, is_written)

    def _bound_s(self, network: Network) -> float:
        """Returns seconds that no choice of shardings and of what is computed again stays below.

        Raises:
          InfeasibleError: no such choice fits the memory limit.
        """
        space, options = self.request.space, self.options
        problem = relaxed_problem(space, self.passes, network)
        least = float(np.max(least_memory(problem)[1]))
        if least > options.memory_limit_bytes:
            raise self._infeasible(least, is_proven=True)
        limited = replace(options, time_limit_s=self.deadline.remaining_s(), solver=self.bounding)
        try:
            solution = solve_problem_of(limited, problem, space, None, None)
        except InfeasibleError:
            return 0.0
        return max(solution.lower_bound - space.most_preference_s, 0.0)

    def _candidates(self, choices: Sequence[RematChoice], bound_s: float) -> Iterator[Candidate[_Found]]:
        """Makes candidates of choices, each from the steps of those before; at most some are searched."""
        first = 1 if self.plans.best is not None else _first_that_fits(len(choices), lambda i: self._fits(i, choices))
        if first is None:
            return
        seconds: dict[int, float] = {}

        def solve(i: int) -> Outcome[_Found]:
            if not self._fits(i, choices):
                raise self._infeasible(self.least_bytes[i])
            plan = self._plan(self.requests[i], fastest_choice(self.requests[i], self.deadline))
            seconds[i] = plan.step_s
            return Outcome((plan, choices[i]), plan.step_s, bound_s, plan.status)

        while (
            len(seconds) < _MOST_SEARCHES
            and not self.plans.is_over
            and bound_s < self.plans.cut_off
            and (i := _next_choice(seconds, first, len(choices) - 1)) is not None
        ):
            seconds[i] = math.inf
            yield Candidate(i, bound_s, lambda _, __, i=i: solve(i))

    def _fits(self, i: int, choices: Sequence[RematChoice]) -> bool:
        if i not in self.requests:
            self.requests[i] = self.quick.with_recomputed(choices[i])
        self.least_bytes[i] = float(np.max(least_memory(self.requests[i].space.problem)[1]))
        return self.least_bytes[i] <= self.options.memory_limit_bytes

    def _infeasible(self, least_bytes: float, *, is_proven: bool = False) -> InfeasibleError:
        """Returns the error that no plan fits, with the least memory that was found to do."""
        options, proven = self.options, "at least" if is_proven else "about"
        return InfeasibleError(
            f"`memory_limit_bytes` is {options.memory_limit_bytes:,.0f}, but whatever is computed again, "
            f"{options.function_name} on the mesh {dict(options.mesh.shape)} needs {proven} {least_bytes:,.0f} bytes "
            f"on each device. {memory_advice(self.request.space, options)}",
            is_proven=is_proven,
        )


def _next_choice(seconds: Mapping[int, float], first: int, last: int) -> int | None:
    """Returns which of some choices to search next, given the steps of those that were; None if there is no other.

    >>> [_next_choice(dict.fromkeys(range(10, 10 + n), 1.0), 10, 13) for n in range(5)]
    [10, 11, 12, 13, None]
    >>> _next_choice({0: 5.0, 10: 3.0, 20: 4.0, 30: 6.0}, 0, 30)
    5
    """
    even = (round(first + (last - first) * part / (_EVEN_SEARCHES - 1)) for part in range(_EVEN_SEARCHES))
    if (missing := next((i for i in even if i not in seconds), None)) is not None:
        return missing if missing <= last else None
    fastest = min(seconds, key=lambda i: seconds[i])
    below = max((i for i in seconds if i < fastest), default=fastest)
    above = min((i for i in seconds if i > fastest), default=fastest)
    middle = (below + fastest) // 2 if fastest - below >= above - fastest else (fastest + above + 1) // 2
    return None if middle in seconds else middle


def _first_that_fits(count: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the first of some choices, from those that keep the most to the least, that fits; None if none does.

    The least memory falls at first, and may rise at the end, where so much is computed again at once that it fills the
    memory itself. So where the last choice does not fit, the others are tried from there on.
    """
    high = next((i for i in reversed(range(count)) if fits(i)), None)
    if high is None:
        return None
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return high


def record_of(
    network: Network, passes: Sequence[Passes], candidate: RematChoice, link: HostLink | None
) -> Rematerialisation:
    """Returns the values that are kept, computed again and offloaded, those of the same line of code together.

    Args:
      link: to the host's memory; None if nothing can be offloaded.
    """
    graph = network.graph
    groups: dict[tuple[str, str, How], list[tuple[float, float, float]]] = defaultdict(list)
    length = {v.id: one.length for one in passes for step in one.forward for v in step.results}
    offloaded = {value for value, *_ in candidate.offloaded}
    counted: set[int] = set()
    for value in sorted(candidate.kept | offloaded | network.needed):
        key = network.maker.get(value)
        is_again = key in candidate.recomputed
        how: How = "offloaded" if value in offloaded else "recomputed" if is_again else "kept"
        if how == "kept" and (value not in candidate.kept or not network.bytes[value]):
            continue
        vertex = graph.vertices[graph.values[value].vertex]
        num_bytes = network.bytes[value] if np.isfinite(network.bytes[value]) else 0.0
        seconds = 0.0
        if how == "offloaded" and link is not None:
            seconds = link.wait_s(num_bytes)
        elif how == "recomputed" and key not in counted and key is not None:
            seconds = network.steps[key]
            counted.add(key)
        groups[_name(vertex), vertex.user_source, how].append((num_bytes, seconds, length.get(value, 1)))
    residuals = [
        Residual(name, source, how, int(sum(n for *_, n in rows)), sum(b for b, *_ in rows), sum(s for _, s, _ in rows))
        for (name, source, how), rows in groups.items()
    ]
    residuals.sort(key=lambda r: (-r.num_bytes, r.name, r.how))
    return Rematerialisation(
        tuple(sorted(candidate.recomputed)),
        tuple(residuals),
        candidate.seconds,
        candidate.kept_bytes,
        tuple((value, gone, back) for value, gone, back in candidate.offloaded),  # plain tuples, as JSON has them
        candidate.host_bytes,
    )


def _name(vertex: Vertex) -> str:
    """Returns the modules and the operation of a vertex, without the numbers of layers."""
    modules = "/".join(modules_of(vertex.scope))
    return re.sub(r"\d+", "*", f"{modules}/{vertex.primitive or vertex.kind}".lstrip("/"))
