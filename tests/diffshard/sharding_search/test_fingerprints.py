"""Facts about plans that processes compare: equal for plans that run alike, different for all others."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import diffshard
from cost.base import Hardware, Link
from diffshard.sharding_search.fingerprints import facts_of, function_digest, plan_facts
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import trace_function

HARDWARE = Hardware("test", 1e9, 1e9, 1e9, {"data": Link(1e-6, 1e-9)})


def _step(x, y):
    return x * y, x + 1.0


def _searched() -> diffshard.Plan:
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    mesh = AbstractMesh((4,), ("data",))
    return diffshard.search(lambda x, w: jnp.tanh(x @ w), mesh, hardware="h100").plan(x, x)


def test_plans_that_are_searched_twice_have_equal_facts():
    first, second = _searched(), _searched()
    assert first.search_s != second.search_s
    assert plan_facts(first) == plan_facts(second)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: {"executor": "propagation"},
        lambda plan: {"donate_argnums": (0,)},
        lambda plan: {"mesh_axes": {"model": 4}},
        lambda plan: {"arguments": (replace(plan.arguments[0], spec=((), ())), *plan.arguments[1:])},
        lambda plan: {"operations": (replace(plan.operations[0], results=(((), ()),)), *plan.operations[1:])},
    ],
    ids=["executor", "donation", "mesh", "argument", "operation"],
)
def test_plans_that_run_in_another_way_have_other_facts(change: Any):
    plan = _searched()
    changed = replace(plan, **change(plan))
    assert changed != plan
    assert plan_facts(changed) != plan_facts(plan)


def _traced(**changes: Any):
    fields = {"fn": _step, "mesh": AbstractMesh((4,), ("data",)), "hardware": HARDWARE, "memory_limit_bytes": math.inf}
    options = Options(**(fields | changes))
    return options, trace_function(options, (jax.ShapeDtypeStruct((8, 4), jnp.float32), 2.0))


def test_the_facts_of_a_search_by_hand():
    options, traced_function = _traced(donate_argnums=(0,), in_shardings=(PartitionSpec("data"), None))
    facts = facts_of(options, traced_function)
    assert facts["the arguments"] == "x, y"
    assert facts["`x`"] == f"float32[8,4] given as {PartitionSpec('data')} donated"
    assert facts["`y`"] == "float32[] (weak)"
    assert facts["`mesh`"].startswith("{'data': 4}")
    assert facts["`hardware.name`"] == '"test"'
    assert facts["`memory_limit_bytes`"] == "inf"


def test_every_fact_of_a_search_follows_its_option():
    options, traced_function = _traced()
    plain = facts_of(options, traced_function)
    for name, value in {
        "solver": "greedy",
        "key": 7,
        "executor": "program",
        "memory_limit_bytes": 1e6,
        "hardware": replace(HARDWARE, memory_bytes=5.0),
        "mesh": AbstractMesh((2,), ("data",)),
    }.items():
        facts = facts_of(replace(options, **{name: value}), traced_function)
        changed = {key for key in plain if facts[key] != plain[key]}
        assert changed == {"`hardware.memory_bytes`" if name == "hardware" else f"`{name}`"}


def test_the_digest_of_a_function_follows_what_it_computes_and_its_arguments_alone():
    plain = function_digest(_traced()[1])
    assert function_digest(_traced(mesh=AbstractMesh((2,), ("data",)), key=3)[1]) == plain
    assert function_digest(_traced(fn=lambda x, y: (x * y, x))[1]) != plain
    assert function_digest(_traced(donate_argnums=(0,))[1]) != plain
