"""`search(..., remat="search")` chooses what is kept from forward to backward, together with the sharding."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import diffshard
from diffshard.comparison import checked_search, compare
from diffshard.plans.comparison import ComparedPlan
from diffshard.sharding_search import remat as remat_search
from diffshard.sharding_search.executors import flat_function

LAYERS, ROWS, WIDTH, HIDDEN = 4, 512, 32, 128


def layer(x, weights):
    hidden = jax.nn.gelu(x @ weights["up"])
    return x + jax.nn.softmax(hidden) @ weights["down"]


def scanned_step(params, x):
    def loss_fn(params):
        return jnp.mean(lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0] ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 6,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 10,
    }
    return params, jax.random.normal(keys[2], (ROWS, WIDTH))


def search(limit_bytes, *, remat: Any = "search", hardware: Any = "h100", **options):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    return diffshard.search(
        scanned_step, mesh, hardware=hardware, memory_limit_bytes=limit_bytes, remat=remat, **options
    )


def least_bytes_of_shardings():
    """Returns the least memory that any sharding alone needs."""
    with pytest.raises(diffshard.InfeasibleError) as error:
        search(1e3, remat=None).plan(*arguments())
    (number,) = re.findall(r"at least ([\d,]+) bytes", str(error.value))
    return float(number.replace(",", ""))


@pytest.fixture(scope="module")
def least_bytes():
    return least_bytes_of_shardings()


@pytest.fixture(scope="module")
def searched(least_bytes):
    """Returns a step planned for seven tenths of the memory that sharding alone needs."""
    return search(0.7 * least_bytes)


def test_a_plan_fits_a_limit_that_no_sharding_alone_can(least_bytes, searched):
    plan = searched.plan(*arguments())
    assert plan.peak_bytes <= 0.7 * least_bytes
    assert plan.recomputed
    assert 0 < plan.lower_bound_s <= plan.step_s


def unrolled_step(params, x):
    def loss_fn(params):
        activations = x
        for number in range(LAYERS):
            activations = layer(activations, {name: array[number] for name, array in params.items()})
        return jnp.mean(activations**2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


@pytest.mark.parametrize("step", [scanned_step, unrolled_step])
def test_what_a_loop_over_microbatches_keeps_is_chosen_as_well(step):
    params, x = arguments()
    x = jnp.concatenate([x] * 16)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    parts = functools.partial(diffshard.search, diffshard.pipelines.in_microbatches(step, 4), mesh, hardware="h100")
    with pytest.raises(diffshard.InfeasibleError) as error:
        parts(memory_limit_bytes=1e3).plan(params, x)
    (least,) = re.findall(r"at least ([\d,]+) bytes", str(error.value))
    limit = 0.85 * float(least.replace(",", ""))  # no sharding alone fits
    searched = parts(memory_limit_bytes=limit, remat="search")
    plan = searched.plan(params, x)
    assert plan.recomputed
    assert plan.peak_bytes <= limit
    (new, loss), (expected, expected_loss) = searched(*plan.shard(params, x)), jax.jit(step)(params, x)
    assert jnp.allclose(loss, expected_loss, rtol=1e-5)
    assert all(jnp.allclose(new[name], expected[name], atol=1e-6) for name in new)
    assert not any(jnp.allclose(new[name], params[name], atol=1e-6) for name in new)


def test_results_are_those_of_the_function(searched):
    step = searched
    params, x = arguments()
    result, loss = step(*step.plan(params, x).shard(params, x))
    wanted, wanted_loss = jax.jit(scanned_step)(params, x)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, wanted)


def test_the_compiled_step_needs_less_memory(searched):
    free = search(1e12, remat=None)
    compiled = [f.lower(*arguments()).compile().memory_analysis().temp_size_in_bytes for f in (searched, free)]
    predicted = [f.plan(*arguments()).peak_bytes for f in (searched, free)]
    assert predicted[0] < predicted[1]
    assert compiled[0] < 0.7 * compiled[1]


def test_the_plan_says_what_is_kept_and_what_is_computed_again(searched):
    plan = searched.plan(*arguments())
    assert plan.remat is not None
    residuals = plan.remat.residuals
    assert {residual.how for residual in residuals} == {"kept", "recomputed"}
    assert sum(r.num_bytes for r in residuals if r.how == "kept") == pytest.approx(plan.remat.kept_bytes)
    assert "computed again" in str(plan)


def test_a_saved_plan_runs_without_a_search(tmp_path, searched):
    plan, (params, x) = searched.plan(*arguments()), arguments()
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", plan.mesh)
    assert loaded.remat == plan.remat
    for executor in (None, "constraints", "propagation"):
        step = loaded.apply(scanned_step, executor=executor)
        _, loss = step(*step.plan(params, x).shard(params, x))
        np.testing.assert_allclose(loss, scanned_step(params, x)[1], rtol=1e-5)


def test_an_earlier_plan_is_taken_only_where_it_answers_the_same_question(least_bytes, searched):
    plan = searched.plan(*arguments())
    again = search(0.7 * least_bytes, start=plan).plan(*arguments())
    assert again.recomputed == plan.recomputed
    with pytest.raises(diffshard.InfeasibleError):
        search(0.7 * least_bytes, remat=None, start=plan).plan(*arguments())


def test_shardys_partitioner_judges_the_program_with_what_runs_again(least_bytes, searched):
    plan = search(0.7 * least_bytes, check="shardy").plan(*arguments())
    assert plan.recomputed == searched.plan(*arguments()).recomputed


def judge_of(memory_factor, rounds=None):
    """Returns a judge whose compiled plans take a multiple of their predicted memory."""

    def judge(candidates, target, *, timeout_s):
        del target, timeout_s
        if rounds is not None:
            rounds.append([c.name for c in candidates])
        rows = []
        for c in candidates:
            assert c.space.graph == c.traced_function.graph
            peak = memory_factor(c.plan) * c.plan.peak_bytes
            fits = peak <= c.plan.memory_limit_bytes
            times = c.plan.step_s, 1.0, 1.0, 0.0, 0.0
            rows.append(ComparedPlan(c.name, c.plan.executor, *times, c.plan.peak_bytes, peak, fits))
        return rows

    return judge


def test_the_limit_holds_for_the_compiled_program(monkeypatch, least_bytes):
    rounds = []
    monkeypatch.setattr(checked_search, "judge", judge_of(lambda plan: 1.8, rounds))
    monkeypatch.setattr(remat_search, "_MOST_SEARCHES", 2)
    limit = 0.9 * least_bytes
    step = search(limit, check="compile", target="host")
    plan = step.plan(*arguments())
    assert len(rounds) > 1
    assert plan.recomputed
    assert 1.8 * plan.peak_bytes <= limit
    _, loss = step(*plan.shard(*arguments()))
    np.testing.assert_allclose(loss, jax.jit(scanned_step)(*arguments())[1], rtol=1e-5)


def test_what_keeps_all_is_compiled_too_where_it_may_fit(monkeypatch, least_bytes):
    monkeypatch.setattr(checked_search, "judge", judge_of(lambda plan: 2.0 if plan.recomputed else 0.9))
    monkeypatch.setattr(remat_search, "_MOST_SEARCHES", 1)
    h100 = diffshard.preset("h100", {"data": 2})  # with links on which splitting so small a step pays
    hardware = dataclasses.replace(h100, links={"data": diffshard.Link(1e-7, 1e-12)})
    plan = search(0.95 * least_bytes, hardware=hardware, check="compile", target="host").plan(*arguments())
    assert not plan.recomputed
    assert plan.peak_bytes > 0.95 * least_bytes


def test_a_plan_that_computes_again_is_compared(monkeypatch, searched):
    seen = []
    monkeypatch.setattr(compare, "judge", lambda plans, target, timeout_s: seen.extend(plans) or [])
    plan = searched.plan(*arguments())
    assert plan.mesh is not None
    diffshard.compare(scanned_step, plan.mesh, *arguments(), plans={"again": plan}, target="host")
    assert flat_function(seen[0].plan, seen[0].traced_function, seen[0].space, plan.mesh) is not None


def test_a_limit_that_nothing_meets_names_the_memory_that_would_do():
    with pytest.raises(diffshard.InfeasibleError, match=r"whatever is computed again.*[\d,]+ bytes"):
        search(1e4).plan(*arguments())


def test_wrong_values_are_refused_before_tracing():
    with pytest.raises(ValueError, match='`remat` must be "search", "offload" or None, not'):
        search(1e9, remat="full")


def test_what_fits_is_kept():
    plan = search(1e12).plan(*arguments())
    assert plan.step_s <= search(1e12, remat=None).plan(*arguments()).step_s * (1 + 1e-6)


def test_devices_are_searched_with_what_runs_again_on_each_shape(monkeypatch, least_bytes):
    monkeypatch.setattr(remat_search, "_MOST_SEARCHES", 2)
    limit, devices = 0.4 * least_bytes, jax.devices()[:4]
    with pytest.raises(diffshard.InfeasibleError, match="No plan was found on any of 2 shapes"):
        diffshard.search(scanned_step, devices=devices, hardware="h100", memory_limit_bytes=limit).plan(*arguments())
    step = diffshard.search(scanned_step, devices=devices, hardware="h100", memory_limit_bytes=limit, remat="search")
    plan = step.plan(*arguments())
    assert plan.remat is not None
    assert plan.peak_bytes <= limit
    assert len(plan.shapes) == 2
    assert plan.step_s == min(shape.step_s for shape in plan.shapes if shape.step_s is not None)
    assert plan.lower_bound_s == min(shape.lower_bound_s for shape in plan.shapes)
    for result, expected in zip(
        jax.tree.leaves(step(*arguments())), jax.tree.leaves(scanned_step(*arguments())), strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5)
