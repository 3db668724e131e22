"""A search over devices finds the best shape of the mesh: the one that searching each mesh by itself would choose."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import diffshard
from cost.base import Hardware, Link
from diffshard.outer_search import CutOffError
from diffshard.sharding_search.mesh_candidates import mesh_candidates
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.planning import find_plan
from diffshard.sharding_search.request import PlanRequest
from tests.diffshard.sharding_search.small_searches import assert_equal, train_arguments, train_step

CLUSTER = diffshard.Cluster(
    # Arithmetic that costs, a fast link and a slow one, so that shapes differ.
    [diffshard.Hosts(2, devices=4, hardware=Hardware("slow", 1e7, 1e9, math.inf, {}))],
    inside=Link(2e-6, 1e-8),
    between=Link(2e-5, 1e-7),
)
ARGUMENTS = train_arguments()


def searched_alone(**options: Any) -> dict[tuple[int, ...], diffshard.Plan]:
    """The plan of each shape's own search."""
    return {
        tuple(c.axes.values()): diffshard.search(train_step, c.mesh, hardware=c.hardware, **options).plan(*ARGUMENTS)
        for c in mesh_candidates(CLUSTER, None)
    }


def test_the_plan_is_that_of_the_fastest_mesh_and_its_bound_holds_on_all_of_them():
    plan = diffshard.search(train_step, devices=CLUSTER).plan(*ARGUMENTS)
    alone = searched_alone()
    best = min(alone.values(), key=lambda p: p.step_s)
    assert plan.step_s == pytest.approx(best.step_s, rel=1e-4)
    assert plan.mesh_axes == best.mesh_axes
    assert len({round(p.step_s, 9) for p in alone.values()}) > 1  # or every shape would be the best
    assert {tuple(s.mesh_axes.values()) for s in plan.shapes} == set(alone)
    assert plan.lower_bound_s == min(s.lower_bound_s for s in plan.shapes)
    for shape in plan.shapes:
        own = alone[tuple(shape.mesh_axes.values())]
        assert shape.lower_bound_s <= own.step_s * (1 + 1e-6)
        assert (shape.step_s is None) == (shape.status == "cut off")
        assert shape.status != "cut off" or own.step_s >= plan.step_s * (1 - 1e-4)
    assert "the fastest of 4 shapes" in str(plan)
    assert "Shapes of the mesh" in plan.html()


def test_a_cluster_in_place_of_the_mesh_counts_as_devices():
    cluster_plan = diffshard.search(train_step, CLUSTER).plan(*ARGUMENTS)
    assert cluster_plan.mesh_axes == diffshard.search(train_step, devices=CLUSTER).plan(*ARGUMENTS).mesh_axes


def test_a_step_on_the_found_mesh_is_the_step_of_one_device():
    step = diffshard.search(train_step, devices=jax.devices(), hardware="h100")
    plan = step.plan(*ARGUMENTS)
    assert isinstance(plan.mesh, Mesh)
    assert plan.mesh.size == len(jax.devices())
    assert dict(plan.mesh.shape) == dict(plan.mesh_axes)
    shardings = jax.tree.leaves(plan.in_shardings)
    assert all(isinstance(s, NamedSharding) and s.mesh == plan.mesh for s in shardings)
    assert_equal(step(*plan.shard(*ARGUMENTS)), train_step(*ARGUMENTS))
    assert_equal(step(*ARGUMENTS), train_step(*ARGUMENTS))


def test_plans_for_other_arguments_are_for_the_mesh_of_the_first_one():
    step = diffshard.search(train_step, devices=CLUSTER)
    assert "8 devices, slow" in repr(step)
    first = step.plan(*ARGUMENTS)
    state, batch = ARGUMENTS
    second = step.plan(state, jnp.concatenate([batch, batch]))
    assert second.mesh_axes == first.mesh_axes
    assert second.shapes == ()


