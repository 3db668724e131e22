"""Descent on the timeline in place of the sum: does it find plans whose programs take less time?

    python -m experiments.timeline_descent [--models decoder "mixture of experts"] [--meshes 4x8 8x8]

A step as priced is a sum, in which a collective beside arithmetic counts by a fixed share of its time. The timeline of
an ideal schedule is no sum, but a maximum of sums, and therefore convex in the seconds of arithmetic and of links
(`IdealTimeline`). Its gradient at a plan tells which operations and which collectives are on the critical path. Here
problems with these weights, and with mixtures of them and the sum's, are solved one after the other from the plan that
the sum has found. Every plan is judged by its own device program, played without compiling it (`plan.timeline`).
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

import diffshard
from cost.base import Problem
from cost.quantities import Quantity, WeightedSums
from cost.streams import play
from diffshard.base import Solution
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.plans.base import Executor
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.planning import fastest_choice, find_plan, make_plan, solve_problem_of
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from experiments.host_devices import parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.graph import Value, is_contraction
from search_spaces.sharding.program_steps import links_of_axes
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.step_quantities import BLOCKING, COMPUTE, OVERLAPPED

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Weights of the timeline's gradient; the rest is the sum."""
_ROUNDS = 3
_GAP = 1e-3


class Transfer(NamedTuple):
    """The transfer of a choice for one node or edge.

    Attributes:
      after: the place in the program from which on it can be sent.
      by: the place that reads it.
      seconds: `[A]` by mesh axis.
    """

    after: int
    by: int
    seconds: np.ndarray


class Weights(NamedTuple):
    """A gradient of the timeline: `[P]` of the arithmetic at each place, and of what nodes and edges send, `[., A]`."""

    compute: np.ndarray
    nodes: np.ndarray
    edges: np.ndarray


