"""What a search ends with, in a space whose every number is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.base import Problem
from diffshard.bilevel_search.relaxation import best_of, one_hot
from diffshard.bilevel_search.search import curvature
from search_spaces.numbered import NumberedSpace
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, mixed_increase, start
from tests.diffshard.bilevel_search.small_search import EXACT_COST, KEY, plain_loss, run, small_search


def test_finish_takes_the_cheapest_choice_within_the_bound():
    """Increases 0, 0.045, 0.245 and 0, 0.125; costs 2, 1.5, 1 and 3, 1."""
    for most, expected, seconds in [(0.05, (1, 0), 4.5), (0.13, (0, 1), 3.0), (0.2, (1, 1), 2.5), (0.4, (2, 1), 2.0)]:
        search = small_search(max_loss_increase=most)
        plan, params = search.finish(run(search, 3)[0])
        assert plan.choice == expected
        assert plan.seconds == pytest.approx(seconds)
        assert plan.cost_ratio == pytest.approx(seconds / EXACT_COST)
        assert plan.loss_increase <= most
        assert plan.feasible
        assert np.abs(params["w"]).max() > 0
    assert plan.strategies == ("rougher", "rough")
    assert "40.0% of the exact" in str(plan)


def test_the_choice_within_the_bound_keeps_the_memory_too():
    """The best within the bound alone is (1, 1); its 9 bytes do not fit."""
    memory = {
        "usage_node": np.array([0]),
        "usage": [np.array([1, 9, 1])],
        "usage_interval": np.array([[0, 1]]),
        "memory_limit": 5.0,
    }
    plan, _ = _search_and_finish(Perturbed(ERRORS, SECONDS, **memory), 0.2)
    assert plan.choice == (0, 1)
    assert plan.feasible


def _search_and_finish(space: Perturbed, most: float):
    search = small_search(space, max_loss_increase=most)
    return search.finish(run(search, 3)[0])


def test_a_weight_of_the_cost_decides_by_its_size_and_may_be_a_schedule():
    for weight, expected in [(0.0, (0, 0)), (100.0, (2, 1)), (optax.constant_schedule(100.0), (2, 1))]:
        search = small_search(cost_weight=weight, choice_optimizer=optax.adam(0.1))
        assert search.finish(run(search, 60)[0])[0].choice == expected


@pytest.mark.parametrize("weight", [0.0, optax.linear_schedule(0.0, -100.0, 1)])
def test_a_choice_that_the_exact_one_dominates_is_not_proposed(weight):
    search = small_search(Perturbed([[0.0, 0.3]], [[1.0, 2.0]]), cost_weight=weight)
    state, _ = run(search, 3)
    plan, _ = search.finish(state._replace(logits=[jnp.array([0.0, 1.0])]))
    assert plan.choice == (0,)
    assert plan.feasible
    assert "costs no less than the exact choice" in plan.message
    cheaper = small_search(Perturbed([[0.0, 0.3]], [[2.0, 1.0]]), cost_weight=weight)
    plan, _ = cheaper.finish(state._replace(logits=[jnp.array([0.0, 1.0])]))
    assert plan.choice == (1,)
    assert not plan.message


def test_nodes_that_the_loss_does_not_see_are_named():
    """Node 1's second strategy adds no error to a forward pass, as those of gradients do not."""
    space = Perturbed([[0.0, 0.3], [0.0, 0.0]], [[2.0, 1.5], [3.0, 1.0]])
    for estimator, most in [(mixed_increase, 1.0), (curvature, 1e-3)]:
        plan, _ = (search := small_search(space, estimator=estimator, max_loss_increase=most)).finish(run(search, 3)[0])
        assert plan.choice[1] == 1
        assert plan.feasible
        assert "not measured: the estimator's loss does not depend on 1;" in str(plan)


