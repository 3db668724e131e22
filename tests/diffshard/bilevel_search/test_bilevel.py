"""The whole search on a space whose every number is known."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.base import Problem
from diffshard.bilevel_search.base import BilevelState
from diffshard.bilevel_search.relaxation import best_of, one_hot, softmax_choice
from diffshard.bilevel_search.search import BilevelSearch
from search_spaces.numbered import NumberedSpace
from tests.diffshard.bilevel_search.perturbed import NothingExact, Perturbed, batch_of, start

KEY = jax.random.key(0)
ERRORS, SECONDS = [[0.0, 0.3, 0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]]
EXACT_COST = 5.0


TWO = Problem([np.array([1.0, 2.0])], np.zeros((0, 2), int), [])


def _search(space=None, **options) -> BilevelSearch:
    options = {"weights_optimizer": optax.sgd(0.1), "max_loss_increase": 0.05, "choice_every": 1, **options}
    if "cost_weight" in options:
        del options["max_loss_increase"]
    return diffshard.bilevel(None, space=Perturbed(ERRORS, SECONDS) if space is None else space, **options)


def _run(search: BilevelSearch, steps: int) -> tuple[BilevelState, list]:
    state, seen = search.init(KEY, start(), batch_of(0)), []
    for step in range(steps):
        state, metrics = search.update(state, batch_of(2 * step), batch_of(2 * step + 1))
        seen.append(metrics)
    return state, seen


@pytest.mark.parametrize(("estimator", "order"), [("mixture", 1), ("mixture", 2), ("sampled", 1), ("curvature", 1)])
def test_update_compiles_once_trains_and_is_the_same_for_the_same_key(estimator: str, order: int):
    space = Perturbed(ERRORS, SECONDS)
    search = _search(space, estimator=estimator, order=order)
    _run(search, 1)
    traces = space.traces
    first, _ = _run(search, 2)
    again, _ = _run(search, 2)
    later, seen = _run(search, 30)
    assert space.traces == traces
    for a, b in zip(jax.tree.leaves(first.logits), jax.tree.leaves(again.logits), strict=True):
        np.testing.assert_array_equal(a, b)
    assert seen[-1].train_loss < 0.2 * seen[0].train_loss
    assert later.step == 30
    assert not any(metrics.refused for metrics in seen)


@pytest.mark.parametrize("estimator", ["mixture", "sampled", "curvature"])
def test_a_loss_in_half_precision_is_searched_between_steps_of_the_choice_too(estimator: str):
    class Half(Perturbed):
        def loss(self, *args, **options):
            return super().loss(*args, **options).astype(jnp.bfloat16)

    state, seen = _run(_search(Half(ERRORS, SECONDS), estimator=estimator, choice_every=2), 3)
    assert not any(metrics.refused for metrics in seen)
    assert {metrics.loss_increase.dtype for metrics in seen} == {state.offset.dtype}


@pytest.mark.parametrize("order", [1, 2])
def test_a_step_of_the_choice_follows_finite_differences_of_loss_and_cost(order: int):
    """Edges and the busiest device's time included; gradient descent of rate 1, so that the step is the slope."""
    with jax.enable_x64(True):
        fields = {
            "edge_nodes": np.array([[0, 1]]),
            "edge_cost": [np.array([[0.0, 2.0], [1.0, 0.0], [0.5, 3.0]])],
            "load": [np.array([[1.0, 0.0], [0.0, 3.0], [0.2, 0.1]]), np.array([[0.5, 0.5], [0.1, 2.0]])],
        }
        space, rate, weight = Perturbed(ERRORS, SECONDS, **fields), 0.1, 0.3
        options = {"cost_weight": weight, "choice_optimizer": optax.sgd(1.0), "order": order}
        search = _search(space, estimator="mixture", weights_optimizer=optax.sgd(rate), **options)
        train, val = batch_of(0), batch_of(1)
        state = search.init(KEY, {"w": jnp.array([0.5, 1.0, -1.0])}, train)
        state = state._replace(logits=[jnp.array([0.1, -0.2, 0.4]), jnp.array([0.3, 0.1])])
        after, metrics = search.update(state, train, val)

        def objective(logits: list[np.ndarray]) -> float:
            rows = softmax_choice(space.problem, [jnp.asarray(row) for row in logits])
            params = state.params
            if order == 2:
                slope = jax.grad(space.loss)(params, train, rows, KEY)
                params = jax.tree.map(lambda p, g: p - rate * g, params, slope)
            p, q = (np.asarray(row) for row in rows)
            cost = p @ SECONDS[0] + q @ SECONDS[1] + p @ fields["edge_cost"][0] @ q
            cost += (p @ fields["load"][0] + q @ fields["load"][1]).max()
            exact = EXACT_COST + 0.0 + 1.5
            return float(space.loss(params, val, rows, KEY)) + weight * cost / exact

        for v, row in enumerate(state.logits):
            for s in range(row.size):
                sides = []
                for h in (1e-5, -1e-5):
                    moved = [np.array(r) for r in state.logits]
                    moved[v][s] += h
                    sides.append(objective(moved))
                slope = (sides[0] - sides[1]) / 2e-5
                assert state.logits[v][s] - after.logits[v][s] == pytest.approx(slope, abs=1e-7)
        assert metrics.cost_slope > 0
        assert metrics.loss_slope > 0


