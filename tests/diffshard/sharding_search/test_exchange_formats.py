"""`search(..., formats=...)` decides which activations are exchanged as codes, beside shardings."""

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
from tests.search_spaces.sharding.test_coded_exchanges import experts_step as train_step

DEVICES, WIDTH = 4, 16
FORWARD, BACKWARD = "loss_of forward exchanged in int8", "loss_of backward exchanged in int8"


def arguments(seed=0):
    shapes = {"before": (WIDTH, WIDTH), "experts": (DEVICES, WIDTH, WIDTH), "after": (WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(5), len(shapes))
    params = {name: jax.random.normal(key, shapes[name]) / 4 for name, key in zip(shapes, keys, strict=True)}
    return params, jax.random.normal(jax.random.key(seed), (2 * DEVICES, DEVICES, WIDTH))


def mesh_of():
    return jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])


def slow_links(mesh):
    own = diffshard.preset("h100", dict(mesh.shape))
    return dataclasses.replace(own, links={"data": diffshard.Link(0.0, 1e-6)}, kernel_launch_s=0.0)


def search(limit=1.0, **formats):
    """Searches for a step whose tokens are split by groups and whose experts are on different devices."""
    mesh = mesh_of()
    copies, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return diffshard.search(
        train_step,
        mesh,
        hardware=slow_links(mesh),
        formats=diffshard.formats.Formats(limit, products=(), exchanges=["int8"], **formats),
        in_shardings=({"before": copies, "experts": parts, "after": copies}, parts),
    )


def exchanged(plan):
    return [operation for operation in plan.operations if operation.exchanged_in == "int8"]


def test_tokens_are_exchanged_in_int8_where_links_are_slow_and_the_plan_is_saved(tmp_path):
    args, increases = arguments(), {FORWARD: 0.5, BACKWARD: 0.25}
    exact = search(increases={}).plan(*args)
    step = search(increases=increases)
    plan = step.plan(*args)
    assert plan.step_s < exact.step_s
    assert plan.lower_bound_s <= plan.step_s
    assert len(exchanged(plan)) >= 3
    assert plan.formats is not None
    forward, backward = (next(g for g in plan.formats.groups if g.name == name) for name in (FORWARD, BACKWARD))
    assert forward.num_rounded + backward.num_rounded == len(exchanged(plan))
    predicted = sum(increases[g.name] * g.num_rounded / g.count for g in (forward, backward))
    assert plan.formats.loss_increase == pytest.approx(predicted)
    assert forward.gain_s > 0
    assert {forward.kind, backward.kind} == {"exchange"}
    assert FORWARD in str(plan)
    assert FORWARD in plan.html()
    assert not exchanged(search(limit=0.01, increases=increases).plan(*args))
    text = step.lower(*args).compile().as_text()
    assert text is not None
    assert sum("= (u8[" in line and " all-to-all(" in line for line in text.splitlines()) == len(exchanged(plan))
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh_of())
    assert loaded == plan
    params, _ = step(*plan.shard(*args))
    assert 0 < np.abs(params["after"] - train_step(*args)[0]["after"]).max() < 0.01
    applied = loaded.apply(train_step)(*plan.shard(*arguments()))[0]
    np.testing.assert_array_equal(applied["after"], params["after"])
    assert "arrays are exchanged in other formats" in str(exact.diff(plan))
    with pytest.raises(diffshard.PlanError, match="sums, kept arrays or exchanges in fewer bits"):
        loaded.apply(train_step, executor="constraints")(*args)


def test_a_plan_that_exchanges_what_it_does_not_is_refused():
    plan = search(increases={FORWARD: 0.0, BACKWARD: 0.0}).plan(*arguments())
    operations = list(plan.operations)
    number = next(i for i, o in enumerate(operations) if o.signature.startswith("sub") and not o.exchanged_in)
    operations[number] = dataclasses.replace(operations[number], exchanged_in="int8")
    wrong = dataclasses.replace(plan, operations=tuple(operations))
    with pytest.raises(diffshard.PlanError, match=r"exchanges the result of sub\(.*in int8, in which that cannot be"):
        wrong.apply(train_step)(*arguments())


