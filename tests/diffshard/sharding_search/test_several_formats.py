"""Products in several formats: chosen together, refused where hardware lacks them, and run as they are measured."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.sharding_search import format_search
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.format_search import best_groups
from diffshard.sharding_search.number_formats import groups_of
from tests.diffshard.sharding_search.test_format_rounds import traced
from tests.diffshard.sharding_search.test_formats import arguments, fast_links, mesh_of, train_step

BOTH = ("float8", "float4")


def search(mesh, hardware, limit, products, **formats):
    return diffshard.search(
        train_step, mesh, hardware=hardware, formats=diffshard.formats.Formats(limit, products=products, **formats)
    )


def b200(mesh):
    return diffshard.preset("b200", dict(mesh.shape))


def test_the_found_plan_and_the_bound_against_every_choice_of_two_formats():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    groups = groups_of(traced(train_step, arguments(32, 32))[2].graph, BOTH)
    kinds = [group.name for group in groups if group.format == "float8"][:2]
    increases = {kinds[0]: 0.2, f"{kinds[0]} float4": 0.5, kinds[1]: 0.1, f"{kinds[1]} float4": 0.4}
    limit, best_s, exact_s = 0.6, math.inf, math.inf
    for pair in itertools.product(("", "float8", "float4"), repeat=2):
        names = [kind if name == "float8" else f"{kind} {name}" for kind, name in zip(kinds, pair, strict=True) if name]
        if sum(increases[name] for name in names) <= limit:
            plan = search(mesh, b200(mesh), 1.0, BOTH, increases=dict.fromkeys(names, 0.0)).plan(*args)
            best_s, exact_s = min(best_s, plan.step_s), plan.step_s if not names else exact_s
    plan = search(mesh, b200(mesh), limit, BOTH, increases=increases).plan(*args)
    assert plan.formats is not None
    assert plan.formats.loss_increase <= limit
    assert plan.lower_bound_s <= best_s * (1 + 1e-9)
    assert plan.step_s <= best_s * (1 + 1e-6)
    assert plan.step_s < exact_s
    assert {group.format for group in plan.formats.groups if group.num_rounded} == {"float8", "float4"}


def test_the_best_solution_at_a_price_is_a_candidate_itself(monkeypatch):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    names = [group.name for group in groups_of(traced(train_step, arguments(32, 32))[2].graph, BOTH)]
    plan = search(mesh, b200(mesh), 1.0, BOTH, increases=dict.fromkeys(names, 0.01)).plan(*args)
    monkeypatch.setattr(format_search, "_candidates", lambda *_: [])
    same = search(mesh, b200(mesh), 1.0, BOTH, increases=dict.fromkeys(names, 0.01)).plan(*args)
    assert same.formats is not None
    assert any(group.num_rounded for group in same.formats.groups)
    assert same.step_s == pytest.approx(plan.step_s, rel=1e-6)


def test_one_format_is_taken_of_each_group():
    gains, losses = np.array([1.0, 2.5, 2.0]), np.array([0.1, 0.2, 0.2])
    assert best_groups(gains, losses, 0.45, [0, 0, 1]) == (1, 2)
    assert best_groups(gains, losses, 0.45) == (1, 2)
    assert best_groups(gains, losses, 0.35, [0, 0, 1]) == (0, 2)
    assert best_groups(gains, losses, 0.35) == (0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_set_within_the_limit_gains_more_than_the_best_groups(seed):
    random = np.random.default_rng(seed)
    gains, losses, kinds = random.normal(0.5, 1.0, 9), random.exponential(size=9) ** 2, [i % 5 for i in range(9)]
    sets = [[i for i in range(9) if number >> i & 1] for number in range(2**9)]
    within = [s for s in sets if losses[s].sum() <= 0.6 and len({kinds[i] for i in s}) == len(s)]
    assert best_groups(gains, losses, 0.6, kinds) == tuple(max(within, key=lambda s: gains[s].sum()))


def test_rules_of_two_formats():
    groups = groups_of(traced(train_step, arguments(32, 32))[2].graph, BOTH)
    rules = simple_rules(groups)
    others = rules["all products"]
    for mixed in ("all products", "all but the head", "all but first and last layers"):
        words = mixed.replace("all products", "all that can be")
        assert rules[f"{words} in float4, others in float8"] == others | rules[f"{mixed} in float4"]
    halves = [rules[f"the {way} pass in float4, others in float8"] - others for way in ("forward", "backward")]
    assert halves[0] | halves[1] == rules["all products in float4"]
    assert not halves[0] & halves[1]
    assert all(halves)
    assert rules == simple_rules(groups_of(traced(train_step, arguments(32, 32))[2].graph, BOTH[::-1]))


@pytest.mark.parametrize("name", ["int8", "float8_rows", "float4"])
def test_a_plan_runs_as_it_is_measured_is_saved_and_applied(name, tmp_path):
    mesh, args = mesh_of(2), arguments(64, 64)
    hardware = fast_links(mesh)
    rates = {**hardware.flops_per_s, "float4_e2m1fn": 4e15}  # pyright: ignore[reportGeneralTypeIssues]
    hardware = diffshard.Hardware("fast", rates, 1e18, 1e12, hardware.links, kernel_launch_s=0.0)
    step = search(mesh, hardware, 1e9, (name,), calls=[args] * 2, steps=2)
    plan = step.plan(*args)
    assert plan.formats is not None
    assert {operation.format for operation in plan.operations if "dot_general" in operation.signature} == {name}
    assert f"  {name}" in str(plan)
    loss = step(*plan.shard(*args))[1]
    assert loss != train_step(*args)[1]
    np.testing.assert_allclose(loss, train_step(*args)[1], rtol=0.2)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert loaded == plan
    assert loaded.apply(train_step)(*plan.shard(*args))[1] == loss
    one = search(mesh_of(1), hardware, 1e9, (name,), increases=plan.formats.increases)
    np.testing.assert_allclose(loss, one(*args)[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("hardware", "products", "error", "words"),
    [
        ("h100", ("float4",), ValueError, r"H100.* no rate for float4_e2m1fn, .* float4 need: .* may have float8, "),
        ("a100", ("float8",), ValueError, r"A100.* may have int8\."),
        ("v100", ("int8",), ValueError, r"V100.* may have none of the formats"),
        ("h100", ("float6",), ValueError, r"'float6', which is no format; there are float8, float8_delayed, "),
        ("h100", ("int8", "int8"), ValueError, "each format once"),
        ("h100", "int8", TypeError, "must be a list or tuple"),
        ("h100", (), ValueError, "neither `products` nor `sums` nor `kept`"),
    ],
)
def test_formats_that_there_are_not(hardware, products, error, words):
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(error, match=words):
        search(mesh, hardware, 0.1, products, increases={})


def test_hardware_without_float8_may_multiply_int8():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    names = [g.name for g in groups_of(traced(train_step, arguments())[2].graph, ("int8",))]
    plan = search(mesh, "a100", 1.0, ("int8",), increases=dict.fromkeys(names, 0.0)).plan(*args)
    exact = diffshard.search(train_step, mesh, hardware="a100").plan(*args)
    assert plan.step_s < 0.9 * exact.step_s