def test_the_bound_on_the_loss_finds_the_known_multiplier():
    """One node: c = 1 - p/2 and the increase is p · 0.5; at most 0.125 gives p = 1/4 and μ · 0.5/0.125 = 1/2."""
    search = _search(Perturbed([[0.0, 1.0]], [[2.0, 1.0]]), max_loss_increase=0.125, choice_optimizer=optax.adam(0.02))
    state, seen = _run(search, 1500)
    assert search.relaxed_choice(state)[0][1] == pytest.approx(0.25, abs=0.01)
    assert float(state.multiplier) == pytest.approx(0.125, abs=0.01)
    assert float(seen[-1].loss_increase) == pytest.approx(0.125, rel=0.03)
    assert float(seen[-1].cost_ratio) == pytest.approx(0.875, abs=0.005)


def test_finish_takes_the_cheapest_choice_within_the_bound():
    """Increases 0, 0.045, 0.245 and 0, 0.125; costs 2, 1.5, 1 and 3, 1."""
    for most, expected, seconds in [(0.05, (1, 0), 4.5), (0.13, (0, 1), 3.0), (0.2, (1, 1), 2.5), (0.4, (2, 1), 2.0)]:
        search = _search(max_loss_increase=most)
        plan, params = search.finish(_run(search, 3)[0])
        assert plan.choice == expected
        assert plan.seconds == pytest.approx(seconds)
        assert plan.cost_ratio == pytest.approx(seconds / EXACT_COST)
        assert plan.loss_increase <= most
        assert plan.feasible
        assert np.abs(params["w"]).max() > 0
    assert plan.strategies == ("rougher", "rough")
    assert "40.0% of the exact" in str(plan)


def test_a_weight_of_the_cost_decides_by_its_size_and_may_be_a_schedule():
    for weight, expected in [(0.0, (0, 0)), (100.0, (2, 1)), (optax.constant_schedule(100.0), (2, 1))]:
        search = _search(cost_weight=weight, choice_optimizer=optax.adam(0.1))
        assert search.finish(_run(search, 60)[0])[0].choice == expected


@pytest.mark.parametrize("weight", [0.0, optax.linear_schedule(0.0, -100.0, 1)])
def test_a_choice_that_the_exact_one_dominates_is_not_proposed(weight):
    search = _search(Perturbed([[0.0, 0.3]], [[1.0, 2.0]]), cost_weight=weight)
    state, _ = _run(search, 3)
    plan, _ = search.finish(state._replace(logits=[jnp.array([0.0, 1.0])]))
    assert plan.choice == (0,)
    assert plan.feasible
    assert "costs no less than the exact choice" in plan.message
    cheaper = _search(Perturbed([[0.0, 0.3]], [[2.0, 1.0]]), cost_weight=weight)
    plan, _ = cheaper.finish(state._replace(logits=[jnp.array([0.0, 1.0])]))
    assert plan.choice == (1,)
    assert not plan.message


