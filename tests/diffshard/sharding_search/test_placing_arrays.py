"""What is given in place of a plan's arrays is told apart in every way in which it can differ."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import diffshard
from diffshard.base import PlanError
from diffshard.plans.base import Tensor
from diffshard.sharding_search.placing_arrays import (
    check_arrays,
    parameter_of,
    part_shape,
    part_text,
    path_inside,
    place_local,
    place_whole,
    sample_text,
)
from tests.processes import run_processes

TENSORS = (
    Tensor("state['w']", (8, 4), "float32", (("data",), ())),
    Tensor("state['b'][0]", (4,), "int32", ((),)),
)
SHAPES, DTYPES, INSIDE = ((8, 4), (4, 8), (8,)), ("float32", "bfloat16", "int32"), ("['w']", "['v']", ".w")


@pytest.mark.parametrize("parameter", ["state", "params_2"])  # another function may name its argument otherwise
@pytest.mark.parametrize(("shape", "dtype", "inside"), list(itertools.product(SHAPES, DTYPES, INSIDE)))
def test_only_arrays_of_the_same_shape_type_and_place_are_taken(shape, dtype, inside, parameter):
    given = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4,), "int32")
    paths = f"{parameter}{inside}", f"{parameter}['b'][0]"
    is_alike = (shape, dtype) == (TENSORS[0].shape, TENSORS[0].dtype)
    if is_alike and inside == "['w']":
        check_arrays(TENSORS, paths, given)
        return
    with pytest.raises(PlanError) as error:
        check_arrays(TENSORS, paths, given)
    said = str(error.value)
    assert (
        f"made for `state['w']` of float32[8, 4], and was given `{parameter}{inside}` of {dtype}{list(shape)}." in said
    )
    assert ("Its place differs" in said) == is_alike
    assert ("Search again" in said) != is_alike


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("place", [place_whole, place_local])
def test_another_number_of_arrays_is_refused(count, place):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    arrays = [np.zeros((8, 4), np.float32), np.zeros(4, np.int32), np.zeros(4, np.int32)][:count]
    with pytest.raises(PlanError, match=rf"made for 2 arrays in (its arguments|this argument), not {count}\."):
        place(TENSORS, ["state['w']", "state['b'][0]", "state['c']"][:count], arrays, mesh, True)


@pytest.mark.parametrize("place", [place_whole, place_local])
def test_arrays_are_placed_as_the_plan_splits_them(place):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    arrays = [np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(4, dtype=np.int32)]
    placed = place(TENSORS, ["x['w']", "x['b'][0]"], arrays, mesh, True)
    for array, given, tensor in zip(placed, arrays, TENSORS, strict=True):
        np.testing.assert_array_equal(array, given)
        assert array.sharding.spec == tensor.partition_spec
        assert array.sharding.mesh == mesh
    with pytest.raises(PlanError, match=r"`x\['w'\]`.*float16\[8, 4\]"):
        place(TENSORS, ["x['w']", "x['b'][0]"], [arrays[0].astype(np.float16), arrays[1]], mesh, True)
    with pytest.raises(PlanError, match=r"`x\['v'\]`"):
        place(TENSORS, ["x['v']", "x['b'][0]"], arrays, mesh, True)


def test_a_path_is_an_argument_and_a_place_inside():
    assert [parameter_of(tensor) for tensor in TENSORS] == ["state", "state"]
    assert [path_inside(path) for path in ("x", "x.y", "x[0]['a']", "opt_2['x'].y")] == [
        "",
        ".y",
        "[0]['a']",
        "['x'].y",
    ]


_PLACE = """
import json
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import diffshard

