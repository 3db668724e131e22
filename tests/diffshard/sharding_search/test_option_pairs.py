"""All pairs of options of `search`: each works, or is refused by name with a reason that the docs have, too."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import diffshard
from diffshard.sharding_search.option_pairs import REFUSED_PAIRS, check_pairs

PAGE = Path(__file__).parents[3] / "docs" / "pairs.md"
SHAPES = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2, jax.ShapeDtypeStruct((8, 16), "float32")


def step(weights, batch, scale=1.0):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2) * scale

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


@functools.cache
def earlier():
    return diffshard.search(step, mesh(), hardware="h100", solver="greedy").plan(*SHAPES)


@functools.cache
def earlier_pipeline():
    return diffshard.search(step, devices=8, hardware="h100", pipeline=PIPELINE).plan(*SHAPES)


PIPELINE = diffshard.Pipeline(microbatches=(2,), max_stages=2)
OPTIONS = {
    "devices": lambda _: jax.devices(),
    "pipeline": lambda _: PIPELINE,
    "remat": lambda _: "search",
    "in_shardings": lambda _: (None, PartitionSpec("data")),
    "logical_axis_rules": lambda _: (("batch", "data"),),
    "solver": lambda _: "greedy",
    "time_limit_s": lambda _: 1.0,
    "memory_limit_bytes": lambda _: 1e9,
    "key": lambda _: 3,
    "donate_argnums": lambda _: 0,
    "donate_argnames": lambda _: "weights",
    "static_argnums": lambda _: 2,
    "static_argnames": lambda _: "scale",
    "executor": lambda _: "program",
    'executor="constraints"': lambda _: "constraints",
    'executor="propagation"': lambda _: "propagation",
    "check": lambda _: "numbers",
    'check="compile"': lambda _: "compile",
    "cache": lambda folder: folder,
    "start": lambda _: earlier(),
    "formats": lambda _: diffshard.formats.Formats(0.1, increases={}),
    "objective": lambda _: lambda step: step.seconds + 1e-12 * step.peak_bytes,
}
"""A value of each option; the part before `=` is its name."""
WITH_PIPELINE = {
    "in_shardings": lambda _: (None, PartitionSpec("x")),
    "logical_axis_rules": lambda _: (("batch", "x"),),
    "start": lambda _: earlier_pipeline(),
}
"""Values that are others with a pipeline, whose stages have meshes of their own."""
WITH_DEVICES = {
    "in_shardings": lambda _: (None, PartitionSpec("local")),
    "logical_axis_rules": lambda _: (("batch", "local"),),
}
"""Values that are others where the mesh is open."""
COMPILES = {'check="compile"'}
"""What takes a compiler, and so is tried where it is refused only."""


def name_of(option):
    return option.split("=", maxsplit=1)[0]


def reason_for(one, other):
    """Returns why two options are refused, None where they go together."""
    for pair in REFUSED_PAIRS:
        if {pair.one, pair.other} <= {one, other, name_of(one), name_of(other)}:
            return pair.reason
    return None


def searched(options, folder):
    others = WITH_PIPELINE if "pipeline" in options else WITH_DEVICES if "devices" in options else {}
    of_option = {**OPTIONS, **others}
    values = {name_of(option): of_option[option](folder) for option in options}
    if "pipeline" in values:
        values.setdefault("devices", 8)
    values.setdefault("hardware", "h100")
    return diffshard.search(step, *([] if "devices" in values else [mesh()]), **values)


PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if name_of(pair[0]) != name_of(pair[1])]


def test_two_options_alone_are_refused_if_and_only_if_the_table_has_them():
    value_of = {"check": "numbers", "executor": "program"}
    for pair in itertools.permutations(OPTIONS, 2):
        if name_of(pair[0]) == name_of(pair[1]):
            continue
        given = {name_of(o): value_of.get(o, o.partition('="')[2].strip('"') or 1) for o in pair}
        if reason_for(*pair) is None:
            check_pairs(given)
            check_pairs({**given, pair[0]: None, pair[1]: ()})
        else:
            with pytest.raises(ValueError, match="cannot be given together with"):
                check_pairs(given)
            check_pairs({**given, name_of(pair[0]): None})
            check_pairs({**given, name_of(pair[1]): ()})


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_goes_with_each_other_or_is_refused_with_a_reason(option, tmp_path):
    for pair in PAIRS:
        if option != pair[0]:
            continue
        reason, folder = reason_for(*pair), tmp_path / re.sub(r"\W", "", "".join(pair))
        folder.mkdir()
        if reason is not None:
            with pytest.raises(ValueError, match="cannot be given together with") as refused:
                searched(pair, folder)
            assert all(f"`{name_of(one)}" in str(refused.value) for one in pair)
            assert reason in str(refused.value)
        elif not (COMPILES | {"pipeline"}) & set(pair):  # pipelines take a second each: they are tried together below
            assert searched(pair, folder).plan(*SHAPES).step_s > 0


def test_what_goes_with_a_pipeline_goes_with_it_together(tmp_path):
    names = [o for o in OPTIONS if o != "pipeline" and reason_for("pipeline", o) is None and o not in COMPILES]
    assert set(OPTIONS) - set(names) == {
        "pipeline", "objective", "formats", 'executor="propagation"', 'check="compile"'
    }  # fmt: skip
    names = [name for name in names if name not in ("solver", "executor")]
    planned = searched(["pipeline", *names], tmp_path)
    assert planned.plan(*SHAPES).step_s > 0
    args = jax.tree.map(lambda s: jnp.full(s.shape, 0.1), SHAPES)
    _, expected = step(*args)
    assert jnp.allclose(planned(*args)[1], expected)  # donates the weights


def test_the_page_has_each_refused_pair_with_its_reason():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    shown = {(row[0], row[1]): row[2] for row in rows if len(row) == 3}
    for one, other, reason in REFUSED_PAIRS:
        assert shown[f"`{one}`", f"`{other}`"] == reason


def nnx_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def nnx_arguments():
    import optax

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jnp.ones((8, 16))


@pytest.mark.parametrize("option", ["devices", "remat", "objective", "check", "cache", "executor", "solver"])
def test_modules_go_with_an_option(option, tmp_path):
    on = [] if option == "devices" else [mesh()]
    planned = diffshard.nnx.search(nnx_step, *on, hardware="h100", **{option: OPTIONS[option](tmp_path)})
    model, *rest = nnx_arguments()
    before = model.kernel[...]
    planned(model, *rest)
    expected, *rest = nnx_arguments()
    nnx.jit(nnx_step)(expected, *rest)
    assert jnp.allclose(model.kernel[...], expected.kernel[...], atol=1e-6)
    assert not jnp.allclose(model.kernel[...], before)


def test_modules_go_with_a_pipeline_and_its_plan_is_applied():
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipeline = dataclasses.replace(PIPELINE, batch_argnums=2)
    pipelined = diffshard.nnx.search(nnx_step, cluster, pipeline=pipeline)
    plan = pipelined.plan(*nnx_arguments())
    for step in (pipelined, diffshard.nnx.apply(plan, nnx_step, cluster)):
        model, optimizer, batch = nnx_arguments()
        expected, of_expected, _ = nnx_arguments()
        for _ in range(2):
            assert jnp.allclose(step(model, optimizer, batch), nnx.jit(nnx_step)(expected, of_expected, batch))
        assert jnp.allclose(model.kernel[...], expected.kernel[...], atol=1e-6)
        assert int(optimizer.step[...]) == 2


def test_plans_of_modules_are_compared():
    plan = diffshard.nnx.search(nnx_step, mesh(), hardware="h100").plan(*nnx_arguments())
    by_hand = (None, None, PartitionSpec("data"))
    table = diffshard.nnx.compare(
        nnx_step, mesh(), *nnx_arguments(), plans={"found": plan, "by hand": by_hand}, target="host"
    )
    assert [row.name for row in table.rows] == ["found", "by hand"]
    assert all(row.compiled_peak_bytes for row in table.rows)


def test_baselines_of_modules_are_plans_that_run_and_are_compared():
    plans = diffshard.nnx.baseline_plans(
        nnx_step, mesh(), *nnx_arguments(), hardware="h100", names=["fsdp", "megatron"]
    )
    assert set(plans) | set(plans.left_out) == {"fsdp", "megatron"}
    assert any(any(tensor.spec) for tensor in plans["fsdp"].arguments if "kernel" in tensor.path)
    model, optimizer, batch = nnx_arguments()
    expected, of_expected, _ = nnx_arguments()
    step = diffshard.nnx.apply(plans["fsdp"], nnx_step)
    step.shard(model, optimizer, batch)
    assert jnp.allclose(step(model, optimizer, batch), nnx.jit(nnx_step)(expected, of_expected, batch))
    assert jnp.allclose(model.kernel[...], expected.kernel[...], atol=1e-6)
    table = diffshard.nnx.compare(nnx_step, mesh(), *nnx_arguments(), plans={"fsdp": plans["fsdp"]}, target="host")
    assert [row.name for row in table.rows] == ["fsdp"]


def test_a_budget_of_modules_trains_through_its_phases_as_one_device(tmp_path):
    meshes = [jax.make_mesh((n,), ("data",), (AxisType.Auto,), devices=jax.devices()[:n]) for n in (4, 2)]
    phases = [diffshard.elastic.Phase(mesh=mesh, num_steps=2, hardware="h100") for mesh in meshes]
    planned = diffshard.nnx.budget(nnx_step, phases, *nnx_arguments(), remat="search")
    assert str(planned).startswith("Budget of nnx_step over 2 phases")
    planned.budget.save(tmp_path / "budget.json")
    loaded = diffshard.elastic.Budget.load(tmp_path / "budget.json", meshes=meshes)
    model, optimizer, batch = nnx_arguments()
    expected, of_expected, _ = nnx_arguments()
    for i, phase in enumerate((planned, diffshard.nnx.ModuleBudget(nnx_step, loaded))):
        assert phase.move(i, model, optimizer) == (model, optimizer)
        assert len(model.kernel[...].sharding.device_set) == meshes[i].size
        for _ in range(2):
            loss = phase.step(i)(model, optimizer, planned.budget.plans[i].shard(batch=batch))
            assert jnp.allclose(loss, nnx.jit(nnx_step)(expected, of_expected, batch))
    assert jnp.allclose(model.kernel[...], expected.kernel[...], atol=1e-6)
    assert planned.move(1, model) is model
    with pytest.raises(ValueError, match="`phase` must be a whole number from 0 to 1, not 2"):
        planned.step(2)


def test_a_training_of_modules_goes_on_from_its_checkpoint(tmp_path):
    def init():
        return nnx_arguments()[:2]

    losses = []
    for until in (2, 4):
        batch = nnx_arguments()[2]
        with diffshard.nnx.resume(
            tmp_path, nnx_step, mesh(), init, batch, hardware="h100", progress="none"
        ) as training:
            modules = training.restore()
            for number in range(training.training.num_steps, until):
                losses.append(float(training.step(modules, batch * (number + 1))))
                training.save(number + 1, modules)
    model, optimizer, batch = nnx_arguments()
    expected = [float(nnx.jit(nnx_step)(model, optimizer, batch * (number + 1))) for number in range(4)]
    assert jnp.allclose(jnp.array(losses), jnp.array(expected), rtol=1e-5)
    assert int(modules[1].step[...]) == 4


def test_tables_go_with_what_keeps_their_mesh_and_the_whole_batch():
    tables = [diffshard.tables.EmbeddingTable("words", rows=64, dimension=16, pooling_factor=2)]
    table_plan = diffshard.tables.shard_tables(tables, mesh(), hardware="h100", batch_size=16, solver="greedy")

    def with_lookup(weights, rows, batch):
        def loss(weights, pooled):
            return jnp.mean((jnp.tanh((batch["x"] + pooled["words"]) @ weights[0]) @ weights[1]) ** 2)

        pooled = table_plan.lookup(rows, batch["ids"])
        value, gradients = jax.value_and_grad(loss)(weights, pooled)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    ids = {"words": jnp.zeros((16, 2), int)}
    args = SHAPES[0], table_plan.init(jax.random.key(0)), {"x": jax.ShapeDtypeStruct((16, 16), "float32"), "ids": ids}
    each: tuple[dict[str, Any], ...] = ({}, {"remat": "search"}, {"objective": lambda step: step.seconds})
    for options in each:
        assert diffshard.search(with_lookup, mesh(), hardware="h100", **options).plan(*args).step_s > 0
    with pytest.raises(ValueError, match=r"A shard_map .* lookup of tables .* give `mesh`, not `devices`"):
        diffshard.search(with_lookup, devices=8, hardware="h100").plan(*args)
    parts = diffshard.pipelines.in_microbatches(with_lookup, 2, batch_argnums=2)
    pipeline = dataclasses.replace(PIPELINE, batch_argnums=2)
    for step in (
        diffshard.search(parts, mesh(), hardware="h100"),
        diffshard.search(with_lookup, devices=8, hardware="h100", pipeline=pipeline),
    ):
        with pytest.raises(ValueError, match=r"shard_map .* has no sharding rule"):
            step.plan(*args)