def test_nodes_that_the_loss_does_not_see_are_named():
    """Node 1's second strategy adds no error to a forward pass, as those of gradients do not."""
    space = Perturbed([[0.0, 0.3], [0.0, 0.0]], [[2.0, 1.5], [3.0, 1.0]])
    for estimator, most in [("mixture", 1.0), ("curvature", 1e-3)]:
        plan, _ = (search := _search(space, estimator=estimator, max_loss_increase=most)).finish(_run(search, 3)[0])
        assert plan.choice[1] == 1
        assert plan.feasible
        assert "not measured: the estimator's loss does not depend on 1;" in str(plan)


def test_a_bound_that_nothing_keeps_is_reported_with_the_best_that_was_reached():
    rounded = best_of(Perturbed([[1.0, 0.8]], [[2.0, 1.0]]).problem, {(0,): 0.5, (1,): 0.32}, 0.1)
    assert rounded.choice == (1,)
    assert rounded.increase == 0.32
    assert "infeasible: " in rounded.message
    assert "0.32, above `max_loss_increase` 0.1" in rounded.message


def test_a_space_without_an_exact_choice_is_refused():
    with pytest.raises(ValueError, match="node 0 has no exact strategy"):
        _search(NothingExact([[1.0, 0.8]], [[2.0, 1.0]]))


def test_numbers_that_are_not_finite_refuse_the_step_and_training_goes_on():
    search = _search(estimator="mixture")
    state, _ = _run(search, 3)
    inputs, targets = batch_of(0)
    bad = (inputs, targets.at[0].set(jnp.nan))
    for train, val in [(bad, batch_of(1)), (batch_of(1), bad)]:
        kept, metrics = search.update(state, train, val)
        assert metrics.refused
        assert kept.num_refused == state.num_refused + 1
        jax.tree.map(np.testing.assert_array_equal, _apart_from_key(state), _apart_from_key(kept))
        after, metrics = search.update(kept, batch_of(5), batch_of(6))
        assert not metrics.refused
        assert after.step == state.step + 1
        assert np.isfinite(after.params["w"]).all()


@pytest.mark.parametrize("options", [{}, {"cost_weight": 1.0}, {"max_loss_increase": 1e-30}])
def test_where_nothing_was_learnt_the_exact_choice_is_returned_and_the_plan_says_so(options):
    search = _search(**options)
    state = search.init(KEY, start(), batch_of(0))
    inputs, targets = batch_of(0)
    refused, _ = search.update(state, (inputs, targets), (inputs, targets * jnp.nan))
    for nothing, num_refused in [(state, 0), (refused, 1)]:
        plan, _ = search.finish(nothing)
        assert plan.choice == (0, 0)
        assert plan.feasible
        assert f"nothing was learnt: 0 updates were accepted, {num_refused} refused" in str(plan)
    assert "nothing" not in _search().finish(_run(_search(), 1)[0])[0].message


def _apart_from_key(state: BilevelState) -> BilevelState:
    return state._replace(key=jnp.zeros(()), num_refused=jnp.zeros(()))


def test_collapse_is_seen_where_rows_are_decided_and_something_cheaper_would_fit():
    search = _search()
    state = search.init(KEY, start(), batch_of(0))
    _, open_rows = search.update(state, batch_of(0), batch_of(1))
    assert float(open_rows.entropy) == pytest.approx(1.0, abs=1e-3)
    assert not open_rows.collapsed
    exact = state._replace(logits=[jnp.array([30.0, 0.0, 0.0]), jnp.array([30.0, 0.0])])
    _, metrics = search.update(exact, batch_of(0), batch_of(1))
    assert metrics.collapsed
    assert float(metrics.undershoot) == pytest.approx(1.0, abs=1e-4)
    assert float(metrics.entropy) == pytest.approx(0.0, abs=1e-4)
    cheapest = state._replace(logits=[jnp.array([0.0, 0.0, 30.0]), jnp.array([0.0, 30.0])])
    roomy = _search(max_loss_increase=10.0)
    _, metrics = roomy.update(cheapest, batch_of(0), batch_of(1))
    assert metrics.undershoot > 0.9
    assert not metrics.collapsed


def _plain_loss(params, batch):
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ params["w"] - targets) ** 2)


