"""`search(..., formats=...)` decides shardings and number formats together, within a limit on the predicted loss."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.sharding_search.number_formats import product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function

LAYERS, ROWS, WIDTH = 2, 16, 16
UNLIMITED = 1e9


def train_step(params, batch):
    def loss_of(params):
        x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), batch[0], params["layers"])
        return jnp.mean((x @ params["head"] - batch[1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(rows=ROWS, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "layers": jax.random.normal(keys[0], (LAYERS, width, width)) / math.sqrt(width),
        "head": jax.random.normal(keys[1], (width, width)) / math.sqrt(width),
    }
    return params, tuple(jax.random.normal(key, (rows, width)) for key in keys[2:])


def mesh_of(num_devices):
    return jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])


def fast_links(mesh):
    """Returns H100s on which even small products gain by float8."""
    links = {name: diffshard.Link(0.0, 1e-18) for name in mesh.shape}
    own = diffshard.preset("h100", dict(mesh.shape))
    return dataclasses.replace(own, kernel_launch_s=0.0, memory_bytes_per_s=1e18, links=links)


def search(mesh, limit, fn=train_step, hardware=None, **formats):
    hardware = fast_links(mesh) if hardware is None else hardware
    return diffshard.search(fn, mesh, hardware=hardware, formats=diffshard.formats.Formats(limit, **formats))


def groups_on(mesh, hardware, args):
    options = Options(fn=train_step, mesh=mesh, hardware=hardware, memory_limit_bytes=1e15)
    return product_groups(space_of(options, trace_function(options, args)))


def test_the_found_plan_and_the_bound_against_every_choice_of_formats():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    names = [group.name for group in groups_on(mesh, hardware, args)]
    assert len(names) == 6  # of a layer and the head: the forward product and two backward ones
    names = names[:4]  # others stay as they are
    increases = dict(zip(names, (0.5, 0.3, 0.2, 0.45), strict=True))
    limit = 0.8
    best_s = math.inf
    for switches in itertools.product((False, True), repeat=len(names)):
        chosen = {name: 0.0 for name, is_on in zip(names, switches, strict=True) if is_on}
        if sum(increases[name] for name in chosen) <= limit:
            best_s = min(best_s, search(mesh, limit, hardware=hardware, increases=chosen).plan(*args).step_s)
    plan = search(mesh, limit, hardware=hardware, increases=increases).plan(*args)
    assert plan.formats is not None
    assert plan.formats.loss_increase <= limit
    assert plan.lower_bound_s <= best_s * (1 + 1e-9)
    assert plan.step_s <= best_s * (1 + 1e-6)
    exact = diffshard.search(train_step, mesh, hardware=hardware).plan(*args)
    assert plan.step_s < 0.9 * exact.step_s
    assert plan.lower_bound_s > 0.5 * plan.step_s


def test_groups_are_measured_and_the_plan_runs_is_saved_applied_and_compared(tmp_path):
    mesh, args = mesh_of(2), arguments()
    step = search(mesh, UNLIMITED, calls=[args] * 4, steps=4)
    plan = step.plan(*args)
    assert plan.formats is not None
    assert all(increase >= 0 for increase in plan.formats.increases.values())
    assert {operation.format for operation in plan.operations if "dot_general" in operation.signature} == {"float8"}
    assert "Formats: products in fewer bits" in str(plan)
    assert all(group.name.replace("<", "&lt;") in plan.html() for group in plan.formats.groups)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert loaded == plan
    loss = step(*plan.shard(*args))[1]
    assert loaded.apply(train_step)(*plan.shard(*args))[1] == loss
    exact = diffshard.search(train_step, mesh, hardware=fast_links(mesh)).plan(*args)
    exact_loss = train_step(*args)[1]
    assert loss != exact_loss
    np.testing.assert_allclose(loss, exact_loss, rtol=0.05)
    assert "products have other number formats" in str(exact.diff(plan))
    with pytest.raises(diffshard.PlanError, match="fewer bits"):
        loaded.apply(train_step, executor="constraints")(*args)


def test_a_limit_that_no_group_meets_leaves_the_step_as_it_is():
    mesh, args = mesh_of(2), arguments()
    hardware = fast_links(mesh)
    names = [group.name for group in groups_on(mesh, hardware, args)]
    plan = search(mesh, 0.1, increases=dict.fromkeys(names, 1.0)).plan(*args)
    exact = diffshard.search(train_step, mesh, hardware=hardware).plan(*args)
    assert plan.step_s == pytest.approx(exact.step_s)
    assert not any(operation.format for operation in plan.operations)


@pytest.mark.parametrize(
    ("formats", "error", "match"),
    [
        ({"max_loss_increase": 0.0}, ValueError, r"max_loss_increase` must be a positive finite number, not 0\.0"),
        ({"max_loss_increase": math.nan}, ValueError, "max_loss_increase` must be .*, not nan"),
        ({"max_loss_increase": "0.01"}, ValueError, "max_loss_increase` must be .*, not '0.01'"),
        ({"factor": -1.0}, ValueError, "factor"),
        ({"steps": 1}, ValueError, "steps` must be a whole number, 2 or more, not 1"),
        ({"steps": "2"}, ValueError, "steps` must be .*, not '2'"),
        ({"looks": 0}, ValueError, "looks` must be a whole number, 1 or more, not 0"),
        ({"rounds": -1}, ValueError, "rounds` must be a whole number, 0 or more, not -1"),
        ({"loss": 3}, TypeError, r"loss` must be the path of a result, such as \"result\[1\]\", or None, not 3"),
        ({"increases_by": "runs"}, ValueError, "increases_by"),
        ({"increases": {"head": -0.1}}, ValueError, r"increases\['head'\]` must be a number, zero or more, not -0\.1"),
        ({"calls": 3}, TypeError, "calls` must be a list or tuple, not int"),
        ({"validation_runs": [()]}, ValueError, r"validation_runs\[0\]` must be a list of 2 calls or more, not"),
        ({"measured_fn": 3}, TypeError, "measured_fn` must be a function, not int"),
        ({"products": "float8"}, TypeError, "products` must be a list or tuple of formats, not 'float8'"),
        ({"products": ("float9",)}, ValueError, "products` has 'float9', which is no format"),
        ({"products": ()}, ValueError, "has neither `products` nor `sums`"),
    ],
)
def test_fields_that_break_a_rule_are_refused_before_anything_searches(formats, error, match):
    with pytest.raises(error, match=f"`Formats.*{match}"):
        diffshard.formats.Formats(**{"max_loss_increase": 0.1, **formats})


def test_a_search_that_has_to_look_needs_the_calls_of_looks():
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match=r"calls.*0 calls.*20"):
        diffshard.search(train_step, mesh, hardware=fast_links(mesh), formats=diffshard.formats.Formats(0.1))


def test_hardware_without_float8_is_refused_by_name():
    mesh = mesh_of(2)
    hardware = diffshard.preset("a100", dict(mesh.shape))
    with pytest.raises(ValueError, match=r"A100.*no rate for float8_e4m3fn.*bfloat16"):
        search(mesh, 0.1, hardware=hardware, increases={})


def test_what_is_no_formats_is_refused():
    with pytest.raises(TypeError, match=r"`formats` must be a diffshard\.formats\.Formats or None, not float"):
        diffshard.search(train_step, mesh_of(2), hardware="h100", formats=0.1)  # pyright: ignore[reportArgumentType]


def measuring(fn, args, **formats):
    return search(mesh_of(2), 0.1, fn, calls=[args] * 2, steps=2, **formats).plan(*args)


def test_a_loss_that_is_missing_or_not_alone():
    args = arguments()
    with pytest.raises(ValueError, match=r"Formats\.loss.*none of the results"):
        measuring(lambda *args: train_step(*args)[0], args)
    with pytest.raises(ValueError, match=r"Formats\.loss.*result\[1\], result\[2\]"):
        measuring(lambda *args: (*train_step(*args), jnp.float32(0.0) * args[0]["head"][0, 0]), args)
    with pytest.raises(ValueError, match=r"'result\[7\]'.*result\[1\]"):
        measuring(train_step, args, loss="result[7]")


def test_a_loss_that_is_too_coarse():
    with pytest.raises(ValueError, match=r"The loss `result\[1\]` is bfloat16, which is too coarse"):
        measuring(lambda *args: (train_step(*args)[0], train_step(*args)[1].astype("bfloat16")), arguments())


def test_a_loss_that_is_not_finite():
    params, batch = arguments()
    with pytest.raises(ValueError, match=r"not finite, with no product in fewer bits"):
        measuring(train_step, (jax.tree.map(lambda p: p * jnp.nan, params), batch))


def test_calls_of_other_shapes():
    args = arguments()
    with pytest.raises(ValueError, match=r"calls\[1\]` has other arrays .* instead of "):
        search(mesh_of(2), 0.1, calls=[args, arguments(2 * ROWS)], steps=2).plan(*args)


def test_calls_that_are_no_arguments_or_only_their_shapes():
    args = arguments()
    with pytest.raises(
        TypeError, match=r"`Formats\.calls\[0\]` must be a tuple of the arguments of train_step, not int"
    ):
        search(mesh_of(2), 0.1, calls=[1, 2], steps=2).plan(*args)
    with pytest.raises(TypeError, match=r"`Formats\.calls\[1\]` has `jax.ShapeDtypeStruct`s, but its step is run"):
        search(mesh_of(2), 0.1, calls=[args, jax.eval_shape(lambda: args)], steps=2).plan(*args)


def test_formats_are_chosen_on_each_shape_of_the_mesh_and_the_fastest_one_is_taken():
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    names = [group.name for group in groups_on(mesh, diffshard.preset("h100", dict(mesh.shape)), args)]
    formats = diffshard.formats.Formats(0.5, increases=dict.fromkeys(names, 0.2))
    plan = diffshard.search(train_step, devices=4, hardware="h100", formats=formats).plan(*args)
    exact = diffshard.search(train_step, devices=4, hardware="h100").plan(*args)
    assert sum(operation.format != "" for operation in plan.operations) == 2  # 0.2 for each within 0.5
    assert plan.lower_bound_s <= plan.step_s < exact.step_s
    for shape in plan.shapes:
        axes = tuple(shape.mesh_axes.values()), tuple(shape.mesh_axes)
        alone = AbstractMesh(*axes, axis_types=(AxisType.Auto,) * len(axes[0]))
        of_shape = diffshard.search(train_step, alone, hardware="h100", formats=formats).plan(*args)
        assert plan.step_s <= of_shape.step_s * (1 + 1e-4)