mesh = jax.make_mesh((4, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def step(state, batch):
    return state["w"] + batch["x"].sum() * jax.random.uniform(state["key"]), batch["x"] * 2


def blocks_of(array):
    return [np.asarray(shard.data).tolist() for shard in array.addressable_shards]


def message_of(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def planned(x_spec, w_spec=P("model")):
    specs = {"w": w_spec, "key": P(), "n": P()}, {"x": x_spec}
    return diffshard.search(step, mesh, hardware="h100", in_shardings=specs)


state = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "key": jax.random.key(1), "n": 1.0}
batch = {"x": np.arange(128.0, dtype=np.float32).reshape(32, 4)}
result = {}
for name, spec in (("in one piece", P("data")), ("in pieces", P(("model", "data"))), ("whole", P(None, "model"))):
    planned_step = planned(spec)
    plan = planned_step.plan(state, batch)
    rows, columns = plan.local_parts("batch")["batch['x']"]
    part = batch["x"][rows][:, columns]
    local, whole = plan.shard_local(batch={"x": part}), plan.shard(batch=batch)
    assert blocks_of(local["x"]) == blocks_of(whole["x"]), name
    assert plan.shard(batch=local)["x"] is local["x"]
    assert plan.shard_local(batch=whole)["x"] is whole["x"]
    result[name] = np.arange(32)[rows].tolist()

plan = planned(P("data")).plan(state, batch)
placed = plan.shard(state)
result["key"] = [str(placed["key"].dtype), placed["key"].sharding.is_fully_replicated]
result["number"] = str(placed["n"].dtype)
output, _ = planned(P("data"))(placed, plan.shard_local(batch={"x": batch["x"][8 * process : 8 * process + 8]}))
expected = state["w"] + batch["x"].sum() * np.asarray(jax.random.uniform(state["key"]))
result["errors"] = [float(np.abs(s.data - expected[s.index]).max()) for s in output.addressable_shards]
result["too much"] = message_of(lambda: plan.shard_local(batch=batch))
result["too little"] = message_of(lambda: plan.shard(batch={"x": batch["x"][:8]}))
rows = slice(8 * process, 8 * process + 8 - (process == 1))
result["too few"] = message_of(lambda: planned(P("data")).plan(state, batch).shard_local(batch={"x": batch["x"][rows]}))
result["unknown"] = message_of(
    lambda: planned(P("data")).plan(state, batch).shard_local(**{"bat" if process == 3 else "batch": local})
)
other = {**state, "w": state["w"] + (process == 2)}
result["values"] = message_of(lambda: planned(P("data")).plan(state, batch).shard(other))

plan.save("plan.json")
result["loaded"] = diffshard.Plan.load("plan.json", mesh) == plan
if process == 0:
    plan.save("by_first.json")
result["unwritable"] = message_of(lambda: plan.save("nowhere/plan.json"))
links = plan.hardware.links
result["hosts"] = [links["data"].num_hosts, links["model"].num_hosts]
json.dump(result, open(f"{process}.json", "w"))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("four")
    run_processes(_PLACE, 4, folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(4)]


def test_a_process_loads_the_rows_of_its_devices(results: list[dict]):
    assert [result["in one piece"] for result in results] == [list(range(8 * i, 8 * i + 8)) for i in range(4)]
    assert [result["whole"] for result in results] == [list(range(32))] * 4
    in_pieces = [[8 * block + 2 * i + row for block in range(4) for row in range(2)] for i in range(4)]
    assert [result["in pieces"] for result in results] == in_pieces


def test_keys_and_numbers_are_whole_in_every_process(results: list[dict]):
    for result in results:
        assert result["key"] == ["key<fry>", True]
        assert result["number"] == "float32"


def test_a_step_of_local_parts_computes_what_one_process_does(results: list[dict]):
    for result in results:
        assert len(result["errors"]) == 4
        assert max(result["errors"]) < 1e-2  # of numbers up to 8,000


def test_a_part_of_another_shape_is_an_error_that_says_what_to_load(results: list[dict]):
    assert "holds rows 16 to 23 of `batch['x']`, float32[32, 4]: give float32[8, 4]" in results[2]["too much"]
    assert "give them to `plan.shard_local`" in results[2]["too little"]


@pytest.mark.parametrize(
    ("name", "failing", "said"),
    [
        ("too few", 1, "PlanError: `batch['x']` is float32[7, 4] in process 1. This process holds rows 8 to 15"),
        ("unknown", 3, "PlanError: The plan was made for the arguments state, batch, and was given 'bat'."),
    ],
)
def test_wrong_parts_in_one_process_are_an_error_in_all(results: list[dict], name: str, failing: int, said: str):
    for process, result in enumerate(results):
        if process == failing:
            assert result[name].startswith(said)
        else:
            assert result[name].startswith("ProcessesError: The processes cannot shard the parts of the same arrays")
            assert f"process {failing} failed with {said}" in result[name]


def test_whole_arrays_that_differ_between_processes_are_an_error_in_all(results: list[dict]):
    for result in results:
        assert result["values"].startswith("ProcessesError: The processes cannot shard the same arrays: `state['w']`")
        assert "in process 2" in result["values"]


def test_a_plan_is_saved_once_and_loaded_by_all(results: list[dict]):
    for result in results:
        assert result["loaded"]
        assert "there is no folder" in result["unwritable"]


def test_links_between_processes_lead_from_host_to_host(results: list[dict]):
    assert [result["hosts"] for result in results] == [[4, 1]] * 4


def test_the_part_of_one_process_is_everything():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    step = diffshard.search(lambda x: x * 2, mesh, hardware="cpu", in_shardings=(PartitionSpec(("model", "data")),))
    plan = step.plan(x)
    assert plan.local_parts("x") == {"x": (slice(0, 8), slice(0, 4))}
    placed = plan.shard_local(x)
    assert placed.sharding.is_equivalent_to(plan.in_shardings[0], 2)
    np.testing.assert_array_equal(placed, x)
    with pytest.raises(diffshard.PlanError, match="'y'"):
        plan.local_parts("y")
    with pytest.raises(diffshard.PlanError, match="holds all of it of `x`"):
        plan.shard_local(x[:4])


def test_the_part_of_a_typed_random_key_is_a_key():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = diffshard.search(
        lambda key, keys: (jax.random.normal(key, (8,)), jax.vmap(jax.random.uniform)(keys)),
        mesh,
        hardware="cpu",
        in_shardings=(PartitionSpec(), PartitionSpec("data")),
        executor="constraints",  # a program runs random bits of rbg keys whole, and says so
    )
    key, keys = jax.random.key(0), jax.random.split(jax.random.key(1, impl="rbg"), 16)
    plan = step.plan(key, keys)
    for given, placed, sharding in zip((key, keys), plan.shard_local(key, keys), plan.in_shardings, strict=True):
        assert placed.dtype == given.dtype
        assert placed.sharding.is_equivalent_to(sharding, given.ndim)
        np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(given))


def test_parts_are_written_by_the_dimensions_that_are_split():
    part = (slice(0, 8), np.array([1, 3, 5, 7, 9]))
    assert part_shape(part) == (8, 5)
    assert part_text(part, (8, 10)) == "indices of dimension 1 1, 3, 5, 7, ..."
    assert part_text((slice(4, 8),), (16,)) == "rows 4 to 7"


def test_samples_tell_arrays_of_different_seeds_apart():
    one, other = (np.random.default_rng(seed).normal(size=(300, 300)) for seed in (0, 1))
    assert sample_text(one) == sample_text(one.copy()) != sample_text(other)
    assert sample_text(jax.random.key(0)) != sample_text(jax.random.key(1))


def test_bilevel_runs_in_one_process_and_measured_hardware_is_the_same_in_all(tmp_path: Path):
    program = """
import optax
from jax.sharding import Mesh
import diffshard

mesh = jax.make_mesh((2,), ("data",))
try:
    diffshard.bilevel(None, mesh, space=None, weights_optimizer=optax.sgd(0.1))
except ValueError as error:
    print(error)
hardware = diffshard.hardware.calibrate(mesh, dtypes=("float32",), matrix_size=64, largest_bytes=2**14, repeats=1)
print(hardware, hardware.links["data"].num_hosts)
"""
    outputs = [output.stdout.splitlines() for output in run_processes(program, 2, tmp_path, devices_each=1)]
    assert all("`mesh` has devices of 2 processes" in lines[0] for lines in outputs)
    assert outputs[0][-1] == outputs[1][-1]
    assert outputs[0][-1].endswith(" 2")