def test_without_a_loss_of_its_own_a_space_follows_the_cost_and_the_model_trains():
    problem = Problem(
        [np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.5]), np.array([np.inf, 4.0])],
        np.array([[0, 1]]),
        [np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0]])],
    )
    for space in (problem, NumberedSpace(problem)):
        search = diffshard.bilevel(
            _plain_loss, space=space, weights_optimizer=optax.sgd(0.1), choice_optimizer=optax.adam(0.1)
        )
        state, seen = _run(search, 60)
        plan, params = search.finish(state)
        assert plan.choice == (1, 1, 1)
        assert plan.seconds == 6.5
        assert plan.feasible
        assert seen[-1].train_loss < 0.2 * seen[0].train_loss
        assert seen[-1].cost_ratio < seen[0].cost_ratio
        assert seen[-1].loss_increase == 0.0
        assert np.abs(params["w"]).max() > 0
        with pytest.raises(ValueError, match="every choice has the same"):
            search.prove(state, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_lossless_space_start_at_marginals_that_name_the_optimum(seed: int):
    """Trees, whose dual is tight; costs of microseconds and of forbidden strategies."""
    rng = np.random.default_rng(seed)
    node_cost = [1e-6 * rng.random(3) for _ in range(6)]
    node_cost[2][0] = np.inf
    pairs = np.array([[rng.integers(v), v] for v in range(1, 6)])
    problem = Problem(node_cost, pairs, [1e-6 * rng.random((3, 3)) for _ in pairs])
    search = diffshard.bilevel(_plain_loss, space=problem, weights_optimizer=optax.sgd(0.1))
    state = search.init(KEY, start(), batch_of(0))
    optimum = diffshard.solve(problem, solver="exhaustive")
    assert tuple(int(row.argmax()) for row in search.relaxed_choice(state)) == tuple(optimum.choice)
    assert search.relaxed_choice(state)[2][0] == 0


def test_an_optimiser_that_needs_the_losss_value_is_refused_and_one_that_keeps_infinities_is_not():
    with pytest.raises(ValueError, match="`weights_optimizer` must take a step from gradients"):
        _run(_search(weights_optimizer=optax.lbfgs(0.1)), 1)

    def init(params):
        del params
        return jnp.array(jnp.inf)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    _, seen = _run(_search(weights_optimizer=optax.GradientTransformation(init, update)), 3)
    assert not any(metrics.refused for metrics in seen)


def test_a_state_of_another_search_is_refused():
    state, _ = _run(_search(), 1)
    other = _search(Perturbed([[0.0, 0.3], [0.0, 0.5]], [[2.0, 1.5], [3.0, 1.0]]))
    with pytest.raises(ValueError, match=r"`state` is of another search: its logits have shapes .*\[2, 2\] strategies"):
        other.update(state, batch_of(0), batch_of(1))
    with pytest.raises(ValueError, match="`state` is of another search"):
        other.finish(state)
    with pytest.raises(ValueError, match="what it keeps for `weights_optimizer` is not what this one keeps"):
        _search(weights_optimizer=optax.adam(0.1)).update(state, batch_of(0), batch_of(1))


def test_what_is_no_state_is_refused():
    search = _search()
    state: Any = search.init(KEY, start(), batch_of(0))
    both: Any = search.update(state, batch_of(0), batch_of(1))
    with pytest.raises(ValueError, match=r"got a tuple that begins with one; .*`state, metrics = search\.update"):
        search.finish(both)
    with pytest.raises(ValueError, match=r"`state` must be a BilevelState, .* comes before batches; got tuple"):
        search.update(batch_of(0), state, batch_of(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got NoneType"):
        search.relaxed_choice(None)  # pyright: ignore[reportArgumentType]


def test_memory_that_the_choice_exceeds_is_reported():
    problem = Problem(
        [np.array([3.0, 1.0])], np.zeros((0, 2), int), [], np.array([0]), [np.array([5, 50])], np.array([[0, 1]]), 10
    )
    search = diffshard.bilevel(_plain_loss, space=problem, weights_optimizer=optax.sgd(0.1))
    plan, _ = search.finish(_run(search, 5)[0])
    assert not plan.feasible
    assert "exceeded by 40 bytes" in plan.message


def test_a_function_makes_the_space_of_the_first_init():
    made = []

    def make(loss_fn, mesh_axes, params, batch, errors):
        made.append((loss_fn, mesh_axes, params["w"].shape, batch[0].shape))
        return Perturbed(errors, SECONDS)

    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    search = diffshard.bilevel(
        _plain_loss,
        mesh,
        space=functools.partial(make, errors=ERRORS),
        weights_optimizer=optax.sgd(0.1),
        max_loss_increase=0.05,
    )
    with pytest.raises(ValueError, match="call `init"):
        search.update(None, batch_of(0), batch_of(0))  # pyright: ignore[reportArgumentType]
    state, _ = _run(search, 2)
    search.init(KEY, start(), batch_of(0))
    assert made == [(_plain_loss, {"data": 2, "model": 4}, (3,), (8, 3))]
    assert search.finish(state)[0].choice == (1, 0)


def test_a_function_of_the_user_is_an_estimator():
    def increase(space, params, batch, relaxed, key, progress):
        del params, batch, key, progress
        wanted = one_hot(space.problem, (1, 0))
        return 10.0 * sum(jnp.sum((row - want) ** 2) for row, want in zip(relaxed, wanted, strict=True))

    search = _search(cost_weight=0.01, estimator=increase, choice_optimizer=optax.adam(0.1))
    assert search.finish(_run(search, 40)[0])[0].choice == (1, 0)


class _OnlyLoss(NumberedSpace):
    loss = Perturbed.loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 3}, "`order` must be 1 or 2, got 3"),
        ({"order": True}, "`order` must be 1 or 2, got True"),
        ({"choice_every": True}, "`choice_every` must be a positive integer, got True"),
        ({"max_loss_increase": True}, r"`max_loss_increase` must be a positive .* of the loss, got True\.$"),
        ({"max_loss_increase": 0}, "got 0; no lossy strategy fits an increase of 0"),
        ({"cost_weight": False}, "`cost_weight` must be a finite number from 0 on, or a schedule; got False"),
        ({"order": 2}, "`order` 2 needs an estimator under which training depends"),
        ({"estimator": "darts"}, "`estimator` must be one of curvature, mixture, sampled"),
        ({"estimator": ["mixture"]}, r"`estimator` must be one of .*; got \['mixture'\]"),
        ({"cost_weight": -0.1}, "`cost_weight` must be a finite number from 0 on"),
        ({"cost_weight": lambda step: -1.0}, "`cost_weight` must be a schedule .* at step 0 it is -1.0"),
        ({"cost_weight": "1"}, "`cost_weight` must be a finite number from 0 on, or a schedule; got '1'"),
        ({"max_loss_increase": "0.5"}, "`max_loss_increase` must be a positive finite number .* got '0.5'"),
        ({"weights_optimizer": None}, "`weights_optimizer` must be an optax gradient transformation"),
        ({"max_loss_increase": 0.0}, "`max_loss_increase` must be a positive finite number"),
        ({"max_loss_increase": None}, "give `max_loss_increase` or `cost_weight`: this space trades"),
        ({"space": Perturbed([[0.0], [0.0]], [[1.0], [1.0]])}, "no node with two strategies"),
        ({"space": Perturbed([[0.0, 0.1]], [[1.0, np.inf]])}, "no node with two strategies that are allowed"),
        ({"space": Perturbed(ERRORS, [[0.0, 1.0, 1.0], [0.0, 1.0]])}, "positive finite cost"),
        ({"space": TWO, "max_loss_increase": None}, "`loss_fn` must be given"),
        ({"space": _OnlyLoss(TWO)}, "it lacks arguments, .* loss_and_gradients, "),
        ({"space": _OnlyLoss(TWO), "max_loss_increase": None}, "it has loss of `search_spaces.base.LossySpace`"),
        ({"space": object()}, "got object, which lacks decode, explain, node_names, problem, strategy_names"),
        ({"space": "sharding"}, "`space` must be a Problem"),
        ({"mesh": {"data": 2}}, "`mesh` must be a Mesh or an AbstractMesh, got {'data': 2}"),
        ({"choice_optimizer": 3}, "`choice_optimizer` must be an optax gradient transformation"),
        ({"weights_optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, "of MultiSteps take its"),
        ({"space": Perturbed}, "needs `loss_fn` and `mesh`"),
        (
            {
                "space": Problem(
                    [np.ones(2), np.ones(2)], np.array([[0, 1]]), [np.array([[0.0, np.inf], [np.inf, 0.0]])]
                ),
                "max_loss_increase": None,
            },
            "forbids pairs",
        ),
    ],
)
def test_what_is_wrong_is_said(options, message: str):
    with pytest.raises(ValueError, match=message):
        _search(**options)


@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.float32, jnp.bfloat16])
def test_numbers_of_any_library_are_taken(kind):
    search = _search(max_loss_increase=kind(0.5), order=np.int64(1), choice_every=jnp.int32(2))
    plan, _ = search.finish(search.init(KEY, start(), batch_of(0)))
    assert plan.max_loss_increase == 0.5
    assert isinstance(plan.max_loss_increase, float)


