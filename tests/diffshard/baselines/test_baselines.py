"""What baselines split: by words, by shapes, by flax's metadata; and the plans that the search completes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.baselines.base import (
    BASELINES,
    Argument,
    BaselineMesh,
    DoesNotApplyError,
    describe_arguments,
    tensor_splits,
)
from diffshard.baselines.plans import baseline_mesh_of
from diffshard.sharding_search.call import call_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import trace_function

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
PAPER_MESH = BaselineMesh({"data": 2, "model": 4}, "model")
OPTIMIZER = optax.adam(1e-3)


def shape(*dimensions, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def described(state, batch=()):
    call = call_of(OPTIONS, (state, batch), {})
    return describe_arguments(call, [number == 0 for number in call.numbers])


def split_dimensions(state, dimensions=None):
    """By the path of each array the dimension that Megatron splits."""
    arguments = described(state)
    splits = tensor_splits(arguments, dimensions or {})
    return {"/".join(a.names): None if s is None else s[0] for a, s in zip(arguments, splits, strict=True)}


def test_words_say_which_matrices_are_split_by_columns_and_by_rows():
    layer = {
        "attention": {"q_proj": shape(64, 64), "o_proj": {"kernel": shape(64, 64), "bias": shape(64)}},
        "mlp": {"fc1": {"kernel": shape(64, 256), "bias": shape(256)}, "fc2": {"w": shape(256, 64), "b": shape(64)}},
        "norm": {"scale": shape(64)},
    }
    assert split_dimensions({"wte": {"embedding": shape(100, 64)}, "layer": layer, "router": shape(64, 8)}) == {
        "wte/embedding": -2,
        "layer/attention/q_proj": -1,
        "layer/attention/o_proj/kernel": -2,
        "layer/attention/o_proj/bias": None,
        "layer/mlp/fc1/kernel": -1,
        "layer/mlp/fc1/bias": -1,
        "layer/mlp/fc2/w": -2,
        "layer/mlp/fc2/b": None,
        "layer/norm/scale": None,
        "router": None,
    }


def test_kernels_by_heads_are_told_from_stacked_matrices():
    by_heads = {"query": {"kernel": shape(64, 8, 16)}, "value": {"kernel": shape(64, 2, 16)}}
    assert split_dimensions({"attention": {**by_heads, "out": {"kernel": shape(8, 16, 64)}}}) == {
        "attention/query/kernel": -2,
        "attention/value/kernel": -2,
        "attention/out/kernel": -3,
    }


def test_layers_stacked_for_a_scan():
    stacked = {"up": {"kernel": shape(12, 64, 256), "bias": shape(12, 256)}, "down": {"kernel": shape(12, 256, 64)}}
    assert split_dimensions(stacked) == {"down/kernel": -2, "up/bias": -1, "up/kernel": -1}


def test_shapes_decide_where_no_word_is_known():
    assert split_dimensions({"x": shape(64, 256), "y": shape(256, 64), "z": shape(64)}) == {"x": -1, "y": -2, "z": None}
    square = {"params": {"x": shape(64, 64), "y": shape(64, 64)}, "moments": {"x": shape(64, 64), "y": shape(64, 64)}}
    assert split_dimensions(square) == {"moments/x": -1, "moments/y": -2, "params/x": -1, "params/y": -2}


def test_exceptions_come_before_words():
    baselines = {"moe": {"up": shape(8, 64, 256), "gate": shape(64, 8)}}
    assert split_dimensions(baselines, {("moe", "up"): -3, ("gate",): None}) == {"moe/gate": None, "moe/up": -3}


def test_flax_metadata_come_before_words():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(32, use_bias=False, kernel_init=init, name="out")(x)

    params = jax.eval_shape(Layer().init, jax.random.key(0), jnp.ones((1, 16)))
    (argument,) = described(params)
    assert argument.names == ("params", "out", "kernel")
    assert argument.logical_axes == ("embed", "mlp")
    assert split_dimensions(params) == {"params/out/kernel": -1}


def test_what_belongs_to_no_batch_is_on_every_device():
    batch = {"tokens": shape(16, 8), "key": jax.random.key(0), "old key": jax.random.PRNGKey(0), "step": shape()}
    arguments = described({"up": shape(8, 32)}, batch)
    specs = dict(zip([a.path for a in arguments], BASELINES["fsdp"](arguments, PAPER_MESH, {}).specs, strict=True))
    assert specs["weights['tokens']"] == P(("data", "model"), None)
    assert specs["weights['key']"] == specs["weights['step']"] == P()
    assert specs["weights['old key']"] == P(None)
    assert specs["x['up']"] == P(None, ("data", "model"))


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(DoesNotApplyError, match="leading dimension of batch, 4, into 8 parts"):
        BASELINES["data parallel"]([Argument("batch", ("batch",), (4, 3), False)], PAPER_MESH, {})


def test_the_inner_axis_has_the_fastest_links():
    def inner(data, model):
        links = {"data": diffshard.Link(1e-6, data), "model": diffshard.Link(1e-6, model)}
        hardware = diffshard.Hardware("test", 1e12, 1e12, 1e9, links)
        return baseline_mesh_of(Options(fn=abs, mesh=MESH, hardware=hardware, memory_limit_bytes=1.0)).inner

    assert (inner(1e-9, 2e-9), inner(2e-9, 1e-9), inner(1e-9, 1e-9)) == ("data", "model", "model")


def train_step(state, batch):
    params, opt_state = state

    def loss_fn(params):
        return jnp.mean((jax.nn.gelu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def arguments(batch=64):
    params = {"up": shape(64, 256), "down": shape(256, 64)}
    return (params, jax.eval_shape(OPTIMIZER.init, params)), shape(batch, 64)


def test_plans_have_the_experts_shardings_and_run_by_propagation():
    plans = diffshard.baselines.baseline_plans(train_step, MESH, *arguments(), hardware="h100")
    assert set(plans) == set(BASELINES) - {"megatron sequence"}
    assert dict(plans.left_out) == {
        "megatron sequence": "The function names no logical axes, so there is no sequence to split."
    }
    megatron = {tensor.path: tensor.partition_spec for tensor in plans["megatron fsdp"].arguments}
    assert megatron["state[0]['up']"] == megatron["state[1][0].mu['up']"] == P("data", "model")
    assert megatron["state[0]['down']"] == megatron["state[1][0].nu['down']"] == P("model", "data")
    assert megatron["state[1][0].count"] == P()
    assert megatron["batch"] == P("data", None)
    assert {plan.executor for plan in plans.values()} == {"propagation"}
    assert all("names no logical axes" in plan.notes[-1] for plan in plans.values())
    found = diffshard.search(train_step, MESH, hardware="h100").plan(*arguments())
    assert all(found.step_s <= plan.step_s * (1 + 1e-6) for plan in plans.values())


def test_experts_that_do_not_apply_are_left_out_with_a_reason():
    plans = diffshard.baselines.baseline_plans(
        train_step, MESH, *arguments(batch=4), names=["fsdp", "megatron"], hardware="h100"
    )
    assert set(plans) == {"megatron"}
    assert plans.left_out["fsdp"] == "It would split the leading dimension of batch, 4, into 8 parts."
    plans = diffshard.baselines.baseline_plans(
        train_step, MESH, *arguments(), names=["data parallel"], hardware="h100", memory_limit_bytes=100_000
    )
    assert len(plans) == 0
    assert plans.left_out["data parallel"].startswith("`memory_limit_bytes` is 100,000")
    row = AbstractMesh((8,), ("all",), axis_types=(AxisType.Auto,))
    plans = diffshard.baselines.baseline_plans(
        train_step, row, *arguments(), names=["megatron", "hybrid fsdp"], hardware="h100"
    )
    assert plans.left_out == {"hybrid fsdp": "On a mesh of one axis it is the same as FSDP."}
    assert plans["megatron"].arguments[-1].partition_spec == P(None, None)


def test_hybrid_fsdp_splits_state_over_the_inner_axis_and_the_batch_over_all():
    arguments = described({"up": shape(64, 32)}, {"x": shape(16, 8)})
    assert BASELINES["hybrid fsdp"](arguments, PAPER_MESH, {}).specs == (
        P(("model",), None),
        P(("data", "model"), None),
    )


def test_hidden_units_come_before_the_sequence():
    rules = [name for name, _ in BASELINES["megatron sequence"](described({"up": shape(64, 32)}), PAPER_MESH, {}).rules]
    assert rules.index("sequence") > max(rules.index(name) for name in ("heads", "mlp", "vocab"))


def test_an_exception_before_the_last_two_dimensions_is_one_of_experts():
    arguments = described({"moe": {"up": shape(6, 64, 256)}, "dense": {"up": shape(64, 256)}})
    exceptions = {("moe", "up"): -3}
    splits = tensor_splits(arguments, exceptions)
    assert dict(zip(("dense", "moe"), splits, strict=True)) == {"dense": (-1, "hidden"), "moe": (-3, "experts")}
    # Six baselines do not divide among four devices: they stay whole, and so do activations by baselines.
    rules = dict(BASELINES["megatron"](arguments, PAPER_MESH, exceptions).rules)
    assert "expert" not in rules
    assert rules["mlp"] == ("model",)


def test_an_output_matrix_is_split_by_heads_only_if_it_has_as_many():
    def split(rows):
        layer = {"query": {"kernel": shape(64, 8, 16)}, "out": {"kernel": shape(*rows, 64)}}
        return split_dimensions({"attention": layer})["attention/out/kernel"]

    assert split((8, 16)) == -3
    assert split((3, 128)) == -2  # a stack of three matrices of 128 rows


def test_an_axis_of_one_device_is_not_the_inner_one():
    mesh = AbstractMesh((4, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hardware = diffshard.Hardware("test", 1e12, 1e12, 1e9, {"data": diffshard.Link(1e-6, 1e-9)})
    assert baseline_mesh_of(Options(fn=abs, mesh=mesh, hardware=hardware, memory_limit_bytes=1.0)).inner == "data"


OPTIONS = Options(
    fn=lambda x, weights: weights - 0.1 * x.T @ x,
    mesh=MESH,
    hardware=diffshard.preset("h100", {"data": 2, "model": 4}),
    memory_limit_bytes=1e9,
)


def test_state_is_what_is_updated_or_donated_or_the_first_argument():
    def predict(params, x):
        return x @ params

    def specs(**options):
        plan = diffshard.baselines.baseline_plans(
            predict, MESH, shape(64, 32), shape(16, 64), names=["data parallel"], hardware="h100", **options
        )["data parallel"]
        return [tensor.partition_spec for tensor in plan.arguments]

    whole, split = P(None, None), P(("data", "model"), None)
    assert specs() == [whole, split]
    assert specs(donate_argnums=1) == [split, whole]
    assert specs(state_argnums=(0, 1)) == [whole, whole]
    assert specs(state_argnums=()) == [split, split]
    updated = trace_function(OPTIONS, (shape(16, 64), shape(64, 64)))
    assert [a.is_state for a in describe_arguments(updated.call, updated.is_state)] == [False, True]


class Named(nn.Module):
    """A layer whose parameters and activations have logical axes."""

    @nn.compact
    def __call__(self, x):  # noqa: D102
        def dense(features, axes, name):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(features, use_bias=False, kernel_init=init, name=name)

        x = with_logical_constraint(x, ("batch", "sequence", "embed"))
        hidden = with_logical_constraint(dense(64, ("embed", "mlp"), "in")(x), ("batch", "sequence", "mlp"))
        return with_logical_constraint(dense(16, ("mlp", "embed"), "back")(hidden), ("batch", "sequence", "embed"))


def named_step(params, x):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((Named().apply(p, x) - x) ** 2))(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss


def named_arguments():
    x = shape(16, 8, 16)
    return jax.eval_shape(Named().init, jax.random.key(0), x), x


def test_logical_axes_split_parameters_and_activations(tmp_path):
    rules = [("batch", "data"), ("mlp", ("model",)), ("embed", None)]
    plans = diffshard.baselines.baseline_plans(
        named_step, MESH, *named_arguments(), names=["megatron", "megatron sequence"], hardware="h100",
        logical_axis_rules=rules,
    )  # fmt: skip
    assert plans.left_out == {}
    assert list(plans) == ["megatron", "megatron sequence", "logical axis rules"]
    for plan in plans.values():
        specs = {tensor.path: tensor.partition_spec for tensor in plan.arguments}
        assert [spec for path, spec in specs.items() if "in" in path] == [P(None, "model")]
        assert [spec for path, spec in specs.items() if "back" in path] == [P("model", None)]
        assert specs["x"][0] == "data"
    assert dict(plans["logical axis rules"].logical_axis_rules) == {"batch": ("data",), "mlp": ("model",), "embed": ()}
    sequence = plans["megatron sequence"]
    residual = P("data", "model", None)
    assert residual in [o.results and diffshard_spec(o.results[0]) for o in sequence.operations]
    assert residual not in [o.results and diffshard_spec(o.results[0]) for o in plans["megatron"].operations]
    # The rules are part of the plan: the constraints are there again when it is applied.
    sequence.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json")
    assert loaded == sequence
    text = loaded.apply(named_step).lower(*named_arguments()).as_text()
    assert text.count("sdy.sharding_constraint") >= 3
    assert "manual_computation" not in text


def diffshard_spec(spec):
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["zero"]}, "`names` must be some of data parallel"),
        ({"logical_axis_rules": [("batch", "rows")]}, "`logical_axis_rules` has the mesh axis 'rows'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        diffshard.baselines.baseline_plans(train_step, MESH, *arguments(), hardware="h100", **options)
