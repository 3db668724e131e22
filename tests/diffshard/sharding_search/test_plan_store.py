"""A store gives the second search the first one's plan, for the same question only, and survives damaged files."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import diffshard
from cost.presets import preset
from diffshard.plans.file import to_json
from diffshard.sharding_search.plan_store import plan_store
from diffshard.solving.solve import resolve

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ARGUMENTS = ({"w": jnp.full((64, 32), 0.5)}, jnp.ones((16, 64)))
ROOT = Path(__file__).resolve().parents[3]


def step(state: Any, x: Any) -> Any:
    gradients = jax.grad(lambda s: jnp.tanh(x @ s["w"]).sum())(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients)


def step_with_a_cycle(state: Any, x: Any) -> Any:
    """A step whose plan presolve alone does not find, so that the solver is called."""

    def loss_fn(state: Any) -> Any:
        hidden = x @ state["w"]
        return ((jax.nn.softmax(hidden) * hidden) @ state["w"].T - x).var()

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss_fn)(state))


def planned(folder: Path, fn: Callable[..., Any] = step, arguments: Any = ARGUMENTS, **options: Any) -> diffshard.Plan:
    options = {"hardware": "cpu", **options}
    return diffshard.search(fn, MESH, cache=folder, **options).plan(*arguments)


def test_a_second_search_takes_the_plan_of_the_first_one(tmp_path: Path):
    calls = []

    def counting_solver(problem: Any, *, time_limit_s: float | None, key: Any) -> Any:
        calls.append(1)
        return resolve("greedy")(problem, time_limit_s=time_limit_s, key=key)

    first = planned(tmp_path / "store", step_with_a_cycle, solver=counting_solver)
    num_calls = len(calls)
    second = planned(tmp_path / "store", step_with_a_cycle, solver=counting_solver)
    assert num_calls > 0
    assert len(calls) == num_calls
    assert second == first
    assert (second.search_s, second.structures) == (first.search_s, first.structures)
    assert not first.stored_in
    assert Path(second.stored_in).parent == tmp_path / "store"
    assert "taken from a store of plans" in str(second)
    assert "taken from a store" not in str(first)


def test_a_stored_plan_runs_as_the_searched_one(tmp_path: Path):
    planned(tmp_path)
    planned_step = diffshard.search(step, MESH, hardware="cpu", cache=tmp_path)
    plan = planned_step.plan(*ARGUMENTS)
    assert plan.stored_in
    got = planned_step(*plan.shard(*ARGUMENTS))
    np.testing.assert_allclose(got["w"], step(*ARGUMENTS)["w"], rtol=1e-6)


def test_a_plan_that_the_search_began_with_is_not_kept_for_later_searches(tmp_path: Path):
    def in_a_loop(num_trips: int) -> Callable[..., Any]:
        return lambda state, x: jax.lax.fori_loop(0, num_trips, lambda _, y: y + jnp.tanh(y @ state["w"]).sum(), x)

    plan_of_two_trips = diffshard.search(in_a_loop(2), MESH, hardware="cpu").plan(*ARGUMENTS)
    searched = planned(tmp_path, in_a_loop(20), start=plan_of_two_trips)
    assert searched.step_s > 5 * plan_of_two_trips.step_s
    assert planned(tmp_path, in_a_loop(20)) == searched  # what was searched for this function is kept
    taken = planned(tmp_path / "other", in_a_loop(20), start=searched)
    assert taken == searched
    assert not (tmp_path / "other").exists()


def other_step(state: Any, x: Any) -> Any:
    return jax.tree.map(lambda w: w + x.sum(), state)


@pytest.mark.parametrize(
    "difference",
    [
        {"fn": other_step},
        {"arguments": (ARGUMENTS[0], jnp.ones((32, 64)))},
        {"arguments": (ARGUMENTS[0], jnp.ones((16, 64), jnp.bfloat16))},
        {"hardware": "h100"},
        {"hardware": replace(preset("cpu", dict(MESH.shape)), memory_bytes_per_s=1e9)},
        {"memory_limit_bytes": 1e9},
        {"in_shardings": (None, PartitionSpec("data"))},
        {"solver": "greedy"},
        {"time_limit_s": 60.0},
        {"key": 1},
        {"donate_argnums": 0},
        {"executor": "program"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_a_search_for_anything_else_is_searched(tmp_path: Path, difference: dict[str, Any]):
    planned(tmp_path)
    assert not planned(tmp_path, **difference).stored_in
    assert planned(tmp_path, **difference).stored_in


def test_values_of_constants_do_not_matter_but_their_shapes_do(tmp_path: Path):
    def with_constant(constant: Any) -> Callable[..., Any]:
        return lambda state, x: jax.tree.map(lambda w: w + (x @ constant).sum(), state)

    planned(tmp_path, with_constant(np.full((64, 64), 1.0, np.float32)))
    assert planned(tmp_path, with_constant(np.full((64, 64), 2.0, np.float32))).stored_in
    assert not planned(tmp_path, with_constant(np.full((64, 32), 2.0, np.float32))).stored_in


def test_a_stored_plan_names_the_lines_of_the_program_as_it_is_now(tmp_path: Path):
    program = "def step(state, x):\n    return {'w': state['w'] + x.sum()}\n"

    def plan(text: str) -> diffshard.Plan:
        names: dict[str, Any] = {}
        exec(compile(text, str(tmp_path / "program.py"), "exec"), names)
        return planned(tmp_path / "store", names["step"])

    def lines_of(plan: diffshard.Plan) -> set[str]:
        return {operation.source for operation in plan.operations if "program.py" in operation.source}

    first, second = plan(program), plan(f"# a new line\n{program}")
    assert second.stored_in
    assert any(":2" in line for line in lines_of(first))
    assert lines_of(second) == {line.replace(":2", ":3") for line in lines_of(first)}


def layered_step(state: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return y.sum()

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))


def test_operations_that_layers_repeat_are_written_once(tmp_path: Path):
    arguments = [jnp.full((64, 64), 0.5)] * 12, jnp.ones((16, 64))
    first = planned(tmp_path, layered_step, arguments)
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())["plan"]["operations"]["distinct"]
    assert len(written) < len(first.operations) / 2
    second = planned(tmp_path, layered_step, arguments)
    assert second.stored_in
    assert second == first
    assert [(o.source, o.scope) for o in second.operations] == [(o.source, o.scope) for o in first.operations]


@pytest.mark.parametrize("order", [[0], [99], [-1], [True], [None], "0"])
def test_a_file_whose_operations_are_not_those_of_the_function_is_searched_again(tmp_path: Path, order: Any):
    first = planned(tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    del document["checksum"]  # which would tell any change
    operations = document["plan"]["operations"]
    operations["order"] = order * (1 if order == [0] else len(operations["order"]))
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="damaged"):
        assert planned(tmp_path).operations == first.operations


@pytest.mark.parametrize(
    "change",
    [
        {"remat": {"recomputed": [10**6], "residuals": [], "seconds": 0.0, "kept_bytes": 0.0}},
        {"remat": {"recomputed": [0], "residuals": [], "seconds": 0.0, "kept_bytes": 0.0, "offloaded": [[-1, 0, 99]]}},
        {"mesh_axes": []},
        {"operations": []},
        {"operations": {"distinct": [3], "order": []}},
        {"function": "other"},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_changed_file_is_searched_again(tmp_path: Path, change: dict[str, Any], has_checksum: bool):
    first = planned(tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    document["plan"] |= change
    if not has_checksum:
        del document["checksum"]
        document["plan"] |= {"outputs": 3}
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="damaged"):
        assert planned(tmp_path).operations == first.operations


def test_a_link_in_the_folder_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path: Path):
    planned(tmp_path / "store")
    (path,) = (tmp_path / "store").iterdir()
    path.unlink()
    (tmp_path / "thesis").write_text("all of it")
    path.symlink_to(tmp_path / "thesis")
    with pytest.warns(UserWarning, match="not JSON"):
        planned(tmp_path / "store")
    assert not path.is_symlink()
    assert (tmp_path / "thesis").read_text() == "all of it"
    assert planned(tmp_path / "store").stored_in == str(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not JSON", "not JSON"),
        ('{"format": "something else"}', "not a file of this store"),
        ('{"format": "diffshard stored plan", "version": 99}', "another version"),
        (None, "damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_once_and_replaced(tmp_path: Path, content: str | None, said: str):
    planned(tmp_path)
    (path,) = tmp_path.iterdir()
    if content is None:
        document = json.loads(path.read_text())
        document["plan"]["arguments"] = 3
        content = json.dumps(document)
    path.write_text(content)
    with pytest.warns(UserWarning, match=said) as warnings_seen:
        plan = planned(tmp_path)
    assert len(warnings_seen) == 1
    assert not plan.stored_in
    assert planned(tmp_path).stored_in == str(path)


def test_the_plan_of_another_question_under_this_name_is_not_taken(tmp_path: Path):
    planned(tmp_path)
    (path,) = tmp_path.iterdir()
    planned(tmp_path, other_step)
    (other,) = set(tmp_path.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match="another function"):
        assert planned(tmp_path).function == "step"


def test_an_interrupted_search_is_not_kept(tmp_path: Path):
    def interrupted_solver(problem: Any, *, time_limit_s: float | None, key: Any) -> Any:
        yield from resolve("greedy")(problem, time_limit_s=time_limit_s, key=key)
        raise KeyboardInterrupt

    assert planned(tmp_path, step_with_a_cycle, solver=interrupted_solver).status == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_an_infeasible_search_is_not_kept(tmp_path: Path):
    with pytest.raises(diffshard.InfeasibleError):
        planned(tmp_path, memory_limit_bytes=10.0)
    assert list(tmp_path.iterdir()) == []


def test_many_writers_leave_one_whole_file(tmp_path: Path):
    plan = planned(tmp_path / "other")
    store, damaged = plan_store(str(tmp_path / "store")), []

    def write_and_read() -> None:
        for _ in range(20):
            store.keep("key", to_json(plan))
            try:
                json.loads(Path(store.path("key")).read_text())
            except ValueError as error:
                damaged.append(error)

    threads = [threading.Thread(target=write_and_read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert damaged == []
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["key.json"]


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.joinpath("sub").write_text("")
    store = plan_store(str(folder / "sub"))  # a file in the place of the folder
    with pytest.warns(UserWarning, match="cannot be kept"):
        store.keep("key", to_json(planned(tmp_path)))


@pytest.mark.parametrize(("cache", "kind"), [(3, TypeError), ("", ValueError), (__file__, ValueError)])
def test_a_cache_that_is_no_folder_is_refused(cache: Any, kind: type[Exception]):
    with pytest.raises(kind, match="`cache`"):
        diffshard.search(step, MESH, hardware="cpu", cache=cache)


def test_another_process_finds_the_plan_whatever_its_hash_seed(tmp_path: Path):
    program = """
import sys
import jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[2])
from tests.diffshard.sharding_search.test_plan_store import planned
jnp.dot(jnp.ones(3), jnp.ones(3))  # JAX's caches differ, too
print("stored" if planned(sys.argv[1]).stored_in else "searched")
"""
    planned(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program, str(tmp_path), str(ROOT)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["stored"], found.stderr[-3000:]


def test_functions_of_modules_have_a_store_too(tmp_path: Path):
    from flax import nnx

    def train_step(model: nnx.Linear, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: m(x).sum())(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), gradients))
        return loss

    def plan() -> diffshard.Plan:
        planned_step = diffshard.nnx.search(train_step, MESH, hardware="cpu", cache=tmp_path)
        return planned_step.plan(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 16)))

    assert not plan().stored_in
    assert plan().stored_in
