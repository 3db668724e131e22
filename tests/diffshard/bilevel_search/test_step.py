"""Steps of a search in a space whose every number is known: slopes, multipliers, refused numbers, collapse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.base import Problem
from diffshard.bilevel_search.base import BilevelState
from diffshard.bilevel_search.relaxation import softmax_choice
from diffshard.bilevel_search.search import curvature
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, mixed_increase, start
from tests.diffshard.bilevel_search.small_search import EXACT_COST, KEY, plain_loss, run, small_search


@pytest.mark.parametrize("estimator", [mixed_increase, curvature])
def test_update_compiles_once_trains_and_is_the_same_for_the_same_key(estimator):
    space = Perturbed(ERRORS, SECONDS)
    search = small_search(space, estimator=estimator)
    run(search, 1)
    traces = space.traces
    first, _ = run(search, 2)
    again, _ = run(search, 2)
    later, seen = run(search, 30)
    assert space.traces == traces
    for a, b in zip(jax.tree.leaves(first.logits), jax.tree.leaves(again.logits), strict=True):
        np.testing.assert_array_equal(a, b)
    assert seen[-1].train_loss < 0.2 * seen[0].train_loss
    assert later.step == 30
    assert not any(metrics.refused for metrics in seen)


@pytest.mark.parametrize("estimator", [mixed_increase, curvature])
def test_a_loss_in_half_precision_is_searched_between_steps_of_the_choice_too(estimator):
    class Half(Perturbed):
        def loss(self, *args, **options):
            return super().loss(*args, **options).astype(jnp.bfloat16)

    state, seen = run(small_search(Half(ERRORS, SECONDS), estimator=estimator, choice_every=2), 3)
    assert not any(metrics.refused for metrics in seen)
    assert {metrics.loss_increase.dtype for metrics in seen} == {state.offset.dtype}


def test_a_step_of_the_choice_follows_finite_differences_of_loss_and_cost():
    """Edges and the busiest device's time included; gradient descent of rate 1, so that the step is the slope."""
    with jax.enable_x64(True):
        fields = {
            "edge_nodes": np.array([[0, 1]]),
            "edge_cost": [np.array([[0.0, 2.0], [1.0, 0.0], [0.5, 3.0]])],
            "load": [np.array([[1.0, 0.0], [0.0, 3.0], [0.2, 0.1]]), np.array([[0.5, 0.5], [0.1, 2.0]])],
        }
        space, rate, weight = Perturbed(ERRORS, SECONDS, **fields), 0.1, 0.3
        options = {"cost_weight": weight, "choice_optimizer": optax.sgd(1.0)}
        search = small_search(space, estimator=mixed_increase, weights_optimizer=optax.sgd(rate), **options)
        train, val = batch_of(0), batch_of(1)
        state = search.init(KEY, {"w": jnp.array([0.5, 1.0, -1.0])}, train)
        state = state._replace(logits=[jnp.array([0.1, -0.2, 0.4]), jnp.array([0.3, 0.1])])
        after, metrics = search.update(state, train, val)

        def objective(logits: list[np.ndarray]) -> float:
            rows = softmax_choice(space.problem, [jnp.asarray(row) for row in logits])
            params = state.params
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


class Reacting(Perturbed):
    """Errors bias what is trained with them, and harm the more the further parameters are from where exact ones end."""

    def loss(self, params, batch, selection, key, step=0):  # noqa: D102
        del key, step
        inputs, targets = batch
        error = sum(jnp.asarray(errors)[s] for s, errors in zip(selection, self.errors, strict=True))
        return 0.5 * jnp.mean((inputs @ params["w"] + error * inputs[:, 0] - targets) ** 2)

    def loss_increases(self, params, batch, key, **options):  # noqa: D102
        distance = params["w"][0] - 1.0
        return [(1 + 50 * distance**2) * row for row in super().loss_increases(params, batch, key, **options)]


def test_training_runs_the_strategies_of_largest_weight():
    space = Reacting(ERRORS, SECONDS)
    search = small_search(space)
    state = search.init(KEY, start(), batch_of(0))
    assert [int(row.argmax()) for row in state.logits] == [0, 0]  # it begins with the exact ones
    state = state._replace(logits=[jnp.array([0.0, 0.0, 1.0]), jnp.array([0.0, 1.0])])
    after, metrics = search.update(state, batch_of(0), batch_of(1))
    loss, slope = jax.value_and_grad(space.loss)(start(), batch_of(0), (2, 1), KEY)
    np.testing.assert_allclose(after.params["w"], -0.1 * slope["w"], rtol=1e-5)
    assert float(metrics.train_loss) == pytest.approx(float(loss))


