"""Plans say what share of their arithmetic is repeated because it cannot be split, and warn above a tenth."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import diffshard
from diffshard.plans.page import format_page

MESH = AbstractMesh((2, 4), ("data", "model"))


def train_step(params, batch):
    x, target = batch

    def loss_fn(params):
        return jnp.mean((x + jax.nn.gelu(x @ params["up"]) @ params["down"] - target) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))


def plan_of(num_rows, width=448, mesh=MESH):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    batch = (jax.ShapeDtypeStruct((num_rows, width), "float32"),) * 2
    return diffshard.search(train_step, mesh, hardware="h100").plan(params, batch)


@pytest.fixture(scope="module")
def uneven():
    """The plan for 8,191 rows on 2 x 4 devices, and its warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = plan_of(8191)
    return plan, told


def test_an_uneven_batch_is_told_once_with_the_size_that_would_be_split(uneven):
    plan, told = uneven
    (warning,) = told
    assert warning.category is diffshard.plans.WholeWorkWarning
    message = str(warning.message)
    assert "train_step" in message
    assert "dimension 0 of batch[0] and of 1 more argument is 8,191" in message
    assert "'data' and 'model'" in message
    assert "padded to 8,192" in message
    assert f"{100 * plan.whole_share:.0f}% of computing is repeated" in message
    assert plan.whole_share > 0.1


def test_a_padded_batch_saves_what_was_predicted_and_is_not_told(uneven):
    (work,) = uneven[0].whole_work
    padded = plan_of(8192)  # the suite makes errors of warnings
    assert padded.whole_work == ()
    assert uneven[0].compute_s - padded.compute_s == pytest.approx(work.seconds, rel=0.02)


def test_text_page_and_file_have_the_share_and_the_reason(uneven, tmp_path):
    plan, _ = uneven
    share = f"{100 * plan.whole_share:.0f}% of computing is repeated on several devices"
    text = " ".join(str(plan).split())
    assert f"whole {share}" in text
    assert "padded to 8,192 it can be split" in text
    assert share in format_page(plan)
    assert "padded to 8,192 it can be split" in format_page(plan)
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").whole_work == plan.whole_work


def test_a_small_step_on_a_large_mesh_is_not_told():
    assert plan_of(7, width=8).whole_share < 0.1


def test_a_budget_tells_it_as_well():
    phases = [diffshard.elastic.Phase(mesh=MESH, num_steps=n, hardware="h100") for n in (1, 2)]
    params = {"up": jax.ShapeDtypeStruct((448, 1792), "float32"), "down": jax.ShapeDtypeStruct((1792, 448), "float32")}
    with pytest.warns(diffshard.plans.WholeWorkWarning, match="8,191"):
        diffshard.elastic.budget(train_step, phases, params, (jax.ShapeDtypeStruct((8191, 448), "float32"),) * 2)


def test_operations_without_a_way_to_be_split_are_named():
    def ranked(weights, x):
        return weights + jnp.sort(x.ravel()).sum()

    shapes = (jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((4096, 4096), "float32"))
    with pytest.warns(
        diffshard.plans.WholeWorkWarning, match=r"nothing of sort \(1x, .*test_whole_work\.py.* can be split"
    ):
        diffshard.search(ranked, MESH, hardware="h100").plan(*shapes)