def test_devices_that_are_not_here_are_planned_for():
    plan = diffshard.search(train_step, devices=16, hardware="h100").plan(*ARGUMENTS)
    assert isinstance(plan.mesh, AbstractMesh)
    assert math.prod(plan.mesh_axes.values()) == 16
    assert plan.hardware == diffshard.preset("h100", plan.mesh_axes)


def test_one_device_has_one_shape():
    assert diffshard.search(train_step, devices=1, hardware="h100").plan(*ARGUMENTS).mesh_axes == {"local": 1}


def test_shapes_without_time_are_said_to_be_not_tried_and_keep_a_bound():
    plan = diffshard.search(train_step, devices=CLUSTER, time_limit_s=1e-9).plan(*ARGUMENTS)
    untried = [shape for shape in plan.shapes if shape.status == "not tried"]
    assert len(untried) == len(plan.shapes) - 1
    alone = searched_alone()
    for shape in untried:
        assert 0 < shape.lower_bound_s <= alone[tuple(shape.mesh_axes.values())].lower_bound_s
    assert plan.lower_bound_s <= min(p.step_s for p in alone.values())


def test_a_memory_limit_that_no_shape_keeps_is_an_error():
    with pytest.raises(diffshard.InfeasibleError, match=r"on any of 4 shapes of the mesh\. .* at least"):
        diffshard.search(train_step, devices=CLUSTER, memory_limit_bytes=10).plan(*ARGUMENTS)
    with pytest.raises(diffshard.InfeasibleError, match=r"on the only shape of the mesh: .* at least"):
        diffshard.search(train_step, devices=1, hardware="h100", memory_limit_bytes=10).plan(*ARGUMENTS)
    mixed = diffshard.Cluster(
        [diffshard.Hosts(1, devices=2, hardware=name) for name in ("h100", "a100")], between=Link(0.0, 1e-9)
    )
    with pytest.raises(ValueError, match=r"not of 1 host of 2 x H100.*, 1 host of 2 x A100"):
        diffshard.search(train_step, devices=mixed)


@pytest.mark.filterwarnings("ignore::diffshard.plans.WholeWorkWarning")  # 4 rows on 3 devices
def test_shapes_that_do_not_fit_the_memory_are_left_out():
    def step(x: jax.Array) -> jax.Array:  # 6 rows: only an axis of 2 or of 3 divides them
        return jnp.tanh(x)

    x = jax.ShapeDtypeStruct((6, 1), "float32")
    cluster = diffshard.Cluster([diffshard.Hosts(1, 6, Hardware("slow", 1e7, 1e9, math.inf, {}))], Link(1e-6, 1e-8))
    plan = diffshard.search(step, devices=cluster, memory_limit_bytes=8).plan(x)
    assert all(shape.status != "infeasible" for shape in plan.shapes)
    four = jax.ShapeDtypeStruct((4, 1), "float32")
    fits = diffshard.search(step, devices=cluster, memory_limit_bytes=16).plan(four)
    by_shape = {tuple(shape.mesh_axes.values()): shape for shape in fits.shapes}
    assert by_shape[6,].status == "infeasible"
    assert by_shape[6,].lower_bound_s == math.inf
    assert fits.mesh_axes == {"local_a": 2, "local_b": 3}
    assert "no plan fits the memory" in str(fits)


def test_a_plan_of_a_found_mesh_is_saved_and_applied_with_its_shapes(tmp_path):
    plan = diffshard.search(train_step, devices=jax.devices(), hardware="h100").plan(*ARGUMENTS)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", plan.mesh)
    assert loaded.shapes == plan.shapes
    applied = loaded.apply(train_step)
    assert_equal(applied(*applied.plan(*ARGUMENTS).shard(*ARGUMENTS)), train_step(*ARGUMENTS))


def test_a_store_keeps_the_plan_of_all_shapes(tmp_path):
    options: Any = {"devices": jax.devices(), "hardware": "h100", "cache": tmp_path}
    first = diffshard.search(train_step, **options).plan(*ARGUMENTS)
    step = diffshard.search(train_step, **options)
    second = step.plan(*ARGUMENTS)
    assert second.stored_in
    assert second == first
    assert second.mesh == first.mesh
    assert_equal(step(*second.shard(*ARGUMENTS)), train_step(*ARGUMENTS))
    fewer = diffshard.search(train_step, **{**options, "devices": jax.devices()[:4]}).plan(*ARGUMENTS)
    assert not fewer.stored_in


