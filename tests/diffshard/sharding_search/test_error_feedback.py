"""Sums with error feedback in a search: measured, carried by the step, saved, and restored on other devices."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.plans.consistency import check_plan
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.number_formats import all_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from tests.diffshard.sharding_search.test_coded_formats import (
    DEVICES,
    arguments,
    losses_of,
    mesh_of,
    search,
    slow_links,
    train_step,
)

INT4 = "int4 with error feedback"
GRADIENTS = f"sums of gradients in {INT4}"
FORMATS = {"products": (), "sums": [INT4], "increases": {GRADIENTS: 0.0}}


def total(carried):
    """Returns the residuals of all sums, by operation."""
    return {key: np.asarray(array).sum(axis=0).ravel() for key, array in carried.residuals.items()}


@pytest.fixture(scope="module")
def planned():
    step = search(**FORMATS)
    return step, step.plan(*arguments())


def test_the_step_carries_residuals_and_a_loop_is_the_same_with_and_without(planned, tmp_path):
    args = arguments()
    step, plan = planned
    assert [tensor.path.split(" of ")[0] for tensor in plan.residuals] == [
        f"params.residuals['{i}" for i, o in enumerate(plan.operations) if o.sent_in == INT4
    ]
    state = plan.shard(args[0])
    assert isinstance(state, diffshard.formats.Carried)
    assert not any(map(np.any, state.residuals.values()))
    after, loss = step(state, plan.shard(batch=args[1]))
    assert isinstance(after, diffshard.formats.Carried)
    assert loss == pytest.approx(float(train_step(*args)[1]), rel=1e-5)
    from_bare, _ = step(*args)  # a state without residuals begins with none
    for first, second in zip(jax.tree.leaves(after), jax.tree.leaves(from_bare), strict=True):
        np.testing.assert_array_equal(first, second)
    assert all(np.abs(lacking).max() > 0 for lacking in total(after).values())

    exact, sent = args[0], state
    for seed in range(3):  # at the same parameters the sum of all steps lacks only what the last one has not sent
        batch = arguments(seed)[1]
        moved = train_step(args[0], batch)[0]
        exact = jax.tree.map(lambda e, m, p: e + m - p, exact, moved, args[0])
        again, _ = step(diffshard.formats.Carried(args[0], sent.residuals), batch)
        changed = jax.tree.map(lambda s, m, p: s + m - p, sent.state, again.state, args[0])
        sent = diffshard.formats.Carried(jax.tree.map(jnp.asarray, changed), again.residuals)
    lacks = [0.1 * lacking.reshape(16, 16) for lacking in total(sent).values()]
    for name in ("up", "down"):
        difference = np.asarray(sent.state[name] - exact[name])
        assert any(
            np.allclose(difference, own, atol=1e-5) or np.allclose(difference, own.T, atol=1e-5) for own in lacks
        )
        assert np.abs(difference).max() > 3e-4

    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_of())
    assert loaded == plan
    with pytest.raises(ValueError, match="`residuals` must be of the 2 operations"):
        check_plan(dataclasses.replace(plan, residuals=plan.residuals[1:]))
    applied = loaded.apply(train_step)
    for first, second in zip(jax.tree.leaves(after), jax.tree.leaves(applied(state, args[1])[0]), strict=True):
        np.testing.assert_array_equal(first, second)
    assert "residual" in str(plan)
    shardings = plan.in_shardings[0]
    assert isinstance(shardings, diffshard.formats.Carried)
    assert jax.tree.structure(plan.out_shardings[0]) == jax.tree.structure(shardings)
    assert step.lower(*args).compile().as_text().count("all-to-all") >= 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("path", "other", "must go with one of `parameters`"),
        ("dtype", "float16", "must be float32"),
    ],
)
def test_residuals_of_a_damaged_plan_are_refused(planned, field, value, message):
    _, plan = planned
    text = getattr(plan.residuals[0], field).replace("params", value).replace("float32", value)
    damaged = dataclasses.replace(plan.residuals[0], **{field: text})
    with pytest.raises(ValueError, match=message):
        check_plan(dataclasses.replace(plan, residuals=(damaged, *plan.residuals[1:])))


def test_a_plan_that_sends_what_is_no_sum_as_codes_is_refused(planned):
    _, plan = planned
    number = next(i for i, o in enumerate(plan.operations) if "dot_general" in o.signature and not o.sent_in)
    operations = list(plan.operations)
    operations[number] = dataclasses.replace(operations[number], sent_in="int8")
    with pytest.raises(diffshard.PlanError, match=r"sends the sums of dot_general.* in int8, in which that cannot be"):
        dataclasses.replace(plan, operations=tuple(operations)).apply(train_step)(*arguments())


def test_under_another_trace_residuals_are_carried_by_a_scan(planned):
    step, plan = planned
    batches = [arguments(seed)[1] for seed in range(3)]
    state = plan.shard(arguments()[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, losses = jax.jit(lambda state: jax.lax.scan(step, state, stacked))(state)
    for batch, loss in zip(batches, losses, strict=True):
        state, own = step(state, batch)
        assert loss == pytest.approx(float(own), rel=1e-5)
    np.testing.assert_allclose(scanned.state["up"], state.state["up"], rtol=1e-4, atol=1e-6)


def test_residuals_on_one_device_are_moved_to_where_the_plan_has_them(planned):
    step, _ = planned
    state, _ = step(*arguments())
    on_one = {key: jax.device_put(np.asarray(array), jax.devices()[0]) for key, array in state.residuals.items()}
    moved = step(diffshard.formats.Carried(state.state, on_one), arguments(1)[1])
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(step(state, arguments(1)[1])), strict=True):
        np.testing.assert_array_equal(one, other)


def test_residuals_go_to_plans_of_other_meshes(planned):
    state, _ = planned[0](*arguments())
    on_host = jax.tree.map(np.asarray, state)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    formats = diffshard.formats.Formats(1.0, **FORMATS)
    other = diffshard.search(
        train_step, mesh, hardware=slow_links(mesh), formats=formats, in_shardings=shardings, donate_argnums=0
    )
    other_plan = other.plan(*arguments())
    with pytest.raises(diffshard.PlanError, match=r"residuals of the state are those of another plan.*plan\.shard"):
        other(on_host, arguments(1)[1])
    lacking = total(state)
    for key, lacked in total(other_plan.shard(on_host)).items():
        np.testing.assert_allclose(lacked, lacking[key], rtol=1e-5, atol=1e-6)
    moved = other_plan.shard(on_host)  # arrays that NumPy has seen are not donated
    after = other(moved, arguments(1)[1])[0]
    assert set(after.residuals) == set(state.residuals)
    assert all(array.is_deleted() for array in moved.residuals.values())  # the state is donated
    exact = search(products=(), sums=[INT4], increases={}).plan(*arguments())
    with pytest.warns(UserWarning, match="2 of the residuals .* sent without error feedback here"):
        assert isinstance(exact.shard(state), dict)


def test_residuals_of_sums_of_another_size_are_left_out(planned):
    _, plan = planned
    others = {key: jnp.ones((4, 8, 8)) for key in plan.shard(arguments()[0]).residuals}
    with pytest.warns(UserWarning, match="2 of the residuals"):
        state = plan.shard(diffshard.formats.Carried(arguments()[0], others))
    assert not any(map(np.any, state.residuals.values()))


def test_residuals_go_to_no_other_sum_after_an_edit_of_the_step():
    def step_of(names):
        def edited(params, batch):
            def loss_of(params):
                return sum(jnp.mean(jnp.tanh(batch["x"] @ params[name]) * batch["y"]) for name in names)

            loss, gradients = jax.value_and_grad(loss_of)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

        mesh = mesh_of()
        shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        formats = diffshard.formats.Formats(1.0, **FORMATS)
        return diffshard.search(edited, mesh, hardware=slow_links(mesh), formats=formats, in_shardings=shardings)

    args, (first, second) = arguments(), map(step_of, (("up", "down"), ("down", "up")))
    after, _ = first(*first.plan(*args).shard(*args))
    assert len(after.residuals) == 2
    assert all(map(np.any, after.residuals.values()))
    with pytest.warns(UserWarning, match="2 of the residuals .* another version of the function"):
        kept = second.plan(*args).shard(after)
    assert not any(map(np.any, kept.residuals.values()))
    again = step_of(("up", "down")).plan(*args).shard(after)
    assert total(again).keys() == total(after).keys()


def test_a_step_that_is_not_finite_leaves_residuals_finite(planned):
    step, plan = planned
    params, batch = arguments()
    spoilt = batch | {"y": batch["y"].at[0, 0].set(jnp.inf)}
    after, loss = step(plan.shard(params), spoilt)
    assert not jnp.isfinite(loss)
    assert all(np.isfinite(array).all() for array in after.residuals.values())
    following, loss = step(diffshard.formats.Carried(plan.shard(params).state, after.residuals), batch)
    assert np.isfinite(loss)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(following))


def test_residuals_that_explicit_axes_split_go_to_plans_of_other_meshes():
    def planned_on(sizes, spec):
        mesh = jax.make_mesh(sizes, ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
        hardware = dataclasses.replace(
            slow_links(mesh), links=dict.fromkeys(("data", "model"), diffshard.Link(0.0, 1e-6))
        )
        shardings = NamedSharding(mesh, spec), NamedSharding(mesh, P("data"))
        formats = diffshard.formats.Formats(1.0, **FORMATS)
        step = diffshard.search(train_step, mesh, hardware=hardware, formats=formats, in_shardings=shardings)
        return step, step.plan(*arguments())

    step, plan = planned_on((2, 2), P(None, "model"))
    assert any("model" in axes for tensor in plan.residuals for axes in tensor.spec[1:])
    state, _ = step(*plan.shard(*arguments()))
    other, other_plan = planned_on((4, 1), P("data"))
    moved = other_plan.shard(state)
    for key, lacking in total(moved).items():
        np.testing.assert_allclose(lacking, total(state)[key], rtol=1e-5, atol=1e-6)
    assert isinstance(other(moved, other_plan.shard(batch=arguments(1)[1]))[0], diffshard.formats.Carried)


def test_one_device_measures_the_losses_of_the_program(planned):
    args, steps = arguments(), 6
    options = Options(fn=train_step, mesh=mesh_of(), hardware=slow_links(mesh_of()), memory_limit_bytes=1e12)
    traced = trace_function(options, args)
    space = space_of(options, traced)
    calls = [arguments(seed) for seed in range(steps)]
    formats = diffshard.formats.Formats(1.0, calls, steps=steps, products=(), sums=["int4", INT4], kept=["int8"])
    groups = {group.format: group for group in all_groups(space, formats) if "gradients" in group.name}
    assert {group.format for group in all_groups(space, formats) if group.name.startswith("forward")} == {"int4"}
    losses = MeasuredLosses(formats, space, options, array_types(traced.call.arrays), traced.out_paths, DEVICES)
    measured = losses.run({}, losses._calls, groups[INT4].members)[1]
    step, plan = planned
    np.testing.assert_allclose(losses_of(step, plan, steps), measured, rtol=5e-4)  # all-reduces round once more
    assert not np.allclose(measured, losses.run({}, losses._calls, groups["int4"].members)[1], rtol=1e-6)
    state, _ = losses.run({}, losses._calls[:3], groups[INT4].members)
    _, later = losses.run(state, losses._calls[3:], groups[INT4].members)
    np.testing.assert_allclose(later, measured[3:], rtol=1e-6)  # the state of a look has the residuals
    (slope,) = losses.increases_by_gradients(frozenset(), [groups[INT4]])
    assert 0 <= slope < 0.1


def test_a_search_with_several_formats_takes_what_the_limit_allows():
    increases = {"sums of gradients in int4": 0.5, GRADIENTS: 0.1}
    plan = search(limit=0.2, products=(), sums=["int4", INT4], increases=increases).plan(*arguments())
    assert {operation.sent_in for operation in plan.operations} - {""} == {INT4}
    calls = [arguments(seed) for seed in range(4)]
    measured = search(limit=5.0, products=(), sums=["int4", INT4], calls=calls, steps=4, rounds=0).plan(*arguments())
    assert measured.formats is not None
    assert GRADIENTS in {trial.name for trial in measured.formats.trials} | {"round 1"}


def test_residuals_go_with_the_largest_argument_wherever_it_is_returned():
    def step(number, params, batch):
        after, loss = train_step(params, batch)
        return loss, (number + 1, [after])

    mesh = mesh_of()
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    formats = diffshard.formats.Formats(1.0, **FORMATS)
    planned_step = diffshard.search(step, mesh, hardware=slow_links(mesh), formats=formats, in_shardings=shardings)
    loss, (number, [after]) = planned_step(jnp.zeros((), jnp.int32), *arguments())
    assert number == 1
    assert isinstance(after, diffshard.formats.Carried)
    assert isinstance(planned_step.plan(number, after.state, arguments()[1]).out_shardings[1][1][0], type(after))
    assert planned_step(number, after, arguments(1)[1])[0] != loss


def test_what_error_feedback_does_not_go_with():
    def loss_alone(params, batch):
        return train_step(params, batch)[1]

    mesh = mesh_of()
    formats = diffshard.formats.Formats(1.0, **FORMATS)
    with pytest.raises(ValueError, match=r"no result of .*loss_alone replaces an argument.*Return the new state"):
        diffshard.search(loss_alone, mesh, hardware=slow_links(mesh), formats=formats).plan(*arguments())
    with pytest.raises(ValueError, match=r"modules have no place for them"):
        diffshard.nnx.search(train_step, mesh, hardware=slow_links(mesh), formats=formats)
    with pytest.raises(ValueError, match=r"`Formats\.kept` has 'int4 with error feedback'"):
        search(increases={}, kept=[INT4])


def test_an_earlier_plan_is_taken_and_a_folder_keeps_plans(planned, tmp_path):
    _, plan = planned
    args = arguments()
    assert search_from(plan).plan(*args) == plan
    within_less = search_from(plan, limit=0.5).plan(*args).formats
    assert within_less is not None
    assert within_less.max_loss_increase == 0.5
    exact = search_from(plan, **{**FORMATS, "increases": {GRADIENTS: 2.0}}).plan(*args)
    assert not exact.residuals, "more is given now than the limit allows"
    calls = [arguments(seed) for seed in range(4)]
    formats = {"products": (), "sums": [INT4], "calls": calls, "steps": 4, "rounds": 0}
    first = search_from(None, cache=tmp_path, **formats).plan(*args)
    again = search_from(None, cache=tmp_path, **formats).plan(*args)
    assert again.stored_in
    assert again == first
    assert again.formats == first.formats
    assert not search_from(None, cache=tmp_path, **{**formats, "calls": calls[::-1]}).plan(*args).stored_in


def search_from(start, limit=1.0, cache=None, **formats):
    mesh = mesh_of()
    return diffshard.search(
        train_step, mesh, hardware=slow_links(mesh), start=start, cache=cache,
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
        formats=diffshard.formats.Formats(limit, **(formats or FORMATS)),
    )  # fmt: skip


def init():
    return arguments()[0]


@pytest.mark.parametrize("devices", [4, 2])
def test_a_training_goes_on_with_residuals_on_these_and_other_devices(devices, tmp_path):
    def resumed(count):
        mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])
        shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        formats = diffshard.formats.Formats(1.0, **FORMATS)
        return diffshard.resume(
            tmp_path, train_step, mesh, init, arguments()[1],
            hardware=slow_links(mesh), formats=formats, in_shardings=shardings, progress="none",
        )  # fmt: skip

    with resumed(4) as training:
        state = training.restore()
        for number in range(2):
            state, _ = training.step(state, arguments(number)[1])
        with pytest.raises(ValueError, match=r"has no residuals, .* Save the `Carried` .*, not dict"):
            training.save(2, state.state)
        training.save(2, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = resumed(devices)
        restored = training.restore()
    np.testing.assert_array_equal(restored.state["up"], state.state["up"])
    for key, lacking in total(restored).items():
        assert restored.residuals[key].shape[0] == devices
        np.testing.assert_allclose(lacking, total(state)[key], rtol=1e-5, atol=1e-6)
    if devices == 4:
        for key, residual in restored.residuals.items():
            np.testing.assert_array_equal(residual, state.residuals[key])
    training.step(restored, arguments(2)[1])
    training.close()


def test_an_abstract_mesh_lowers_a_step_with_residuals():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    formats = diffshard.formats.Formats(1.0, **FORMATS)
    step = diffshard.search(train_step, mesh, hardware=slow_links(mesh), formats=formats, in_shardings=(P(), P("data")))
    assert step.plan(*arguments()).residuals
    assert "all_to_all" in step.lower(*arguments()).as_text()
