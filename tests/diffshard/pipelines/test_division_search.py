"""The search for stages beside all divisions of small chains, with a solver whose costs are known."""

import itertools
from typing import Any

import numpy as np
import pytest

import diffshard
from cost.base import Link
from cost.pipeline_schedules import Schedule, graph_of, in_flight, kept_microbatches
from cost.pipeline_times import StageTimes, simulate
from diffshard.base import InfeasibleError
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.even_division import EvenDivisionSearch, even_submeshes
from diffshard.pipelines.layer_chain import LayerChain
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.stage_plans import place_stages
from diffshard.pipelines.stage_search import Entry, FoundDivision, StageLayout, StageMemoryError

M = 4
CLUSTER = diffshard.Cluster([diffshard.Hosts(1, devices=4, hardware="h100")])
MEMORY = 100.0


class Solver:
    """Stages whose seconds are sums over layers, a little more than the layers' least, divided by devices.

    Each micro-batch that is kept needs memory, and so does each layer.
    """

    def __init__(self, seed, num_layers, memory_of_layer=10.0, cluster=CLUSTER, speeds=(1.0,), memory=MEMORY):
        self.memory = memory
        random = np.random.default_rng(seed)
        self.each_s, self.end_s = random.uniform(1, 3, num_layers), random.uniform(0, 10, num_layers)
        slow_links = 1e6 if seed % 2 else 1.0  # then a link takes about as long as a layer
        self.sent = np.array([0, *random.uniform(1e5, 1e6, num_layers - 1)]) * slow_links
        self.cluster = cluster
        self.submeshes, self.speeds, self.memory_of_layer = cluster.submeshes(), speeds, memory_of_layer
        self.factor = random.uniform(1.0, 1.5, len(self.submeshes))

    def least(self, submesh):
        """What layers take at least on a submesh: of a micro-batch, and of the end of the step."""
        count = self.submeshes[submesh].num_devices * self.speeds[self.submeshes[submesh].kind]
        return self.each_s / count, self.end_s / count

    def times(self, entry):
        """What a stage takes."""
        layers, factor = slice(entry.start, entry.end), self.factor[entry.submesh]
        each_s, end_s = (x[layers].sum() * factor for x in self.least(entry.submesh))
        return each_s, end_s

    def __call__(self, entry):
        """Returns the layout of a stage."""
        peak = self.memory_of_layer * (entry.end - entry.start) * (1 + entry.in_flight) / 2
        if peak > self.memory:
            raise StageMemoryError("too much", is_proven=True)
        each_s, end_s = self.times(entry)
        residual = self.memory_of_layer * (entry.end - entry.start) / 2
        seconds = M * each_s + end_s
        return StageLayout(seconds, seconds, end_s, peak, residual, {})


def search(solver, num_layers, max_stages=3, cluster=CLUSTER):
    unused: Any = None
    cuts, signatures = (unused,) * (num_layers - 1), tuple(range(num_layers))
    zeros = np.zeros(num_layers)
    chain = LayerChain(cuts, zeros, solver.sent, zeros, signatures, ())
    memory = [solver.memory for _ in cluster.kinds]
    return DivisionSearch(chain, M, cluster, memory, solver, solver.least, max_stages)


def simulated_s(solver, stages, schedule: Schedule = "1f1b"):
    """Returns the seconds of a division, or infinity; nothing goes back to earlier stages."""
    times, ends = [], []
    for i, (start, end, submesh) in enumerate(stages):
        entry = Entry(start, end, submesh, kept_microbatches(schedule, len(stages) - i, M))
        try:
            solver(entry)
        except InfeasibleError:
            return np.inf
        each_s, end_s = solver.times(entry)
        times.append(each_s)
        ends.append(end_s)
    sends = [
        solver.cluster.link_s(solver.sent[b[0]], solver.submeshes[a[2]], solver.submeshes[b[2]])
        for a, b in itertools.pairwise(stages)
    ]
    half = np.array(times) / 2
    zeros = np.zeros(len(sends))
    return simulate(StageTimes(half, half, sends, zeros), graph_of(schedule, len(stages), M)).step_s + max(ends)


