"""Values against the definitions, slopes against finite differences, autodiff and an explicit Hessian."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffshard.bilevel_search.base import Estimator, TrainingProgress
from diffshard.bilevel_search.estimators.curvature import curvature
from diffshard.bilevel_search.estimators.mixture import mixture
from diffshard.bilevel_search.estimators.sampled import sampled
from diffshard.bilevel_search.optimizer_derivatives import unrolled_increase
from diffshard.bilevel_search.relaxation import softmax_choice
from diffshard.bilevel_search.search import resolve
from tests.diffshard.bilevel_search.perturbed import Perturbed, batch_of, start

SPACE = Perturbed([[0.0, 0.3, -0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]])
KEY = jax.random.key(0)
PROGRESS = TrainingProgress(jnp.int32(0), None)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _logits() -> list[jax.Array]:
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.normal(size=len(errors))) for errors in SPACE.errors]


def _relaxed() -> list[jax.Array]:
    return softmax_choice(SPACE.problem, _logits())


def _params() -> dict[str, jax.Array]:
    return {"w": jnp.array([0.5, -1.0, 2.0])}


def _batches():
    return [jax.tree.map(jnp.asarray, batch_of(seed)) for seed in (0, 1)]


def _train_loss(params, relaxed):
    return SPACE.loss(params, _batches()[0], relaxed, KEY)


def _increase(params, relaxed):
    return mixture().increase(SPACE, params, _batches()[1], relaxed, KEY, PROGRESS)


def _move(optimizer: optax.GradientTransformation, params, opt_state, gradients):
    return optax.apply_updates(params, optimizer.update(gradients, opt_state, params)[0])


def test_mixture_is_the_increase_of_the_mixed_loss_and_its_slope_that_of_finite_differences():
    params, relaxed = _params(), _relaxed()
    exact = SPACE.loss(params, _batches()[1], (0, 0), KEY, 0)
    mixed = SPACE.loss(params, _batches()[1], relaxed, KEY)
    assert _increase(params, relaxed) == pytest.approx(float(mixed - exact))
    slopes = jax.grad(_increase, argnums=1)(params, relaxed)
    for v, row in enumerate(relaxed):
        for s in range(row.size):
            sides = [
                _increase(params, [r.at[s].add(h) if i == v else r for i, r in enumerate(relaxed)])
                for h in (1e-5, -1e-5)
            ]
            assert slopes[v][s] == pytest.approx(float(sides[0] - sides[1]) / 2e-5, abs=1e-8)


def test_curvature_is_the_mean_predicted_increase():
    relaxed = _relaxed()
    value, slopes = jax.value_and_grad(curvature().increase, argnums=3)(
        SPACE, _params(), _batches()[1], relaxed, KEY, PROGRESS
    )
    expected = sum(float(np.asarray(row) @ (errors**2 / 2)) for row, errors in zip(relaxed, SPACE.errors, strict=True))
    assert value == pytest.approx(expected)
    np.testing.assert_allclose(slopes[0], [0.0, 0.045, 0.245])


def test_sampled_runs_one_strategy_of_each_node_as_often_as_it_weighs():
    estimator = sampled()
    assert estimator.relaxed_selection is not None
    weights = estimator.relaxed_selection
    drawn = jax.vmap(lambda key: weights(_relaxed(), key))(jax.random.split(KEY, 4000))
    assert estimator.selection is not None
    assert estimator.selection(_relaxed(), KEY) == [row.argmax() for row in weights(_relaxed(), KEY)]
    for draws, row in zip(drawn, _relaxed(), strict=True):
        np.testing.assert_allclose(np.asarray(draws).max(axis=1), 1.0)
        np.testing.assert_allclose(np.abs(np.asarray(draws)).sum(axis=1), 1.0, atol=1e-12)
        np.testing.assert_allclose(np.asarray(draws).mean(axis=0), row, atol=0.03)


def test_sampled_slopes_are_those_of_the_softened_draw():
    """With a linear function of the row the straight-through slope is that of softmax(log p + gumbel)."""
    row, weights = _relaxed()[0], jnp.array([1.0, -2.0, 0.5])
    drawn = sampled(temperature=0.7).relaxed_selection
    assert drawn is not None
    slope = jax.grad(lambda r: drawn([r], KEY)[0] @ weights)(row)
    noise = jax.random.gumbel(jax.random.split(KEY, 1)[0], (3,))
    soft = jax.grad(lambda r: jax.nn.softmax((jnp.log(r) + noise) / 0.7) @ weights)(row)
    np.testing.assert_allclose(slope, soft, rtol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_unrolled_slope_is_that_of_the_loss_after_the_step(name: str):
    optimizer = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.1)}[name]
    params, relaxed = _params(), _relaxed()
    opt_state = optimizer.update(jax.grad(_train_loss)({"w": jnp.ones(3)}, relaxed), optimizer.init(params), params)[1]
    move = functools.partial(_move, optimizer, params, opt_state)
    gradients = jax.grad(_train_loss)(params, relaxed)
    value, slopes = unrolled_increase(_increase, _train_loss, move, params, relaxed, gradients)

    def after(relaxed):
        return _increase_over_constant(move(jax.grad(_train_loss)(params, relaxed)), relaxed)

    expected = jax.grad(after)(relaxed)
    for slope, other in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-6, atol=1e-9)
    assert value == pytest.approx(float(_increase(move(gradients), relaxed)))


def _increase_over_constant(params, relaxed):
    """The validation loss alone: what the exact choice would lose is no part of the slope."""
    return SPACE.loss(params, _batches()[1], relaxed, KEY)


def test_the_unrolled_slope_by_an_explicit_hessian():
    """DARTS' equation 7 written out: ∂p L_val(θ', p) - ξ (∂p ∂θ L_train) ∇L_val(θ')."""
    rate, params, relaxed = 0.1, _params(), _relaxed()
    gradients = jax.grad(_train_loss)(params, relaxed)
    next_params = {"w": params["w"] - rate * gradients["w"]}
    mixed = jax.jacobian(jax.grad(_train_loss), argnums=1)(params, relaxed)["w"]  # V arrays [WIDTH, S_v]
    params_slope = jax.grad(_increase)(next_params, relaxed)["w"]
    direct = jax.grad(_increase, argnums=1)(next_params, relaxed)
    expected = [d - rate * params_slope @ m for d, m in zip(direct, mixed, strict=True)]
    move = functools.partial(_move, optax.sgd(rate), params, optax.sgd(rate).init(params))
    _, slopes = unrolled_increase(_increase, _train_loss, move, params, relaxed, gradients)
    for slope, other, d in zip(slopes, expected, direct, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-7)
        assert np.abs(np.asarray(other) - np.asarray(d)).max() > 1e-4  # there is something to unroll


def test_a_gradient_of_zero_has_no_derivative_through_adam_and_does_not_spoil_the_rest():
    def train_loss(params, relaxed):
        return _train_loss({"w": params["w"]}, relaxed) + 0.0 * params["unused"]

    def increase(params, relaxed):
        return _increase(params, relaxed) + params["unused"]

    params = {**_params(), "unused": jnp.zeros(())}
    optimizer = optax.adam(0.1)
    move = functools.partial(_move, optimizer, params, optimizer.init(params))
    gradients = jax.grad(train_loss)(params, _relaxed())
    _, slopes = unrolled_increase(increase, train_loss, move, params, _relaxed(), gradients)
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_names_and_functions_become_estimators():
    assert resolve("mixture").selection is not None
    increase = curvature().increase
    assert resolve(increase) == Estimator(increase)
    assert resolve(drawn := sampled(0.5)) is drawn
    with pytest.raises(ValueError, match="`estimator` must be one of curvature, mixture, sampled"):
        resolve("darts")
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        sampled(0.0)


def test_the_space_is_what_it_says():
    """Errors add half their square where the residual is 0 (the signs have mean square 1 and mean product 0)."""
    inputs, _ = _batches()[0]
    fitted = (inputs, inputs @ start()["w"])
    assert SPACE.loss(start(), fitted, (2, 1), KEY, 0) == pytest.approx(0.7**2 / 2 + 0.5**2 / 2)
