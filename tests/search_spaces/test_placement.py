"""Placement of layers: the worked example, and pipelines against dynamic programming."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from cost.evaluation import evaluate, relaxed_cost
from cost.validation import validate
from diffshard.placing import Placement, place
from search_spaces.base import Part
from search_spaces.placement import PlacementSpace

TRANSFER = np.array([[0.0, 2, 4], [2, 0, 3], [4, 3, 0]])
ASYMMETRIC = np.array([[0.0, 2, 4], [5, 0, 3], [4, 7, 0]])
TIMES = [3, 3, 3, 2, 4, 4]
WORKED = [0, 0, 0, 1, 2, 2]


def test_the_worked_example():
    problem = PlacementSpace(TIMES, TRANSFER).problem
    validate(problem)
    assignment = jnp.eye(3)[jnp.array(WORKED)]
    assert evaluate(problem, WORKED).cost == 14  # 5 and the busiest device's 9
    assert evaluate(problem, [0] * 6).cost == 19
    assert float(relaxed_cost(problem, list(assignment))) == 14
    uniform = jnp.full((6, 3), 1 / 3)
    assert float(relaxed_cost(problem, list(uniform))) == pytest.approx(10 + 19 / 3, rel=1e-6)


def test_transfers_go_from_a_layer_to_the_next_and_not_back():
    problem = PlacementSpace(TIMES, ASYMMETRIC).problem
    assert evaluate(problem, WORKED).cost == 5 + 9
    assert evaluate(PlacementSpace(TIMES[::-1], ASYMMETRIC).problem, WORKED[::-1]).cost == 12 + 9  # the other way round


@pytest.mark.parametrize("solver", ["gradient", "exact", "exhaustive", "mcmc"])
def test_the_best_placement_of_the_worked_example(solver):
    best = place(TIMES, TRANSFER, solver=solver)
    assert (best.step_s, best.transfer_s, best.compute_s) == (12, 2, 10)
    assert set(best.device_s) == {0, 9, 10}
    if solver != "mcmc":
        assert best.status == "optimal"


@pytest.mark.parametrize("solver", [None, "gradient", "exact"])
@pytest.mark.parametrize(("layers", "stages", "cost"), [(12, 4, 12), (24, 4, 18), (24, 8, 20), (24, 12, 26)])
def test_pipelines_of_unit_layers(solver, layers, stages, cost):
    cut = 2 * (1 - np.eye(stages))
    placement = place(np.ones(layers), cut, num_microbatches=3, solver=solver)
    assert placement.step_s == cost
    assert placement.compute_s == cost - 2 * (stages - 1)
    assert placement.lower_bound_s <= cost
    assert set(np.diff(placement.assignment)) <= {0, 1}  # contiguous, in order
    assert (placement.assignment[0], placement.assignment[-1]) == (0, stages - 1)


def test_a_pipeline_of_unequal_layers():
    placement = place([1, 3, 2, 5], 2 * (1 - np.eye(2)), num_microbatches=3)
    assert placement.step_s == 14
    assert placement.assignment == (0, 0, 0, 1)


def _cheapest_step(times: np.ndarray, transfer: np.ndarray, num_microbatches: int) -> float:
    """The whole 1F1B step, Σ stages included, of the best of all cuts into contiguous stages."""
    layers, devices = times.shape
    steps = []
    for inner in itertools.combinations(range(1, layers), devices - 1):
        ends = [0, *inner, layers]
        stages = [times[start:end, d].sum() for d, (start, end) in enumerate(itertools.pairwise(ends))]
        steps.append((num_microbatches - 1) * max(stages) + sum(stages) + np.diag(transfer, 1).sum())
    return min(steps)


@pytest.mark.parametrize("solver", [None, "gradient"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_pipelines_of_unequal_devices_against_every_way_to_cut(num_microbatches, solver):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        times, transfer = rng.integers(1, 9, (8, 3)).astype(float), rng.integers(1, 9, (3, 3)).astype(float)
        placement = place(times, transfer, num_microbatches=num_microbatches, solver=solver)
        assert placement.step_s == _cheapest_step(times, transfer, num_microbatches)
        assert placement.step_s == placement.transfer_s + placement.compute_s


def test_the_sum_of_unequal_stages_decides():
    times = [[1, 10], [5, 1], [6, 6]]
    placement = place(times, np.zeros((2, 2)), num_microbatches=2)
    assert placement.assignment == (0, 1, 1)
    assert (
        placement.step_s == placement.compute_s == (2 - 1) * 7 + 1 + 7
    )  # [0, 0, 1] has the shorter slowest stage: 6 + 6 + 6
    assert placement.device_s == (1, 7)


def test_the_constant_sum_of_equal_stages_is_left_out():
    times = np.array([1.0, 3, 2, 5])
    by_layer = place(times, 2 * (1 - np.eye(2)), num_microbatches=3)
    by_device = place(np.stack([times, times], axis=1), 2 * (1 - np.eye(2)), num_microbatches=3)
    assert by_layer.step_s == by_device.step_s == 14
    assert by_layer.device_s == by_device.device_s == (6, 5)


@pytest.mark.parametrize("num_microbatches", [None, 1, 3])
def test_a_layer_stays_off_a_device_that_cannot_run_it(num_microbatches):
    times = [[1.0, np.inf], [1, 1], [np.inf, 1]]
    placement = place(times, np.zeros((2, 2)), num_microbatches=num_microbatches)
    assert placement.feasible
    assert (placement.assignment[0], placement.assignment[2]) == (0, 1)
    assert np.isfinite(placement.step_s)
    assert not place([[np.inf, np.inf], [1, 1]], np.zeros((2, 2)), num_microbatches=num_microbatches).feasible


@pytest.mark.parametrize("seed", range(4))
def test_stages_fit_their_devices_memory_whoever_solves(seed):
    """A layer of the pipeline cannot run on one device, and devices hold from 2 to 4 layers."""
    rng = np.random.default_rng(seed)
    times = rng.integers(1, 9, (7, 3)).astype(float)
    times[rng.integers(7), rng.integers(3)] = np.inf
    more = {"num_microbatches": 3, "layer_bytes": np.ones(7), "memory_limit_bytes": rng.integers(2, 5, 3).astype(float)}
    best, exact = (place(times, np.zeros((3, 3)), solver=solver, **more) for solver in (None, "exact"))
    assert best.feasible == exact.feasible
    if best.feasible:
        assert best.step_s == exact.step_s
        assert best.status == "optimal"


def test_device_memory_is_kept():
    limits = np.array([2.0, 3.0, 9.0])
    placement = place(TIMES, TRANSFER, layer_bytes=np.ones(6), memory_limit_bytes=limits)
    assert placement.feasible
    assert (np.bincount(placement.assignment, minlength=3) <= limits).all()
    costs = [
        evaluate(PlacementSpace(TIMES, TRANSFER).problem, choice).cost
        for choice in itertools.product(range(3), repeat=6)
        if (np.bincount(choice, minlength=3) <= limits).all()
    ]
    assert placement.step_s == min(costs)
    assert not place(TIMES, TRANSFER, layer_bytes=np.ones(6), memory_limit_bytes=1.0).feasible


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((TIMES, np.ones((2, 3))), {}, "`transfer` must be square"),
        ((np.ones((6, 2)), TRANSFER), {}, r"`layer_times` must be `\[L\]` or `\[L, 3\]`"),
        (([], TRANSFER), {}, "`layer_times` must be"),
        (([1.0, -1.0], TRANSFER), {}, "`layer_times` must be numbers that are not negative"),
        (([3.0, [3.0]], TRANSFER), {}, r"`layer_times` must be numbers .*, got \[3.0, \[3.0\]\]"),
        ((["3"], [[0]]), {}, r"`layer_times` must be numbers .*, got \['3'\]"),
        (([3.0], [["0"]]), {}, r"`transfer` must be numbers .*, got \[\['0'\]\]"),
        ((TIMES, TRANSFER), {"layer_bytes": [1]}, "`layer_bytes` must have one number for each of 6 layers"),
        ((TIMES, TRANSFER), {"layer_bytes": [1] * 6, "memory_limit_bytes": [1, 2]}, "`memory_limit_bytes` must be"),
        ((TIMES, TRANSFER), {"memory_limit_bytes": 5.0}, "`memory_limit_bytes` is 5.0, which needs `layer_bytes`"),
        ((TIMES, 2.0), {}, "`transfer` must be square"),
        (([1.0, 2.0], TRANSFER), {"num_microbatches": 2}, "too few for 3 stages"),
        ((TIMES, TRANSFER), {"num_microbatches": 0}, "`num_microbatches` must be an integer of at least 1, got 0"),
        ((TIMES, TRANSFER), {"num_microbatches": 1.5}, "`num_microbatches` must be an integer of at least 1, got 1.5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, more, message):
    with pytest.raises(ValueError, match=message):
        place(*arguments, **more)


def test_a_placement_says_how_good_it_is_and_is_read_back(tmp_path):
    best = place(TIMES, TRANSFER)
    assert best.certificate[:3] == pytest.approx((12.0, 12.0, 0.0), abs=1e-9)
    assert best.status == "optimal"
    best.save(tmp_path / "placement.json")
    assert Placement.load(tmp_path / "placement.json") == best
    assert "  step     12.0 s: transfers 2.00 s, computing 10.0 s\n  bound    12.0 s, gap 0%: no other" in str(best)
    assert [line.split() for line in str(best).splitlines()[-3:]] == [
        ["0", "9.00", "s", "0", "1", "2"],
        ["1", "10.0", "s", "3", "4", "5"],
        ["2", "0", "s"],
    ]


def test_the_pipeline_is_a_valid_problem():
    problem = PlacementSpace(np.ones(5), np.ones((3, 3)), num_microbatches=2).problem
    validate(problem)
    assert [len(cost) for cost in problem.node_cost] == [3] * 5


def test_the_worked_example_part_by_part():
    space = PlacementSpace(TIMES, TRANSFER)
    decoded = space.decode(WORKED)
    assert (decoded.transfer_s, decoded.compute_s, decoded.device_s.tolist()) == (5, 9, [9, 2, 8])
    assert space.strategy_names(4) == ("device 0", "device 1", "device 2")
    assert space.explain(WORKED) == (
        Part("layer 2 to layer 3", "transfer", 3, 2.0),
        Part("layer 3 to layer 4", "transfer", 4, 3.0),
        Part("device 0", "compute", None, 9.0),
    )


def test_the_parts_of_a_pipeline_of_unequal_devices_add_up():
    times, transfer = [[1.0, 10], [5, 1], [6, 6]], [[0.0, 3], [0, 0]]
    space = PlacementSpace(times, transfer, num_microbatches=3)
    assert space.strategy_names(0) == ("stage 0", "stage 1")
    assert space.explain([0, 1, 1]) == (
        Part("layer 0", "compute", 0, 1.0),
        Part("layer 1", "compute", 1, 1.0),
        Part("layer 2", "compute", 2, 6.0),
        Part("layer 0 to layer 1", "transfer", 1, 3.0),
        Part("stage 1", "compute", None, 2 * 7.0),
    )
    assert evaluate(space.problem, [0, 1, 1]).cost == 1 + 1 + 6 + 3 + 2 * 7