def all_divisions(solver, num_layers, max_stages=3):
    for count in range(1, max_stages + 1):
        for cuts in itertools.combinations(range(1, num_layers), count - 1):
            bounds = (0, *cuts, num_layers)
            for submeshes in itertools.product(range(len(solver.submeshes)), repeat=count):
                if sum(solver.submeshes[p].num_devices for p in submeshes) <= CLUSTER.num_devices:
                    yield [(a, b, p) for (a, b), p in zip(itertools.pairwise(bounds), submeshes, strict=True)]


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_all_divisions_and_the_found_one_is_near_the_best(seed, schedule):
    solver = Solver(seed, 5)
    found = search(solver, 5)
    division = found.best(schedule, lambda: False)
    best_s = min(simulated_s(solver, stages, schedule) for stages in all_divisions(solver, 5))
    assert 0.8 * best_s <= found.bound(schedule, np.inf, lambda: False) <= best_s * (1 + 1e-12)
    assert division is not None
    assert simulated_s(solver, [tuple(stage) for stage in division.stages], schedule) <= 1.15 * best_s


@pytest.mark.parametrize(("schedule", "each"), [("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_even_divisions_are_near_the_best_one_of_all_that_fit(seed, schedule, each):
    """Beside each division into stages of two equal meshes, with a part of the memory for each stage of a device."""
    num_layers, size = 7, 2 * each
    solver = Solver(seed, num_layers, memory=MEMORY / each)
    divisions = search(solver, num_layers, max_stages=size)
    evenly = EvenDivisionSearch(divisions, schedule, each)
    kept = in_flight(graph_of(schedule, size, M, each)).tolist()
    both = even_submeshes(CLUSTER, 0, 2)
    assert both
    submesh = solver.submeshes.index(both[0])
    best_s = np.inf
    for cuts in itertools.combinations(range(1, num_layers), size - 1):
        stages = tuple(Stage(a, b, submesh) for a, b in itertools.pairwise((0, *cuts, num_layers)))
        entries = tuple(Entry(*stage, k) for stage, k in zip(stages, kept, strict=True))
        layouts = tuple(layout for entry in entries if (layout := divisions.known.layout(entry)) is not None)
        if len(layouts) == size:
            one = FoundDivision(stages, entries, layouts, 0.0)
            best_s = min(best_s, divisions.simulated_s(schedule, one, each))
    found = [one for one in evenly.candidates(lambda: False) if len(one.stages) == size]
    assert bool(found) == np.isfinite(best_s)
    assert all(one.bound_s <= 1.15 * best_s for one in found)
    assert evenly.bound() <= best_s


@pytest.mark.parametrize("slowdown", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_devices_of_another_kind_never_make_the_found_division_slower(seed, slowdown):
    """Neither in the search's own seconds nor in the schedule's, also where stages of that kind cost more than bounds.

    The division on the first kind alone is a candidate also where both kinds are faster, because programs of a stage
    may be slower than the stage.
    """
    fast, slow = diffshard.Hosts(1, devices=4, hardware="h100"), diffshard.Hosts(1, devices=2, hardware="t4")
    clusters = [diffshard.Cluster(hosts, between=Link(1e-6, 1e-9)) for hosts in ([fast], [fast, slow])]
    best, simulated, divisions = [], [], []
    for cluster in clusters:
        solver = Solver(seed, 5, cluster=cluster, speeds=(1.0, 0.9))
        solver.factor[3:] *= slowdown
        found = search(solver, 5, cluster=cluster).candidates("1f1b", lambda: False)
        best.append(min(one.bound_s for one in found))
        divisions.append([one.stages for one in found])
        simulated.append(min(simulated_s(solver, [tuple(stage) for stage in stages]) for stages in divisions[-1]))
    assert best[1] <= best[0]
    assert simulated[1] <= simulated[0]
    assert divisions[0][0] in divisions[1]


@pytest.mark.parametrize("seed", range(6))
def test_the_division_on_fewer_hosts_is_a_candidate_unless_it_is_clearly_slower(seed):
    """So more hosts do not lead to a slower pipeline, though its programs may take longer than its stages."""
    best, submeshes = [], ()
    for count in (1, 2, 3, 4):
        cluster = diffshard.Cluster([diffshard.Hosts(count, devices=2, hardware="h100")], between=Link(1e-3, 1e-7))
        solver = Solver(seed, 5, cluster=cluster)
        assert solver.submeshes[: len(submeshes)] == submeshes  # so that numbers mean the same for all clusters
        submeshes = solver.submeshes
        is_wide = np.array([submesh.num_devices > 2 for submesh in submeshes])
        solver.factor[is_wide] *= 1 + seed / 2  # the network is slow
        found = search(solver, 5, cluster=cluster).candidates("1f1b", lambda: False)
        fastest = min(found, key=lambda one: one.bound_s)
        for fewer in best:
            assert fewer.stages in [one.stages for one in found] or fewer.bound_s > 1.2 * fastest.bound_s
            assert fastest.bound_s <= fewer.bound_s * (1 + 1e-9)
        best.append(fastest)


def test_a_second_kind_is_used_where_it_helps():
    cluster = diffshard.Cluster([diffshard.Hosts(1, 2, "h100"), diffshard.Hosts(1, 2, "a100")], between=Link(0.0, 0.0))
    solver = Solver(0, 5, cluster=cluster, speeds=(1.0, 1.0))
    found = search(solver, 5, cluster=cluster).best("1f1b", lambda: False)
    assert found is not None
    assert {solver.submeshes[stage.submesh].kind for stage in found.stages} == {0, 1}


def test_a_bound_says_nothing_that_only_more_memory_forbids():
    """A stage that keeps fewer micro-batches has more memory, and may be faster than one that keeps more."""
    solver = Solver(0, 4)
    found = search(solver, 4)
    found.known.by_kind[found.known.kind(Entry(0, 4, 2, 1))] = {3: StageLayout(1e3, 1e3, 0.0, 50.0, 1.0, {})}
    assert found.bound("1f1b", np.inf, lambda: False) < 1e3


def test_stages_are_found_that_only_just_fit():
    solver = Solver(1, 6, memory_of_layer=33.0)  # at most three layers, and one where three micro-batches are kept
    found = search(solver, 6, max_stages=4)
    division = found.best("1f1b", lambda: False)
    feasible = [s for s in all_divisions(solver, 6, 4) if np.isfinite(simulated_s(solver, s))]
    assert (division is not None) == bool(feasible)


def test_parts_of_hosts_stay_in_one_host():
    cluster = diffshard.Cluster([diffshard.Hosts(2, 6, "h100")], between=Link(1e-6, 1e-10))
    sizes = {submesh.num_devices: submesh for submesh in cluster.submeshes()}
    numbers = place_stages(cluster, [sizes[2], sizes[4], sizes[4], sizes[2]])
    assert sorted(itertools.chain(*numbers)) == list(range(12))
    assert all(len({number // 6 for number in of_stage}) == 1 for of_stage in numbers)
    with pytest.raises(InfeasibleError, match="of which there are 2"):
        place_stages(cluster, [sizes[4]] * 3)


@pytest.mark.parametrize(("count", "least_s"), [(8, 0.0), (32, 0.9)])
def test_what_is_proven_of_a_whole_step_is_no_end_of_it(count, least_s):
    """The least of the first layer is loose, so that its stage's bound is known for all micro-batches alone."""

    def solve(entry):
        if entry.end - entry.start == 2:
            raise StageMemoryError("too much", is_proven=True)
        return StageLayout(count * 1.0, count * 1.0, 0.0, 1.0, 0.1, {})

    unused: Any = None
    nothing, least = np.zeros(2), (np.array([least_s, 1.0]), np.zeros(2))
    chain = LayerChain((unused,), nothing, nothing, nothing, (0, 1), ())
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=2, hardware="h100")])
    found = DivisionSearch(chain, count, cluster, [MEMORY], solve, lambda submesh: least, 2)
    found.best("1f1b", lambda: False)
    third = np.full(2, 1 / 3)
    step_s = simulate(StageTimes(third, 2 * third, [0.0], [0.0]), graph_of("1f1b", 2, count)).step_s
    assert found.bound("1f1b", np.inf, lambda: False) == pytest.approx(step_s, rel=1e-4)