def test_what_is_chosen_changes_what_is_measured_and_so_the_plan():
    """With logits that never move, training is exact, and the slopes and the plan are those of the exact choice."""
    options = {"max_loss_increase": 0.65, "space": Reacting(ERRORS, SECONDS)}
    frozen = small_search(**options, choice_optimizer=optax.set_to_zero())
    moving = small_search(**options, choice_optimizer=optax.adam(0.1))
    (still, _), (moved, _) = run(frozen, 60), run(moving, 60)
    assert np.max(moved.slopes[0]) > 1.1 * np.max(still.slopes[0])
    assert frozen.finish(still)[0].choice == (1, 1)
    assert moving.finish(moved)[0].choice == (0, 1)


def test_slopes_are_means_over_all_batches_but_the_first():
    class Scaled(Perturbed):
        """Increases in proportion to the mean target of the batch."""

        def loss_increases(self, params, batch, key, **options):
            return [scale_of(batch) * increase for increase in super().loss_increases(params, batch, key, **options)]

    def scale_of(batch):
        return 1.0 + jnp.abs(batch[1].mean())

    search = small_search(Scaled(ERRORS, SECONDS), estimator=curvature)
    state, seen = run(search, 5)
    scales = [float(scale_of(batch_of(2 * step + 1))) for step in range(5)]
    assert max(scales) > 1.2 * min(scales)
    for errors, slopes in zip(ERRORS, state.slopes, strict=True):
        np.testing.assert_allclose(slopes, np.mean(scales[1:]) * np.square(errors) / 2, rtol=1e-5)
    np.testing.assert_allclose(state.offset, 0.0, atol=1e-6)
    assert len({float(metrics.loss_increase) for metrics in seen}) == 5


def test_the_bound_on_the_loss_finds_the_known_multiplier():
    """One node: c = 1 - p/2 and the increase is p · 0.5; at most 0.125 gives p = 1/4 and μ · 0.5/0.125 = 1/2."""
    search = small_search(
        Perturbed([[0.0, 1.0]], [[2.0, 1.0]]), max_loss_increase=0.125, choice_optimizer=optax.adam(0.02)
    )
    state, seen = run(search, 1500)
    assert search.relaxed_choice(state)[0][1] == pytest.approx(0.25, abs=0.01)
    assert float(state.multiplier) == pytest.approx(0.125, abs=0.01)
    assert float(seen[-1].loss_increase) == pytest.approx(0.125, rel=0.03)
    assert float(seen[-1].cost_ratio) == pytest.approx(0.875, abs=0.005)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_lossless_space_start_at_marginals_that_name_the_optimum(seed: int):
    """Trees, whose dual is tight; costs of microseconds and of forbidden strategies."""
    rng = np.random.default_rng(seed)
    node_cost = [1e-6 * rng.random(3) for _ in range(6)]
    node_cost[2][0] = np.inf
    pairs = np.array([[rng.integers(v), v] for v in range(1, 6)])
    problem = Problem(node_cost, pairs, [1e-6 * rng.random((3, 3)) for _ in pairs])
    search = diffshard.bilevel(plain_loss, space=problem, weights_optimizer=optax.sgd(0.1))
    state = search.init(KEY, start(), batch_of(0))
    optimum = diffshard.solve(problem, solver="exhaustive")
    assert tuple(int(row.argmax()) for row in search.relaxed_choice(state)) == tuple(optimum.choice)
    assert search.relaxed_choice(state)[2][0] == 0


def test_numbers_that_are_not_finite_refuse_the_step_and_training_goes_on():
    search = small_search(estimator=mixed_increase)
    state, _ = run(search, 3)
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


def _apart_from_key(state: BilevelState) -> BilevelState:
    return state._replace(key=jnp.zeros(()), num_refused=jnp.zeros(()))


def test_collapse_is_seen_where_rows_are_decided_and_something_cheaper_would_fit():
    search = small_search()
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
    roomy = small_search(max_loss_increase=10.0)
    _, metrics = roomy.update(cheapest, batch_of(0), batch_of(1))
    assert metrics.undershoot > 0.9
    assert not metrics.collapsed
