"""`search(..., formats=...)` decides what is sent and kept in fewer bits, beside shardings and products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.number_formats import all_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function

DEVICES, WIDTH, ROWS = 4, 16, 32
GRADIENTS = "sums of gradients in int8"


def train_step(params, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(seed=0):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {name: jax.random.normal(key, (WIDTH, WIDTH)) / 4 for name, key in zip(("up", "down"), keys, strict=True)}
    x, y = jax.random.normal(jax.random.key(seed), (2, ROWS, WIDTH))
    return params, {"x": x, "y": y}


def mesh_of():
    return jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])


def slow_links(mesh):
    own = diffshard.preset("h100", dict(mesh.shape))
    return dataclasses.replace(own, links={"data": diffshard.Link(0.0, 1e-6)}, kernel_launch_s=0.0, exposed_share=0.9)


def search(limit=1.0, **formats):
    """Searches for a step whose batch is split and whose parameters are not, so that gradients are summed."""
    mesh = mesh_of()
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return diffshard.search(
        train_step,
        mesh,
        hardware=slow_links(mesh),
        formats=diffshard.formats.Formats(limit, **formats),
        in_shardings=shardings,
    )


def losses_of(step, plan, steps):
    params, losses = arguments()[0], []
    for seed in range(steps):
        params, loss = step(*plan.shard(params, arguments(seed)[1]))
        losses.append(float(loss))
    return losses


def test_gradients_are_summed_in_int8_where_links_are_slow_and_the_plan_is_saved(tmp_path):
    args = arguments()
    exact = search(products=(), sums=["int8"], increases={}).plan(*args)
    step = search(products=(), sums=["int8"], increases={GRADIENTS: 0.5})
    plan = step.plan(*args)
    assert plan.step_s < 0.6 * exact.step_s
    assert plan.lower_bound_s <= plan.step_s
    assert plan.formats is not None
    (group,) = plan.formats.groups
    assert (group.name, group.format, group.num_rounded, group.count) == (GRADIENTS, "int8", 2, 2)
    assert plan.formats.loss_increase == pytest.approx(0.5)
    assert 0 < group.gain_s <= exact.step_s - plan.step_s
    assert sum(operation.sent_in == "int8" for operation in plan.operations) == 2
    assert GRADIENTS in str(plan)
    assert GRADIENTS in plan.html()
    assert search(limit=0.4, products=(), sums=["int8"], increases={GRADIENTS: 0.5}).plan(*args).step_s == exact.step_s
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_of())
    assert loaded == plan
    loss = step(*plan.shard(*args))[0]["up"]
    np.testing.assert_array_equal(loaded.apply(train_step)(*plan.shard(*args))[0]["up"], loss)
    assert "sums are sent in other formats" in str(exact.diff(plan))
    with pytest.raises(diffshard.PlanError, match="0 products and 2 sums, kept arrays or exchanges"):
        loaded.apply(train_step, executor="constraints")(*args)


def test_one_device_measures_the_losses_of_the_program():
    args = arguments()
    mesh, calls = mesh_of(), [arguments(seed) for seed in range(8)]
    options = Options(fn=train_step, mesh=mesh, hardware=slow_links(mesh), memory_limit_bytes=1e12)
    traced = trace_function(options, args)
    space = space_of(options, traced)
    formats = diffshard.formats.Formats(1.0, calls, steps=8, products=(), sums=["int8"])
    group = next(group for group in all_groups(space, formats) if group.name == GRADIENTS)
    losses = MeasuredLosses(formats, space, options, array_types(traced.call.arrays), traced.out_paths, DEVICES)
    measured = losses.run({}, losses._calls, group.members)[1]
    step = search(products=(), sums=["int8"], increases={GRADIENTS: 0.0})
    np.testing.assert_allclose(losses_of(step, step.plan(*args), 8), measured, rtol=2e-4)
    exact = losses.run({}, losses._calls, frozenset())[1]
    assert np.abs(exact - measured).max() > 1e-6
    (by_gradients,) = losses.increases_by_gradients(frozenset(), [group])
    (by_pairs,) = losses.increases_at(frozenset(), [group])
    assert 0 <= by_gradients < 0.01
    assert 0 <= by_pairs < 0.01


def test_sums_are_measured_and_rules_are_among_the_trials():
    calls = [arguments(seed) for seed in range(4)]
    plan = search(limit=0.5, calls=calls, steps=4, rounds=0, sums=["bfloat16", "int8"]).plan(*arguments())
    assert plan.formats is not None
    names = {trial.name for trial in plan.formats.trials}
    assert plan.formats.measured_increase is not None
    assert plan.formats.measured_increase <= 0.5
    assert any(group.format == "int8" for group in plan.formats.groups)
    assert {"nothing", "all products", "sums of gradients in bfloat16"} <= names
    assert all(plan.step_s <= t.step_s for t in plan.formats.trials if t.measured_increase <= 0.5)


@pytest.mark.parametrize(
    ("formats", "match"),
    [
        ({"sums": ["int7"]}, r"`Formats\.sums` has 'int7'.*bfloat16, float8, int8, int4"),
        ({"sums": ["int8", "int8"]}, r"`Formats\.sums` must have each format once"),
        ({"products": (), "sums": ()}, "has neither `products`"),
    ],
)
def test_formats_of_sums_that_break_a_rule(formats, match):
    with pytest.raises(ValueError, match=match):
        search(increases={}, **formats)


KEPT = "arrays kept for the backward pass in int8"


def deep_step(params, batch):
    def loss_of(params):
        x = batch["x"]
        for name in sorted(params):
            x = x + jnp.tanh(x @ params[name])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def deep_arguments(rows=256, seed=0):
    keys = jax.random.split(jax.random.key(7), 6)
    params = {f"layer_{i}": jax.random.normal(key, (WIDTH, WIDTH)) / 4 for i, key in enumerate(keys)}
    x, y = jax.random.normal(jax.random.key(seed), (2, rows, WIDTH))
    return params, {"x": x, "y": y}


def search_deep(memory_limit_bytes, limit=1.0, **formats):
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    formats = diffshard.formats.Formats(limit, products=(), kept=["int8"], **formats)
    return diffshard.search(
        deep_step, mesh, hardware="h100", formats=formats, memory_limit_bytes=memory_limit_bytes, donate_argnums=0
    )


def test_arrays_are_kept_as_codes_where_the_memory_asks_for_it(tmp_path):
    args = deep_arguments()
    free = search_deep(1e9, increases={KEPT: 0.1}).plan(*args)
    assert not any(operation.kept_in for operation in free.operations)
    limit = 0.85 * free.peak_bytes
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.raises(diffshard.InfeasibleError):
        diffshard.search(deep_step, mesh, hardware="h100", memory_limit_bytes=limit, donate_argnums=0).plan(*args)
    step = search_deep(limit, increases={KEPT: 0.1})
    plan = step.plan(*args)
    assert plan.peak_bytes <= limit
    assert plan.step_s > free.step_s
    assert plan.lower_bound_s <= plan.step_s
    assert plan.formats is not None
    (group,) = plan.formats.groups
    assert 0 < group.num_rounded < group.count  # no more than the memory asks for
    assert plan.formats.loss_increase == pytest.approx(0.1 * group.num_rounded / group.count)
    assert "kept arrays in fewer bits" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert loaded == plan
    exact_params, exact_loss = deep_step(*args)
    params, loss = step(*plan.shard(*args))
    assert loss == pytest.approx(exact_loss)
    changes = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, exact_params)
    assert 0 < max(changes.values()) < 0.01
    applied = loaded.apply(deep_step)(*plan.shard(*deep_arguments()))[0]
    np.testing.assert_array_equal(applied["layer_0"], params["layer_0"])
    assert "arrays are kept in other formats" in str(free.diff(plan))
    with pytest.raises(diffshard.InfeasibleError, match=r"at most 0\.001 to the loss"):
        search_deep(limit, limit=0.001, increases={KEPT: 0.1}).plan(*args)


def test_kept_arrays_take_as_much_of_the_limit_as_they_add():
    args = deep_arguments()
    memory = 0.85 * search_deep(1e9, increases={KEPT: 0.1}).plan(*args).peak_bytes
    formats = search_deep(memory, limit=0.09, increases={KEPT: 0.1}).plan(*args).formats
    assert formats is not None
    assert 0 < formats.loss_increase <= 0.09  # all arrays of the group would add 0.1


def test_kept_codes_are_measured():
    args = deep_arguments()
    free = search_deep(1e9, increases={}).plan(*args)
    calls = [deep_arguments(seed=seed) for seed in range(6)]
    plan = search_deep(0.85 * free.peak_bytes, limit=0.5, calls=calls, steps=6, rounds=1).plan(*args)
    assert plan.formats is not None
    assert plan.formats.measured_increase is not None
    assert plan.formats.measured_increase <= 0.5
    assert "nothing" not in {trial.name for trial in plan.formats.trials}  # it does not fit
    (group,) = plan.formats.groups
    assert group.num_rounded > 0


def scanned_step(params, batch):
    def loss_of(params):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights), None

        return jnp.mean((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return params - 0.1 * gradients, loss


def scanned_arguments(rows=256, layers=6):
    params, batch = deep_arguments(rows)
    return jnp.stack(list(params.values())[:layers]), batch


def test_scanned_layers_keep_codes_where_the_memory_asks_for_it(tmp_path):
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    args = scanned_arguments()

    def search_with(limit_bytes, kept=("int8",)):
        formats = diffshard.formats.Formats(1.0, products=(), kept=kept, increases={KEPT: 0.1}) if kept else None
        return diffshard.search(
            scanned_step, mesh, hardware="h100", formats=formats, memory_limit_bytes=limit_bytes, donate_argnums=0
        )

    free = search_with(1e9).plan(*args)
    limit = 0.8 * free.peak_bytes
    with pytest.raises(diffshard.InfeasibleError):
        search_with(limit, kept=()).plan(*args)
    step = search_with(limit)
    plan = step.plan(*args)
    assert plan.peak_bytes <= limit
    stacked = [operation for operation in plan.operations if operation.kept_in]
    assert stacked
    assert {operation.kind for operation in stacked} == {"stack"}
    assert plan.formats is not None
    assert plan.formats.loss_increase == pytest.approx(0.1 * len(stacked) / plan.formats.groups[0].count)
    exact, exact_loss = scanned_step(*args)
    params, loss = step(*plan.shard(*args))
    assert loss == pytest.approx(float(exact_loss), rel=1e-6)
    assert 0 < np.abs(params - exact).max() < 0.01
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert loaded == plan
    np.testing.assert_array_equal(loaded.apply(scanned_step)(*plan.shard(*scanned_arguments()))[0], params)
    temporary = [
        compiled.lower(*args).compile().memory_analysis().temp_size_in_bytes for compiled in (search_with(1e9), step)
    ]
    assert temporary[1] < temporary[0]
