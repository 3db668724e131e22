"""Facts about plans that processes compare: equal for plans that run alike, different for all others."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import diffshard
from diffshard.sharding_search.fingerprints import plan_facts


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