def test_a_bound_that_nothing_keeps_is_reported_with_the_best_that_was_reached():
    rounded = best_of(Perturbed([[1.0, 0.8]], [[2.0, 1.0]]).problem, {(0,): 0.5, (1,): 0.32}, 0.1)
    assert rounded.choice == (1,)
    assert rounded.increase == 0.32
    assert "infeasible: " in rounded.message
    assert "0.32, above `max_loss_increase` 0.1" in rounded.message


@pytest.mark.parametrize("options", [{}, {"cost_weight": 1.0}, {"max_loss_increase": 1e-30}])
def test_where_nothing_was_learnt_the_exact_choice_is_returned_and_the_plan_says_so(options):
    search = small_search(**options)
    state = search.init(KEY, start(), batch_of(0))
    inputs, targets = batch_of(0)
    refused, _ = search.update(state, (inputs, targets), (inputs, targets * jnp.nan))
    for nothing, num_refused in [(state, 0), (refused, 1)]:
        plan, _ = search.finish(nothing)
        assert plan.choice == (0, 0)
        assert plan.feasible
        assert f"nothing was learnt: 0 updates were accepted, {num_refused} refused" in str(plan)
    assert "nothing" not in small_search().finish(run(small_search(), 1)[0])[0].message


def test_without_a_loss_of_its_own_a_space_follows_the_cost_and_the_model_trains():
    problem = Problem(
        [np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.5]), np.array([np.inf, 4.0])],
        np.array([[0, 1]]),
        [np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0]])],
    )
    for space in (problem, NumberedSpace(problem)):
        search = diffshard.bilevel(
            plain_loss, space=space, weights_optimizer=optax.sgd(0.1), choice_optimizer=optax.adam(0.1)
        )
        state, seen = run(search, 60)
        plan, params = search.finish(state)
        assert plan.choice == (1, 1, 1)
        assert plan.seconds == 6.5
        assert plan.feasible
        assert seen[-1].train_loss < 0.2 * seen[0].train_loss
        assert seen[-1].cost_ratio < seen[0].cost_ratio
        assert seen[-1].loss_increase == 0.0
        assert np.abs(params["w"]).max() > 0
        with pytest.raises(ValueError, match="every choice has the same"):
            search.validate(state, None)  # pyright: ignore[reportArgumentType]


def test_memory_that_the_choice_exceeds_is_reported():
    problem = Problem(
        [np.array([3.0, 1.0])], np.zeros((0, 2), int), [], np.array([0]), [np.array([5, 50])], np.array([[0, 1]]), 10
    )
    search = diffshard.bilevel(plain_loss, space=problem, weights_optimizer=optax.sgd(0.1))
    plan, _ = search.finish(run(search, 5)[0])
    assert not plan.feasible
    assert "exceeded by 40 bytes" in plan.message


def test_a_function_makes_the_space_of_the_first_init():
    made = []

    def make(loss_fn, mesh_axes, params, batch, errors):
        made.append((loss_fn, mesh_axes, params["w"].shape, batch[0].shape))
        return Perturbed(errors, SECONDS)

    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    search = diffshard.bilevel(
        plain_loss,
        mesh,
        space=functools.partial(make, errors=ERRORS),
        weights_optimizer=optax.sgd(0.1),
        max_loss_increase=0.05,
    )
    with pytest.raises(ValueError, match="call `init"):
        search.update(None, batch_of(0), batch_of(0))  # pyright: ignore[reportArgumentType]
    state, _ = run(search, 2)
    search.init(KEY, start(), batch_of(0))
    assert made == [(plain_loss, {"data": 2, "model": 4}, (3,), (8, 3))]
    assert search.finish(state)[0].choice == (1, 0)


def test_a_function_of_the_user_is_an_estimator():
    def increase(space, params, batch, relaxed, key, progress):
        del params, batch, key, progress
        wanted = one_hot(space.problem, (1, 0))
        return 10.0 * sum(jnp.sum((row - want) ** 2) for row, want in zip(relaxed, wanted, strict=True))

    search = small_search(cost_weight=0.01, estimator=increase, choice_optimizer=optax.adam(0.1))
    assert search.finish(run(search, 40)[0])[0].choice == (1, 0)