class IdealTimeline:
    """The seconds of a step in an ideal schedule: arithmetic in program order, and links that never wait needlessly.

    The arithmetic at place j starts when that at j - 1 has ended, and no sooner than r_i + Σ of all that a link has to
    send between the places i and j, for every i, where r_i is when the result of place i is there. What can be sent at
    any time, such as weights, can be sent from the beginning. This is what a link needs even if it is never idle in
    vain, so that no real schedule in this order is faster. Operations that are no products run as late as their readers
    let them, as programs run them.

    Args:
      space: of the step.
    """

    def __init__(self, space: ShardingSpace):
        self.space = space
        self.quantities = {
            name: quantity for name, quantity in space.quantities.items() if isinstance(quantity, Quantity)
        }
        self.links = links_of_axes(space.node_costs)
        self.num_places = len(space.graph.vertices)
        place, is_stored = self._places()
        vertex = [node.vertex.index for node in space.nodes]
        self.place = place[vertex]
        self.node_after = np.where(is_stored[vertex], 0, self.place + 1)
        self.node_by = np.full(len(vertex), self.num_places)
        is_shared = [node.shared_value is not None for node in space.nodes]
        ends_of = {(edge.node, edge.reader): edge for edge in space.edges if edge.node != edge.reader}
        for node, reader in ends_of:
            if self.place[reader] > self.place[node]:
                self.node_by[node] = min(self.node_by[node], self.place[reader])
        self.edge_after, self.edge_by = (np.zeros(len(space.problem.edge_nodes), int) for _ in range(2))
        for k, (u, v) in enumerate(np.asarray(space.problem.edge_nodes).reshape(-1, 2).tolist()):
            node, reader = (u, v) if (u, v) in ends_of else (v, u)
            goes_back = space.nodes[reader].vertex.kind == "input" and not is_shared[reader]  # to the next step
            by = self.node_by[reader] if is_shared[reader] else self.place[reader]
            self.edge_after[k] = self.node_after[node]
            self.edge_by[k] = max(self.num_places if goes_back else by, self.edge_after[k])
        self.node_by = np.maximum(self.node_by, self.node_after)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the place of each vertex in the program, and whether it is made of stored arrays without products."""
        vertices = self.space.graph.vertices
        is_stored, late = np.zeros(len(vertices), bool), np.arange(len(vertices), dtype=float)
        readers: dict[int, list[int]] = defaultdict(list)
        for vertex in vertices:
            operands = [o.vertex for o in vertex.operands if isinstance(o, Value)]
            for operand in operands:
                readers[operand].append(vertex.index)
            is_leaf = vertex.kind in ("input", "constant")
            is_stored[vertex.index] = is_leaf or (not is_contraction(vertex) and bool(np.all(is_stored[operands])))
        for vertex in reversed(vertices):
            if not is_contraction(vertex) and vertex.kind != "input":
                after = [late[i] for i in readers[vertex.index] if i > vertex.index]
                late[vertex.index] = max(late[vertex.index], min(after, default=len(vertices)))
        place = np.empty(len(vertices), int)
        place[np.argsort(late, kind="stable")] = np.arange(len(vertices))
        return place, is_stored

    def amounts(self, choice: np.ndarray) -> tuple[np.ndarray, list[Transfer]]:
        """Returns the seconds of arithmetic at each place, `[P]`, and what is sent."""
        quantities, compute_s, sent = self.quantities, np.zeros(self.num_places), []
        blocking, overlapped = quantities[BLOCKING], quantities[OVERLAPPED]
        for v, s in enumerate(choice.tolist()):
            compute_s[self.place[v]] += quantities[COMPUTE].node[v][s]
            seconds = blocking.node[v][s] + overlapped.node[v][s]
            if seconds.any():
                sent.append(Transfer(int(self.node_after[v]), int(self.node_by[v]), seconds))
        ends = choice[np.asarray(self.space.problem.edge_nodes).reshape(-1, 2)].tolist()
        for k, (s, t) in enumerate(ends):
            seconds = blocking.edge[k][s, t] + overlapped.edge[k][s, t]
            if seconds.any():
                sent.append(Transfer(int(self.edge_after[k]), int(self.edge_by[k]), seconds))
        return compute_s, sent

    def seconds(self, compute_s: np.ndarray, sent: Sequence[Transfer]) -> tuple[float, Weights]:
        """Returns the seconds of the step, and the gradient, which is that of one critical path."""
        size, num_links = self.num_places, max(max(links) for links in self.links)
        by_place: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in sent:
            by_place[transfer.by].append(transfer)
        there_s, start_s = np.zeros(size + 1), np.zeros(size + 1)  # `there_s[j]`: the result of place j - 1 is there
        busy_s = np.zeros((num_links, size + 1))  # from each place until the current one
        before: list[tuple[int, int | None]] = [(-1, None)] * (size + 1)
        for j in range(size + 1):
            there_s[j] = start_s[j - 1] + compute_s[j - 1] if j else 0.0
            start_s[j] = there_s[j]
            for after, _, seconds in by_place[j]:
                if there_s[after] + seconds.sum() > start_s[j]:
                    start_s[j], before[j] = there_s[after] + seconds.sum(), (after, None)
                for axis in np.flatnonzero(seconds):
                    for link in self.links[axis]:
                        busy_s[link - 1, : after + 1] += seconds[axis]
            for link in range(num_links if by_place[j] else 0):
                i = int(np.argmax(there_s[: j + 1] + busy_s[link, : j + 1]))
                if busy_s[link, i] and there_s[i] + busy_s[link, i] > start_s[j]:
                    start_s[j], before[j] = there_s[i] + busy_s[link, i], (i, link + 1)
        return float(start_s[size]), self._weights(before)

    def _weights(self, before: Sequence[tuple[int, int | None]]) -> Weights:
        """Returns 1 for what is on the path that ends last, and 0 for the rest."""
        num_axes, j = len(self.links), self.num_places
        weights = Weights(
            np.zeros(j), np.zeros((len(self.place), num_axes)), np.zeros((len(self.edge_after), num_axes))
        )
        while j > 0:
            i, link = before[j]
            if i < 0:
                i = j
            else:
                for axis, links in enumerate(self.links):
                    for of_kind, after, by in (
                        (weights.nodes, self.node_after, self.node_by),
                        (weights.edges, self.edge_after, self.edge_by),
                    ):
                        if link is None:
                            of_kind[(after == i) & (by == j), axis] = 1
                        elif link in links:
                            of_kind[(after >= i) & (by <= j), axis] = 1
            j = i - 1
            if j >= 0:
                weights.compute[j] = 1
        return weights

    def tangent(self, weights: Weights, share: float) -> Problem:
        """Returns the problem whose cost is a share of the weighted seconds, and for the rest the sum."""
        space, quantities = self.space, self.quantities
        sums = space.problem if share < 1 else space.preference_problem
        node_cost = WeightedSums([(1 - share) * c if share < 1 else c for c in sums.node_cost])
        edge_cost = WeightedSums([(1 - share) * c if share < 1 else c for c in sums.edge_cost])
        columns: dict[tuple[int, int], np.ndarray] = {}

        def column(array: np.ndarray, axis: int) -> np.ndarray:
            return columns.setdefault((id(array), axis), array[..., axis])

        for v, place in enumerate(self.place):
            if weights.compute[place]:
                node_cost.add(v, quantities[COMPUTE].node[v], share * float(weights.compute[place]))
        for costs, rows, kind in ((node_cost, weights.nodes, "node"), (edge_cost, weights.edges, "edge")):
            for k, axis in np.argwhere(rows).tolist():
                for name in (BLOCKING, OVERLAPPED):
                    costs.add(k, column(getattr(quantities[name], kind)[k], axis), share * float(rows[k, axis]))
        return sums._replace(node_cost=node_cost.arrays(), edge_cost=edge_cost.arrays())


class Judged(NamedTuple):
    """Seconds of a plan: by the ideal schedule, its program as it is played, the sum, and of its arithmetic alone."""

    ideal_s: float
    played_s: float
    sum_s: float
    compute_s: float


def judge(timeline: IdealTimeline, choice: np.ndarray) -> tuple[Judged, Weights]:
    """Returns the seconds of a choice, and the gradient of the ideal schedule's."""
    space = timeline.space
    compute_s, sent = timeline.amounts(choice)
    ideal_s, weights = timeline.seconds(compute_s, sent)
    played_s = play(space.program_steps(space.layout(choice.tolist())).steps).seconds
    return Judged(ideal_s, played_s, step_s(space.predict(choice.tolist())), float(compute_s.sum())), weights