def test_an_earlier_plan_of_the_function_is_taken_as_it_is():
    plan = diffshard.search(train_step, devices=CLUSTER).plan(*ARGUMENTS)
    again = diffshard.search(train_step, devices=CLUSTER, start=plan).plan(*ARGUMENTS)
    assert again == plan
    assert again.mesh == plan.mesh


def test_shardy_judges_the_plan_of_the_chosen_shape():
    plan = diffshard.search(train_step, devices=CLUSTER, check="shardy").plan(*ARGUMENTS)
    other = diffshard.search(train_step, devices=CLUSTER).plan(*ARGUMENTS)
    assert plan.mesh_axes == other.mesh_axes
    assert len(plan.shapes) == len(other.shapes) == 4
    assert plan.lower_bound_s == pytest.approx(other.lower_bound_s)


def test_progress_is_of_the_best_shape_and_of_all_bounds():
    told = []
    plan = diffshard.search(train_step, devices=CLUSTER).plan(*ARGUMENTS, progress=lambda *args: told.append(args))
    costs = np.array([cost for _, cost, _ in told])
    assert costs[-1] == pytest.approx(plan.step_s, rel=1e-2)
    bounds = np.array([bound for _, _, bound in told])
    assert (bounds <= plan.step_s * (1 + 1e-3)).all()  # costs have a preference for small arguments beside the seconds
    assert bounds[-1] > bounds[0]


UNLIKE = diffshard.Cluster([diffshard.Hosts(1, 8, "a100"), diffshard.Hosts(1, 8, "t4")], between=Link(1e-5, 1e-10))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "Give `mesh` or `devices`, not neither"),
        ({"devices": 8, "mesh": AbstractMesh((8,), ("x",))}, TypeError, "Give `mesh` or `devices`, not both"),
        ({"devices": 8, "mesh": CLUSTER}, TypeError, "Give `mesh` or `devices`, not both"),
        ({"devices": 8}, ValueError, "`hardware` must be given for a number of devices"),
        ({"devices": 0, "hardware": "h100"}, ValueError, "`devices` must be 1 or more, not 0"),
        ({"devices": 12, "hardware": "h100"}, ValueError, "`devices` 12 does not fill hosts of 8"),
        ({"devices": 8, "hardware": "h1000"}, ValueError, "`hardware` 'h1000' is unknown"),
        ({"devices": 8, "hardware": 3}, TypeError, "`hardware` must be a preset's name or None, not int"),
        (
            {"devices": 8, "hardware": Hardware("own", 1.0, 1.0, 1.0, {})},
            ValueError,
            "`hardware` 'own' has links for the axes of a mesh, but `devices` leaves the axes open",
        ),
        ({"devices": CLUSTER, "hardware": "h100"}, ValueError, "`hardware` must be None for a Cluster"),
        (
            {"devices": UNLIKE},
            ValueError,
            "must be a cluster of one kind .* 1 host of 8 x A100-80GB, 1 host of 8",
        ),
        ({"devices": "all"}, TypeError, "`devices` must be a number of devices, a sequence of JAX devices or a Clus"),
        ({"devices": []}, ValueError, "`devices` is empty"),
        ({"devices": ["gpu"]}, TypeError, "`devices` must be JAX devices, .* not 'gpu'"),
        ({"devices": [jax.devices()[0]] * 2}, ValueError, "`devices` has a device twice"),
        (
            {"devices": CLUSTER, "in_shardings": (None, PartitionSpec("data"))},
            ValueError,
            "`in_shardings.*` has an axis 'data'.* `devices` leaves the mesh open: its axes are named by levels",
        ),
        (
            {"devices": CLUSTER, "in_shardings": NamedSharding(jax.make_mesh((8,), ("local",)), PartitionSpec())},
            ValueError,
            "`in_shardings.*` is on the mesh .* but `devices` leaves the mesh open",
        ),
        (
            {"devices": CLUSTER, "logical_axis_rules": (("embed", "data"),)},
            ValueError,
            "`logical_axis_rules` has the mesh axis 'data' for 'embed'; the mesh has \\('hosts', 'local', 'mixed'",
        ),
    ],
)
def test_what_leaves_the_mesh_unclear_is_named(options, error, message):
    with pytest.raises(error, match=message):
        diffshard.search(train_step, **options)


