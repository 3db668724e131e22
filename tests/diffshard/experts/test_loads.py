"""Loads of experts: an average of the routing, from which experts are assigned again while they are trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.experts.expert_moves import ExpertLoads
from experiments.models.placed_experts import EXPERT_NAMES, training
from tests.diffshard.experts.small_layouts import NUM_EXPERTS, small_layout

SPEEDS = (4.0, 2.0, 1.0, 1.0)


def test_loads_are_the_mean_of_the_last_steps_and_never_zero():
    steps = np.random.default_rng(0).integers(0, 9, (5, 3)).astype(float)
    steps[:, 2] = 0
    loads = ExpertLoads.init(3)
    np.testing.assert_array_equal(loads.work(), np.ones(3))
    for step in steps:
        loads = jax.jit(ExpertLoads.update, static_argnames="decay")(loads, step, decay=0.5)
    weights = 0.5 ** np.arange(5)[::-1] / sum(0.5 ** np.arange(5))
    mean = weights @ steps
    np.testing.assert_allclose(loads.average / loads.weight, mean, rtol=1e-6)
    np.testing.assert_allclose(loads.work()[:2], mean[:2] / mean.mean(), rtol=1e-6)
    assert loads.work()[2] == 0.01
    with pytest.raises(ValueError, match=r"`num_chosen` must be \[3\], got \[4\]"):
        loads.update(jnp.ones(4))
    with pytest.raises(ValueError, match="`decay` must be from 0 to less than 1, not 1"):
        loads.update(jnp.ones(3), decay=1)


def test_experts_that_move_in_the_middle_of_a_training_learn_the_same():
    layout = small_layout("rectangle")
    keys = jax.random.split(jax.random.key(0), 3)
    batch = jax.random.normal(keys[0], (32, 4)) + 2, jax.random.normal(keys[1], (32, 4))
    optimizer = optax.sgd(0.1, momentum=0.9)
    init, step = training(layout, 5, optimizer)
    stay = jax.jit(step)
    state = jax.jit(init)(keys[2], batch[0])
    loads = ExpertLoads.init(NUM_EXPERTS)
    state, result = stay(state, batch)
    loads = loads.update(result.num_chosen)
    assignment = diffshard.experts.assign_experts(loads.work(), SPEEDS, 3)
    target = assignment.layout(layout.mesh, "expert")
    assert target.experts != layout.experts
    moved = layout.move(state, target, names=EXPERT_NAMES)
    go_on = jax.jit(training(target, 5, optimizer).step)
    for _ in range(2):
        state, expected = stay(state, batch)
        moved, result = go_on(moved, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)
    moved_back = target.move(moved, layout, names=EXPERT_NAMES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved_back, state)


def test_groups_are_assigned_again_by_their_own_workers():
    plan = diffshard.experts.GroupPlan(
        groups=((3, 0), (1, 2)), expert_workers=((3, 0, 3), (1, 2, 1)), computing_s=(1.0, 1.0),
        exchanging_s=(1.0, 1.0), all_reduce_s=1.0, merging_s=3.0, lower_bound_s=3.0,
        status="optimal", search_s=0.0,
    )  # fmt: skip
    speeds, room = [1.0, 2.0, 1.0, 2.0], [3, 2, 1, 2]
    again = diffshard.experts.reassign_experts(plan, [1.0, 6.0, 1.0], speeds, room)
    assert again == dataclasses.replace(plan, expert_workers=((0, 3, 0), (1, 1, 2)))
    with pytest.raises(diffshard.InfeasibleError, match="of all 2 workers together is 2, 1 less"):
        diffshard.experts.reassign_experts(plan, [1.0, 6.0, 1.0], speeds, 1)
    with pytest.raises(ValueError, match="`expert_flops` must have the 3 numbers of the plan, not 2"):
        diffshard.experts.reassign_experts(plan, [1.0, 6.0], speeds, room)
    with pytest.raises(ValueError, match="`flops_per_s` must have the 4 numbers of the plan, not 3"):
        diffshard.experts.reassign_experts(plan, [1.0, 6.0, 1.0], speeds[:3], room)