def descend(
    request: PlanRequest, timeline: IdealTimeline, start: np.ndarray, share: float
) -> list[tuple[Judged, Solution]]:
    """Solves problems with a share of the mean of the timeline's gradients so far; returns what they give."""
    choice, mean, results = start, None, []
    options = replace(request.options, time_limit_s=10.0)
    for number in range(_ROUNDS):
        _, own = judge(timeline, choice)
        mean = (
            own if mean is None else Weights(*((number * m + w) / (number + 1) for m, w in zip(mean, own, strict=True)))
        )
        problem = timeline.tangent(mean, share)
        solution = solve_problem_of(options, problem, request.space, choice, None, _GAP)
        choice = np.asarray(solution.choice)
        results.append((judge(timeline, choice)[0], solution))
    return results


def compiled_s(request: PlanRequest, solution: Solution, model: Model) -> float:
    """Returns the seconds of a plan's compiled program by its timeline."""
    options = request.options
    compiled = make_plan(request, solution).apply(model.step).lower(*abstract_arguments(model)).compile()
    return simulate(compiled.as_text() or "", dict(options.mesh.shape), achievable_rates(options.hardware)).step_s


def searched(
    model: Model, mesh: Mesh | AbstractMesh, time_limit_s: float = 30.0, executor: Executor | None = None
) -> tuple[PlanRequest, diffshard.Plan]:
    """Returns the request that a search for a model on a mesh of H100s makes, and the plan that it finds."""
    hardware = diffshard.preset("h100", dict(mesh.shape))
    requests: list[PlanRequest] = []

    def find(request: PlanRequest) -> diffshard.Plan:
        requests.append(request)
        return find_plan(request)

    options = Options(
        fn=model.step, mesh=mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes, donate_argnums=(0,),
        progress="none", time_limit_s=time_limit_s, executor=executor,
    )  # fmt: skip
    plan = PlannedFunction(options, find).plan(*abstract_arguments(model))
    return requests[0], plan


def row_of(name: str, model: Model, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the row of a setting; on a mesh of devices the programs of two plans are compiled, too."""
    request, _ = searched(model, mesh)
    timeline = IdealTimeline(request.space)
    first = fastest_choice(request, request.options.deadline())
    start = np.asarray(first.choice)
    found, _ = judge(timeline, start)
    least_s = request.space.least_compute_s
    best = [min(descend(request, timeline, start, share), key=lambda pair: pair[0].played_s) for share in SHARES]
    gap = (found.ideal_s - least_s) / found.ideal_s
    milliseconds = [f"{1e3 * s:.3g}" for s in (found.sum_s, found.played_s, found.ideal_s, least_s)]
    ratios = [f"{judged.played_s / found.played_s:.3f}" for judged, _ in best]
    compiled = ""
    if isinstance(mesh, Mesh):
        _, solution = min(best, key=lambda pair: pair[0].played_s)
        compiled = f"{compiled_s(request, solution, model) / compiled_s(request, first, model):.3f}"
    return f"{name} {'x'.join(map(str, mesh.shape.values()))}", *milliseconds, f"{gap:.1%}", *ratios, compiled


def abstract_mesh(sizes: tuple[int, ...]) -> AbstractMesh:
    """Returns a mesh of devices that are not there."""
    return AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["decoder"])
    parser.add_argument("--meshes", nargs="+", default=["4x8"], help="data x model, in hosts of 8")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", action="store_true", help="also compile; needs the extra `gpu-compile`")
    options = parser.parse_args(argv)
    rows = []
    for name in options.models:
        for mesh_text in options.meshes:
            case = CASES[name]
            sizes = case.full if options.sizes == "full" else case.small
            devices = MESHES["h100"] if options.compile else abstract_mesh
            mesh = devices(parse_mesh(mesh_text))
            rows.append(row_of(name, case.make(batch=case.batches[mesh_text], **sizes), mesh))
            print(*rows[-1], sep="  ", flush=True)
    columns = ("model, mesh", "sum, ms", "played", "ideal", "least arithmetic", "gap of the ideal")
    print_table(
        "Played step by share of the timeline's gradient", (*columns, *(f"{s:g}" for s in SHARES), "compiled"), rows
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