def test_arguments_may_be_given_as_whole_on_every_device():
    whole = diffshard.search(train_step, devices=CLUSTER, in_shardings=(None, PartitionSpec())).plan(*ARGUMENTS)
    (batch,) = [tensor for tensor in whole.arguments if tensor.path == "batch"]
    assert (batch.spec, batch.given) == (((), ()), True)


def specs_of(plan):
    return {tensor.path: tensor.spec for tensor in plan.arguments}


def test_given_shardings_name_levels_of_hosts_and_hold_on_the_mesh_that_is_chosen():
    for levels in (("hosts", "local", "mixed"), ("hosts",), ("local",)):
        given = (None, PartitionSpec(levels))
        plan = diffshard.search(train_step, devices=CLUSTER, in_shardings=given).plan(*ARGUMENTS)
        wanted = tuple(axis for level in levels for axis in plan.mesh_axes if axis.startswith(level))
        assert specs_of(plan)["batch"] == (wanted, ())


def test_a_mesh_that_cannot_divide_an_argument_as_given_is_not_chosen():
    state, batch = ARGUMENTS
    args, levels = (state, batch[:12]), ("local", "mixed")
    plan = diffshard.search(train_step, devices=CLUSTER, in_shardings=(None, PartitionSpec(levels))).plan(*args)
    assert 12 % math.prod(plan.mesh_axes[axis] for axis in specs_of(plan)["batch"][0]) == 0
    assert any(shape.status == "infeasible" for shape in plan.shapes)
    everything = PartitionSpec(("hosts", *levels))
    with pytest.raises(diffshard.InfeasibleError, match="Another mesh may be able to"):
        diffshard.search(train_step, devices=CLUSTER, in_shardings=(None, everything)).plan(*args)


def test_rules_may_split_named_dimensions_over_levels_of_hosts():
    params = {"a": nn.Partitioned(jnp.ones((8, 32)), ("embed", "hidden")), "b": jnp.ones((32, 4))}

    def step(params, x):
        return jax.tree.map(lambda p: p * 0.9, params), (jnp.tanh(x @ nn.unbox(params)["a"]) @ params["b"]).sum()

    rules = (("embed", None), ("hidden", ("hosts", "local", "mixed")))
    plan = diffshard.search(step, devices=CLUSTER, logical_axis_rules=rules).plan(params, ARGUMENTS[1])
    (spec,) = [spec for path, spec in specs_of(plan).items() if "'a'" in path]
    assert (spec[0], set(spec[1])) == ((), set(plan.mesh_axes))


def test_a_limit_cuts_a_search_off_only_where_nothing_is_shorter():
    (candidate, *_) = mesh_candidates(CLUSTER, None)
    requests: list[PlanRequest] = []

    def find(request: PlanRequest) -> diffshard.Plan:
        requests.append(request)
        return find_plan(request)

    options = Options(
        fn=train_step, mesh=candidate.mesh, hardware=candidate.hardware, memory_limit_bytes=math.inf, progress="none"
    )
    best = PlannedFunction(options, find).plan(*ARGUMENTS)
    (request,) = requests
    with pytest.raises(CutOffError) as caught:
        find_plan(request._replace(step_limit_s=0.99 * best.step_s))
    assert 0.99 * best.step_s <= caught.value.lower_bound <= best.step_s
    assert find_plan(request._replace(step_limit_s=1.01 * best.step_s)).step_s == pytest.approx(best.step_s, rel=1e-4)