def test_both_a_bound_and_a_weight_are_refused():
    with pytest.raises(ValueError, match="not both"):
        diffshard.bilevel(
            None,
            space=Perturbed(ERRORS, SECONDS),
            weights_optimizer=optax.sgd(0.1),
            max_loss_increase=1.0,
            cost_weight=1.0,
        )


@pytest.mark.parametrize("weighed", [{"max_loss_increase": 1.0}, {"cost_weight": 1.0}])
def test_what_weighs_a_loss_is_refused_where_every_choice_has_the_same(weighed):
    leave_out = "leave out `max_loss_increase` and `cost_weight`"
    with pytest.raises(ValueError, match=f"`space` has no loss of its own .* {leave_out}"):
        diffshard.bilevel(_plain_loss, space=TWO, weights_optimizer=optax.sgd(0.1), **weighed)
    with pytest.raises(ValueError, match=f"it lacks arguments, .* loss_and_gradients, .* {leave_out}"):
        diffshard.bilevel(_plain_loss, space=_OnlyLoss(TWO), weights_optimizer=optax.sgd(0.1), **weighed)


class _WithoutNotes:
    """A lossy space that lacks one member of `LossySpace`."""

    def __init__(self):
        complete = Perturbed(ERRORS, SECONDS)
        names = {name for name in dir(complete) if not name.startswith("_")} - {"notes"}
        vars(self).update({name: getattr(complete, name) for name in names})


