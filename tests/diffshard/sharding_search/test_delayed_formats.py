"""Products with delayed scales in a search: measured, carried by the step, saved, and restored on other devices."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.base import PlanError
from diffshard.plans.consistency import check_plan
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.number_formats import all_groups, groups_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.delayed_scales import HISTORY, NAME
from tests.diffshard.sharding_search.test_coded_formats import arguments, train_step

RATES = {"float32": 1e12, "bfloat16": 2e12, "float8_e4m3fn": 4e12}


def options_on(num_devices, **options):
    mesh = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    links = {"data": diffshard.Link(0.0, 1e-12)}
    hardware = diffshard.Hardware("products are all", RATES, 1e18, 1e12, links if num_devices > 1 else {})
    return Options(fn=train_step, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12, **options)


def every_group(options):
    graph = trace_function(options, arguments()).graph
    return {group.name: 0.0 for group in groups_of(graph, [NAME])}


def search_on(num_devices, **formats: Any):
    options = options_on(num_devices)
    formats = {"increases": every_group(options), **formats}
    return diffshard.search(
        train_step,
        options.mesh,
        hardware=options.hardware,
        formats=diffshard.formats.Formats(1.0, products=[NAME], **formats),
        in_shardings=(NamedSharding(options.mesh, P()), NamedSharding(options.mesh, P("data"))),
    )


@pytest.fixture(scope="module")
def planned():
    step = search_on(4)
    return step, step.plan(*arguments())


def trained(step, plan, steps, state=None, first=0):
    state, losses = plan.shard(arguments()[0] if state is None else state), []
    for seed in range(first, first + steps):
        state, loss = step(state, plan.shard(batch=arguments(seed)[1]))
        losses.append(float(loss))
    return state, losses


def test_a_training_with_delayed_scales_is_that_of_one_device_as_searches_measure_it(planned):
    step, plan = planned
    assert {o.format for o in plan.operations} == {"", NAME}
    (maxima,) = plan.residuals
    assert maxima.path.startswith("params.residuals['maxima of ")
    state, losses = trained(step, plan, 4)
    assert isinstance(state, diffshard.formats.Carried)
    exact = arguments()[0]
    for seed, loss in enumerate(losses):
        exact, expected = train_step(exact, arguments(seed)[1])
        assert loss == pytest.approx(float(expected), rel=0.1)
        assert loss != float(expected)
    options = options_on(4)
    traced = trace_function(options, arguments())
    space = space_of(options, traced)
    calls = [arguments(seed) for seed in range(4)]
    formats = diffshard.formats.Formats(1.0, products=[NAME], calls=calls, steps=4)
    measured = MeasuredLosses(formats, space, options, array_types(traced.call.arrays), traced.out_paths)
    products = frozenset(m for group in all_groups(space, formats) for m in group.members)
    assert len(products) == sum(bool(o.format) for o in plan.operations)
    np.testing.assert_allclose(measured.run({}, measured._calls, products)[1], losses, rtol=1e-5)


def test_a_plan_with_delayed_scales_is_saved_and_checked(planned, tmp_path):
    step, plan = planned
    check_plan(plan)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", plan.mesh)
    assert loaded == plan
    _, losses = trained(step, plan, 2)
    assert trained(loaded.apply(train_step), loaded, 2)[1] == losses
    with pytest.raises(ValueError, match=r"`residuals` must be of the 1 operations .* maxima last"):
        check_plan(dataclasses.replace(plan, residuals=()))


def test_maxima_go_to_plans_of_other_meshes_and_are_left_out_where_none_are_read(planned):
    step, plan = planned
    state, _ = trained(step, plan, 2)
    _, losses = trained(step, plan, 2, state, first=2)
    state = jax.tree.map(np.asarray, trained(step, plan, 2)[0])
    other = search_on(2)
    other_plan = other.plan(*arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = other_plan.shard(state)
    for key, array in state.residuals.items():
        np.testing.assert_array_equal(moved.residuals[key], array)
    np.testing.assert_allclose(trained(other, other_plan, 2, state, first=2)[1], losses, rtol=1e-5)
    exact = search_on(4, increases={}).plan(*arguments())
    with pytest.warns(UserWarning, match="1 of the residuals .* not delayed here"):
        assert isinstance(exact.shard(state), dict)


def test_numbers_that_are_cut_off_are_counted_by_operand(planned, tmp_path):
    step, plan = planned
    params, batch = arguments()
    state, _ = step(*plan.shard(params, batch))
    before = state.overflows
    assert before == 0
    grown = batch | {"x": 3 * batch["x"]}
    state, _ = step(state, plan.shard(batch=grown))
    assert state.overflows > before
    (maxima,) = state.residuals.values()
    assert maxima.shape[-1] == HISTORY + 1
    assert state.overflows == np.asarray(maxima)[..., HISTORY].sum()
    by_operand = plan.overflows(state)
    assert sum(by_operand.values()) == state.overflows
    assert all(" operand " in name and ".py:" in name for name in by_operand)
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json").overflows(state) == by_operand
    unrounded = search_on(4, increases={}).plan(*arguments())
    with pytest.raises(PlanError, match="those of another plan"):
        unrounded.overflows(state)
    with pytest.raises(ValueError, match="`delayed_scales` must have the rows of the maxima"):
        check_plan(dataclasses.replace(plan, delayed_scales=plan.delayed_scales[1:]))


def test_checkpoints_have_the_maxima_on_other_devices_and_tell_of_what_was_cut_off(tmp_path):
    def resumed(num_devices):
        options = options_on(num_devices)
        assert isinstance(options.mesh, Mesh)
        formats = diffshard.formats.Formats(1.0, products=[NAME], increases=every_group(options))
        return diffshard.resume(
            tmp_path, train_step, options.mesh, lambda: arguments()[0], arguments()[1],
            hardware=options.hardware, formats=formats, progress="none",
        )  # fmt: skip

    with resumed(4) as training:
        state = training.restore()
        for seed, growth in enumerate((1, 1, 3)):
            batch = arguments(seed)[1]
            state, _ = training.step(state, batch | {"x": growth * batch["x"]})
        with pytest.warns(UserWarning, match=f"{state.overflows} times since the last checkpoint .* cut off"):
            training.save(3, state, force=True)
        maxima = jax.tree.map(np.asarray, state.residuals)
    assert any(map(np.any, maxima.values()))
    with resumed(2) as training:
        state = training.restore()
        for key, array in state.residuals.items():
            np.testing.assert_array_equal(array, maxima[key])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.save(4, state, force=True)


def test_a_step_that_returns_no_state_has_no_place_for_maxima():
    def loss_of(params, batch):
        return jnp.mean((batch["x"] @ params["up"]) ** 2)

    options = options_on(4)
    formats = diffshard.formats.Formats(1.0, products=[NAME], increases={})
    step = diffshard.search(loss_of, options.mesh, hardware=options.hardware, formats=formats)
    with pytest.raises(ValueError, match=r"`Formats.products` has 'float8_delayed', whose residuals go with the state"):
        step.plan(*arguments())
