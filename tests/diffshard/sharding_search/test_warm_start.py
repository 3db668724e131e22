"""A search that begins with an earlier plan takes it where nothing has changed, and never finds a slower one."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from diffshard.sharding_search.plan_store import start_of
from search_spaces.sharding.space import ShardingSpace
from tests.diffshard.sharding_search.small_searches import SLOW, train_arguments, train_step


def mesh_of(x: int, y: int) -> AbstractMesh:
    return AbstractMesh((x, y), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def plan_of(mesh, start=None, batch=None, **options):
    state, whole_batch = jax.eval_shape(train_arguments)
    step = diffshard.search(train_step, mesh, hardware=SLOW, start=start, **options)
    return step.plan(state, whole_batch if batch is None else batch)


@pytest.fixture
def starts(monkeypatch):
    """What the solver was asked to begin with, and how many nodes were left as they were."""
    seen = []

    def recording(plan, space: ShardingSpace):
        seen.append(start_of(plan, space))
        return seen[-1]

    monkeypatch.setattr("diffshard.sharding_search.planning.start_of", recording)
    return seen


def test_an_unchanged_plan_is_taken_as_it_is_also_from_a_file(tmp_path, monkeypatch):
    plan = plan_of(mesh_of(2, 2))
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("diffshard.sharding_search.planning.solve", None)
    again = plan_of(mesh_of(2, 2), diffshard.Plan.load(tmp_path / "plan.json"))
    assert again == plan
    assert again.in_shardings == plan.in_shardings  # it knows the pytrees


def test_a_plan_that_another_version_saved_is_only_a_start(tmp_path, starts):
    plan = plan_of(mesh_of(2, 2))
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["function_digest"] = "of another version"
    del document["checksum"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    again = plan_of(mesh_of(2, 2), diffshard.Plan.load(tmp_path / "plan.json"))
    assert starts[0].is_exact
    assert again.function_digest == plan.function_digest  # it was searched anew
    assert again.step_s <= plan.step_s * (1 + 1e-4)


def in_a_loop(num_trips):
    return lambda x: jax.lax.fori_loop(0, num_trips, lambda _, y: jnp.tanh(y @ y), x)


def in_copies(num_copies):
    return lambda x: jnp.tanh(jnp.broadcast_to(x[None], (num_copies, *x.shape)) * 2).sum(0)


def times_a_factor(factor):
    return lambda x: jnp.tanh(x * factor)


@pytest.mark.parametrize("make", [in_a_loop, in_copies, times_a_factor])
def test_a_plan_of_a_function_with_the_same_names_of_operations_is_a_start_and_not_the_plan(make, starts):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def plan_of_size(size, start=None):
        return diffshard.search(make(size), mesh_of(2, 2), hardware=SLOW, start=start).plan(x)

    other, cold = plan_of_size(2), plan_of_size(20)
    warm = plan_of_size(20, other)
    assert starts[0] is not None
    assert warm.function_digest == cold.function_digest != other.function_digest
    assert warm.step_s == pytest.approx(cold.step_s)
    assert warm.peak_bytes == cold.peak_bytes


def test_a_plan_whose_operations_have_other_numbers_of_results_is_no_start(starts):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def plan_of_sorted(num_arrays, start=None):
        def sort_together(x):
            return jax.lax.sort((x,) * num_arrays, num_keys=1)[-1]

        return diffshard.search(sort_together, mesh_of(2, 2), hardware=SLOW, start=start).plan(x)

    plan = plan_of_sorted(3, plan_of_sorted(1))
    assert starts == [None]
    assert len(plan.operations[-1].value_specs) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": mesh_of(2, 4)},
        {"memory_limit_bytes": 1e6},
        {"donate_argnums": 0},
        {"in_shardings": (None, PartitionSpec("y"))},
        {"executor": "constraints"},
    ],
)
def test_a_changed_search_begins_with_the_plan_and_finds_what_it_would_have_found(change, starts):
    plan = plan_of(mesh_of(2, 2))
    mesh = change.pop("mesh", mesh_of(2, 2))
    cold, warm = plan_of(mesh, **change), plan_of(mesh, plan, **change)
    assert len(starts) == 1
    assert starts[0] is not None
    assert warm != plan
    assert warm.step_s <= cold.step_s * (1 + 1e-4)


def test_a_start_has_the_specs_of_the_plan_as_far_as_there_are_axes(starts):
    plan = plan_of(mesh_of(4, 2))
    for mesh in (mesh_of(2, 2), AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))):
        start_plan = plan_of(mesh, plan, solver=lambda problem, **_: iter(()))  # the start is all there is
        names = set(mesh.axis_names)
        for before, after in zip(plan.arguments, start_plan.arguments, strict=True):
            assert after.spec == tuple(tuple(a for a in axes if a in names) for axes in before.spec)
    assert not any(start.is_exact for start in starts)


def test_sizes_may_change_but_a_plan_of_another_function_is_no_start(starts):
    plan = plan_of(mesh_of(2, 2))
    _, batch = jax.eval_shape(train_arguments)
    plan_of(mesh_of(2, 2), plan, jax.ShapeDtypeStruct((2 * batch.shape[0], *batch.shape[1:]), batch.dtype))
    other = diffshard.search(lambda x: x * 2, mesh_of(2, 2), hardware=SLOW, start=plan)
    other.plan(batch)
    assert starts[0] is not None
    assert starts[1] is None


def test_a_start_must_be_a_plan():
    with pytest.raises(TypeError, match=r"`start` must be a plan or None, not str; `Plan.load\(path\)` reads"):
        diffshard.search(train_step, mesh_of(2, 2), hardware=SLOW, start="plan.json")  # pyright: ignore[reportArgumentType]