def test_one_device_measures_the_losses_of_the_program():
    args, mesh = arguments(), mesh_of()
    calls = [arguments(seed) for seed in range(6)]
    options = Options(fn=train_step, mesh=mesh, hardware=slow_links(mesh), memory_limit_bytes=1e12)
    traced = trace_function(options, args)
    space = space_of(options, traced)
    formats = diffshard.formats.Formats(1.0, calls, steps=6, products=(), exchanges=["int8"])
    losses = MeasuredLosses(formats, space, options, array_types(traced.call.arrays), traced.out_paths, DEVICES)
    step = search(increases={FORWARD: 0.0, BACKWARD: 0.0})
    plan = step.plan(*args)
    members = [member for group in all_groups(space, formats) for member in group.members]
    used = frozenset(member for member in members if plan.operations[member[0]].exchanged_in)
    measured = losses.run({}, losses._calls, used)[1]
    params, own = args[0], []
    for seed in range(6):
        params, loss = step(*plan.shard(params, arguments(seed)[1]))
        own.append(float(loss))
    np.testing.assert_allclose(own, measured, rtol=1e-5)
    exact = losses.run({}, losses._calls, frozenset())[1]
    assert np.abs(exact - measured).max() > 1e-5


def test_exchanges_are_measured_and_rules_are_among_the_trials():
    calls = [arguments(seed) for seed in range(4)]
    plan = search(limit=0.5, calls=calls, steps=4, rounds=0).plan(*arguments())
    assert plan.formats is not None
    rules = {f"exchanges of the {direction} pass in int8" for direction in ("forward", "backward")}
    assert {"nothing", *rules} <= {trial.name for trial in plan.formats.trials}
    assert plan.formats.measured_increase is not None
    assert plan.formats.measured_increase <= 0.5
    assert exchanged(plan)


def test_a_format_that_exchanges_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"`Formats\.exchanges` has 'int7'.*bfloat16, float8, int8, int4"):
        diffshard.search(
            train_step, mesh_of(), hardware="h100",
            formats=diffshard.formats.Formats(1.0, increases={}, exchanges=["int7"]),
        )  # fmt: skip


def layers_step(params, x):
    def loss_of(params):
        y = x
        for number, layer in enumerate(params):
            with jax.named_scope(f"layer_{number}"):
                for name, weights in layer.items():
                    with jax.named_scope(name):
                        y = jnp.tanh(jnp.einsum("gem,mn->gen", y, weights))
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def test_equal_modules_of_layers_are_one_group_forward_and_backward_apart():
    layer = {name: jnp.ones((WIDTH, WIDTH)) for name in ("mix", "widen")}
    args, mesh = ([layer] * 3, arguments()[1]), mesh_of()
    options = Options(fn=layers_step, mesh=mesh, hardware=slow_links(mesh), memory_limit_bytes=1e12)
    space = space_of(options, trace_function(options, args))
    formats = diffshard.formats.Formats(1.0, increases={}, products=(), exchanges=["int8", "float8"])
    groups = {group.name: group for group in all_groups(space, formats)}
    for direction in ("forward", "backward"):
        for name in ("int8", "float8"):
            for module in ("mix", "widen"):
                group = groups[f"layer_*/{module} {direction} exchanged in {name}"]
                layers = {vertex.scope.split("layer_")[1][0] for vertex in group.vertices}
                assert len(layers) >= 2
    exchangeable = [vertex.index for vertex in space.exchangeable]
    in_groups = [v.index for group in groups.values() if group.format == "int8" for v in group.vertices]
    assert sorted(in_groups) == sorted(exchangeable)