def test_a_lossy_space_that_lacks_a_member_never_trains_as_an_exact_one():
    space: Any = _WithoutNotes()
    options = {"space": space, "weights_optimizer": optax.sgd(0.1)}
    with pytest.raises(ValueError, match=r"give `max_loss_increase` or `cost_weight`: .* it has exact_choice, "):
        diffshard.bilevel(_plain_loss, **options)
    with pytest.raises(ValueError, match=r"`space` has no loss of its own \(it lacks notes of"):
        diffshard.bilevel(_plain_loss, max_loss_increase=0.1, **options)


@pytest.mark.parametrize("key", [0, None, jnp.zeros(2), jax.random.split(KEY)])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match=r"`key` must be a random key, as `jax\.random\.key\(0\)` is; got "):
        _search().init(key, start(), batch_of(0))


def test_keys_of_the_old_style_are_taken():
    old, new = (_search().init(key, start(), batch_of(0)) for key in (jax.random.PRNGKey(0), KEY))
    np.testing.assert_array_equal(old.logits[0], new.logits[0])


def test_batches_without_rows_are_refused():
    search, empty = _search(), jax.tree.map(lambda leaf: leaf[:0], batch_of(0))
    with pytest.raises(ValueError, match=r"`batch` must have at least one row in each of its arrays; got .*\(0, 3\)"):
        search.init(KEY, start(), empty)
    state = search.init(KEY, start(), batch_of(0))
    for name, batches in [("train_batch", (empty, batch_of(0))), ("val_batch", (batch_of(0), empty))]:
        with pytest.raises(ValueError, match=f"`{name}` must have at least one row"):
            search.update(state, *batches)


def test_validation_data_of_other_shapes_are_refused():
    search = _search()
    state = search.init(KEY, start(), batch_of(0))
    inputs, targets = batch_of(1)
    with pytest.raises(ValueError, match="`val_batch` must have the shapes of `train_batch`"):
        search.update(state, batch_of(0), (inputs[:4], targets[:4]))


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
    search = _search(space, max_loss_increase=most)
    return search.finish(_run(search, 3)[0])


def test_batches_of_other_shapes_than_those_of_init_are_refused():
    search = _search()
    state = search.init(KEY, start(), batch_of(0))
    shorter = jax.tree.map(lambda leaf: leaf[:4], batch_of(0))
    with pytest.raises(ValueError, match="`train_batch` must have the shapes that `init` got"):
        search.update(state, shorter, shorter)
