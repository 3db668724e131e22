"""Several processes plan as one: the same plan or the same kind of error, and steps that compute what one process does.

One program does all, because a start of processes takes longer than what it does.
"""

import json

import jax
import pytest

from tests.processes import run_processes

_MODEL = """
import jax
import jax.numpy as jnp
import numpy as np


def loss_fn(state, batch):
    x, target = batch
    return jnp.mean((x + jax.nn.gelu(x @ state["up"]) @ state["down"] - target) ** 2)


def step(state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.5 * g, state, gradients), loss


def state_of():
    values = np.random.default_rng(0)
    return {"up": values.normal(size=(256, 512)) / 16, "down": values.normal(size=(512, 256)) / 16}


def batches_of(number):
    values = np.random.default_rng(number)
    return values.normal(size=(512, 256)), values.normal(size=(512, 256))


def in_float32(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)
"""

_TRAIN = (
    _MODEL
    + """
import json
import warnings
from jax.sharding import AxisType
import diffshard
from diffshard import baselines

mesh = jax.make_mesh((2, jax.device_count() // 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
state, batch = in_float32(state_of()), in_float32(batches_of(0))
result = {}


def message_of(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)


def searched(fn=step, **options):
    return diffshard.search(fn, mesh, hardware="cpu", **options)


# What a process is given as a time limit makes no difference; the store is read and written by the first one only.
planned_step = searched(time_limit_s=20.0 * (process + 1), cache=f"store {process}", donate_argnums=0)
plan = planned_step.plan(state, batch)
again = searched(time_limit_s=20.0, cache=f"store {process}", donate_argnums=0).plan(state, batch)
result["plans"] = [str(plan), str(again)]
result["stored"] = os.path.basename(again.stored_in)
result["folders"] = [os.path.isdir(f"store {process}")]

arrays, losses = plan.shard(state, batch)[0], []
for number in range(3):
    arrays, loss = planned_step(arrays, plan.shard(batch=in_float32(batches_of(number))))
    losses.append(float(loss))
result["losses"] = losses

limits = {"time_limit_s": 5.0 * (process + 1), "names": ["fsdp", "megatron", "hybrid fsdp"]}
experts = baselines.baseline_plans(step, mesh, state, batch, hardware="cpu", memory_limit_bytes=2e6, **limits)
fsdp = experts["fsdp"]
result["experts"] = [[str(expert) for expert in experts.values()], dict(experts.left_out)]
result["expert's loss"] = float(fsdp.apply(step)(*fsdp.shard(state, batch))[1])

plan.save("plan.json")
applied = diffshard.Plan.load("plan.json", mesh).apply(step)
applied_plan = applied.plan(state, batch)
result["applied"] = applied_plan == plan and float(applied(*applied_plan.shard(state, batch))[1])

open_step = diffshard.search(step, devices=jax.devices(), hardware="cpu", time_limit_s=20.0 * (process + 1))
open_plan = open_step.plan(state, batch)
result["open"] = [str(open_plan), list(open_plan.mesh.shape.items()), len(open_plan.shapes)]
result["open"].append(float(open_step(*open_plan.shard(state, batch))[1]))
result["devices"] = message_of(
    lambda: diffshard.search(step, devices=jax.devices()[:: 1 - 2 * process], hardware="cpu").plan(state, batch)
)

other_mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
target = diffshard.search(step, other_mesh, hardware="cpu", in_shardings=(jax.P("all"), None)).plan(state, batch)
made = plan.init(lambda: in_float32(state_of()))
moved = diffshard.elastic.reshard(made, plan, target)
expected = target.shard(state)
result["moved"] = [
    bool((np.asarray(a.data) == np.asarray(b.data)).all()) and a.index == b.index
    for name in state for a, b in zip(moved[name].addressable_shards, expected[name].addressable_shards, strict=True)
]
result["move"] = diffshard.elastic.reshard_price(made, plan, target)


def phases(last=3):
    return [diffshard.elastic.Phase(mesh=m, num_steps=n, hardware="cpu") for m, n in ((mesh, 3), (other_mesh, last))]


budget = diffshard.elastic.budget(step, phases(), state, batch)
result["budget"] = [str(budget), list(budget.plans[1].in_shardings[0]), []]
arrays = budget.move(0, state)
for i in range(2):
    if i:
        arrays = budget.move(i, arrays)
    arrays, loss = budget.step(i)(arrays, budget.plans[i].shard(batch=in_float32(batches_of(i))))
    result["budget"][2].append(float(loss))
result["phases"] = message_of(lambda: diffshard.elastic.budget(step, phases(3 + process), state, batch))
result["phase"] = message_of(lambda: diffshard.elastic.budget(step, phases()[process:], state, batch))
first_mesh = jax.make_mesh((4,), ("all",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
on_others = [*phases(), diffshard.elastic.Phase(mesh=first_mesh, num_steps=1, hardware="cpu")]
result["other devices"] = message_of(lambda: diffshard.elastic.budget(step, on_others, state, batch).move(2, arrays))
own_plan = diffshard.search(step, jax.make_mesh((4,), ("all",), devices=jax.local_devices()), hardware="cpu").plan
result["elsewhere"] = message_of(lambda: diffshard.elastic.reshard(made, plan, own_plan(state, batch)))
result["one device"] = message_of(lambda: searched(check="numbers").plan(state, batch))
result["limits"] = message_of(lambda: searched(memory_limit_bytes=8e9 - process).plan(state, batch))
other = {**state, "down": state["down"].astype(np.float16 if process else np.float32)}
result["check"] = message_of(lambda: searched(check="numbers" if process else None).plan(state, batch))
result["types"] = message_of(lambda: searched().plan(other, batch))
result["given"] = message_of(
    lambda: searched(in_shardings=(None, jax.P("data" if process else "model"))).plan(state, batch)
)
result["program"] = message_of(lambda: searched(lambda s, b: loss_fn(s, b) * (1.0 + process)).plan(state, batch))
result["infeasible"] = message_of(lambda: searched(memory_limit_bytes=1e5).plan(state, batch))

local = diffshard.search(step, jax.sharding.AbstractMesh((2, 4), ("data", "model")), hardware="cpu", in_shardings=(
    {"up": jax.P(("data", "model")[process]), "down": jax.P()}, None
)).plan(state, batch)
result["applied plans"] = message_of(lambda: local.apply(step, mesh).plan(state, batch))


def failing_solver(problem, *, time_limit_s, key):
    raise ArithmeticError(f"the solver of process {process} failed")
    yield


result["solver"] = message_of(lambda: searched(solver=failing_solver).plan(state, batch))
result["tracing"] = message_of(lambda: searched(lambda s, b: 1 / (process - 1) * loss_fn(s, b)).plan(state, batch))
wrong = {
    "hardware": lambda: diffshard.search(step, mesh, hardware="nope" if process else "cpu").plan(state, batch),
    "solver": lambda: searched(solver="cpu" if process == 0 else "gradient", time_limit_s=5.0).plan(state, batch),
    "mesh": lambda: diffshard.search(step, None if process else mesh, hardware="cpu").plan(state, batch),
    "sharding": lambda: searched(in_shardings=(None, jax.P("nope" if process else "data"))).plan(state, batch),
    "names": lambda: baselines.baseline_plans(step, mesh, state, batch, names=["fsdp", "zero"][: 1 + process]),
    "directory": lambda: diffshard.resume("" if process else "made", step, mesh, state_of, batch, hardware="cpu"),
    "arguments": lambda: searched().plan(state, *[batch] * (1 + process)),
    "plans": lambda: diffshard.compare(step, mesh, state, batch, plans={"found": plan} if process else None),
    "target": lambda: diffshard.compare(step, mesh, state, batch, plans={"a": plan}, target=("host", "x")[process]),
    "repeats": lambda: diffshard.hardware.calibrate(mesh, dtypes=("float32",) if process else None),
    "applied": lambda: plan.apply(step, (mesh, own)[process]).plan(state, batch),
}
own = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.local_devices())
result["wrong"] = {name: message_of(act) for name, act in wrong.items()}
result["own mesh"] = diffshard.search(step, own, hardware="cpu").plan(state, batch).mesh.size
json.dump(result, open(f"{process}.json", "w"))
"""
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    run_processes(_TRAIN, 2, folder, timeout_s=300.0)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def test_all_processes_get_the_same_plan_whatever_their_time_limits(results: list[dict]):
    assert results[0]["plans"] == results[1]["plans"]


def test_experts_plan_in_the_first_process_for_all(results: list[dict]):
    plans, left_out = results[0]["experts"]
    assert results[1]["experts"] == [plans, left_out]
    assert len(plans) + len(left_out) == 3
    assert len(plans) >= 1
    assert results[0]["expert's loss"] == pytest.approx(results[0]["losses"][0], rel=1e-5)


def test_only_the_first_process_uses_the_store(results: list[dict]):
    assert results[0]["folders"] == [True]
    assert results[1]["folders"] == [False]
    assert results[0]["stored"] == results[1]["stored"] != ""
    assert "taken from a store" in results[1]["plans"][1]


def test_training_in_two_processes_is_training_in_one(results: list[dict]):
    names: dict = {}
    exec(_MODEL, names)
    state = names["in_float32"](names["state_of"]())
    step, losses = jax.jit(names["step"]), []
    for number in range(3):
        state, loss = step(state, names["in_float32"](names["batches_of"](number)))
        losses.append(float(loss))
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["applied"] == pytest.approx(losses[0], rel=1e-5)


def test_a_state_is_made_and_moved_between_meshes_of_two_processes(results: list[dict]):
    for result in results:
        assert len(result["moved"]) == 8
        assert all(result["moved"])
        assert result["move"] == results[0]["move"]
        kind, message = result["elsewhere"]
        assert (kind, "have meshes of other devices, in several processes" in message) == ("PlanError", True)


def test_a_budget_is_planned_for_all_processes_and_runs_in_them(results: list[dict]):
    text, names, losses = results[0]["budget"]
    assert results[1]["budget"] == [text, names, losses]
    assert text.startswith("Budget of step over 2 phases: ")
    assert losses == pytest.approx(results[0]["losses"][:2], rel=1e-4)
    for result in results:
        assert result["phases"] == ["ProcessesError", result["phases"][1]]
        assert "of phase 1, `num_steps` is 3 in process 0 and 4 in process 1" in result["phases"][1]
        assert result["other devices"][0] == "PlanError"
        assert "between meshes of the same devices only. Save a checkpoint" in result["other devices"][1]
    assert "`phases` must be two or more" in results[1]["phase"][1]
    assert "process 1 failed with ValueError: `phases` must be two" in results[0]["phase"][1]


def test_all_processes_choose_the_same_shape_of_the_mesh(results: list[dict]):
    assert results[0]["open"] == results[1]["open"]
    text, axes, num_shapes, loss = results[0]["open"]
    assert ["hosts", 2] in axes or ["mixed", 8] in axes or len(axes) > 1
    assert f"the fastest of {num_shapes} shapes" in text
    assert loss == pytest.approx(results[0]["losses"][0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("limits", "`memory_limit_bytes` is 8000000000.0 in process 0 and 7999999999.0 in process 1"),
        ("check", '`check` "numbers" is not given in process 0 and given in process 1'),
        ("types", "`state['down']` is float32[512,256] in process 0 and float16[512,256] in process 1"),
        ("given", "`batch[0]` is float32[512,256] given as P('model',) in process 0 and float32"),
        ("devices", "the devices of `mesh` is [0, 1, 2, 3, "),
        ("program", "the program that the function traces to is at line"),
        (
            "applied plans",
            "the plan's `state['up']` is P('data', None) in process 0 and P('model', None)",
        ),
    ],
)
def test_a_difference_is_an_error_in_all_processes_that_names_it(results: list[dict], name: str, said: str):
    for result in results:
        kind, message = result[name]
        assert kind == "ProcessesError"
        assert said in message


def test_an_error_of_the_search_is_the_error_of_all_processes(results: list[dict]):
    assert results[0]["infeasible"] == results[1]["infeasible"]
    assert results[0]["infeasible"][0] == "InfeasibleError"
    assert results[0]["solver"] == results[1]["solver"] == ["ArithmeticError", "the solver of process 0 failed"]


def test_a_program_of_several_processes_has_no_one_device_to_be_held_against(results: list[dict]):
    for result in results:
        kind, message = result["one device"]
        assert kind == "PlanError"
        assert "no room for" in message


def test_an_error_of_one_process_while_tracing_ends_the_others(results: list[dict]):
    assert results[1]["tracing"][0] == "ZeroDivisionError"
    kind, message = results[0]["tracing"]
    assert kind == "ProcessesError"
    assert "process 1 failed with ZeroDivisionError" in message


@pytest.mark.parametrize(
    ("name", "failing", "said"),
    [
        ("hardware", 1, "ValueError: `hardware` 'nope' is unknown"),
        ("solver", 0, "ValueError: `solver` must be"),
        ("mesh", 1, "TypeError: Give `mesh` or `devices`, not neither"),
        ("sharding", 1, "ValueError: The spec of `in_shardings[1]` has an axis 'nope'"),
        ("names", 1, "ValueError: `names` must be some of"),
        ("directory", 1, "ValueError: `directory` is empty"),
        ("arguments", 1, "TypeError: "),
        ("plans", 0, "ValueError: `plans` must map"),
        ("target", 1, "ValueError: `target`"),
        ("repeats", 0, "TypeError: "),
        ("applied", 1, "PlanError: `mesh` has the axes"),
    ],
)
def test_a_wrong_argument_in_one_process_is_an_error_in_all(results: list[dict], name: str, failing: int, said: str):
    kind, message = results[failing]["wrong"][name]
    assert f"{kind}: {message}".startswith(said)
    kind, other = results[1 - failing]["wrong"][name]
    assert kind == "ProcessesError"
    assert f"process {failing} failed with {said}" in other


def test_a_mesh_of_one_process_is_planned_by_it_alone(results: list[dict]):
    assert [result["own mesh"] for result in results] == [4, 4]
