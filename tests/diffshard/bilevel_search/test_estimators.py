"""Values against the definitions, slopes against finite differences, autodiff and an explicit Hessian."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffshard.bilevel_search import estimators
from diffshard.bilevel_search.space import softmax_rows
from tests.diffshard.bilevel_search.perturbed import Perturbed, batch_of, start

SPACE = Perturbed([[0.0, 0.3, -0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]])
KEY = jax.random.key(0)
MOMENT = estimators.Moment(jnp.int32(0), None)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _logits() -> list[jax.Array]:
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.normal(size=len(errors))) for errors in SPACE.errors]


def _rows() -> list[jax.Array]:
    return softmax_rows(SPACE.problem, _logits())


def _params() -> dict[str, jax.Array]:
    return {"w": jnp.array([0.5, -1.0, 2.0])}


def _batches():
    return [jax.tree.map(jnp.asarray, batch_of(seed)) for seed in (0, 1)]


def _train_loss(params, rows):
    return SPACE.mixed_loss(params, _batches()[0], rows, KEY)


def _increase(params, rows):
    return estimators.mixture().increase(SPACE, params, _batches()[1], rows, KEY, MOMENT)


def _move(optimizer: optax.GradientTransformation, params, opt_state, gradients):
    return optax.apply_updates(params, optimizer.update(gradients, opt_state, params)[0])


def test_mixture_is_the_increase_of_the_mixed_loss_and_its_slope_that_of_finite_differences():
    params, rows = _params(), _rows()
    exact = SPACE.loss(params, _batches()[1], (0, 0), KEY, 0)
    mixed = SPACE.mixed_loss(params, _batches()[1], rows, KEY)
    assert _increase(params, rows) == pytest.approx(float(mixed - exact))
    slopes = jax.grad(_increase, argnums=1)(params, rows)
    for v, row in enumerate(rows):
        for s in range(row.size):
            sides = [
                _increase(params, [r.at[s].add(h) if i == v else r for i, r in enumerate(rows)]) for h in (1e-5, -1e-5)
            ]
            assert slopes[v][s] == pytest.approx(float(sides[0] - sides[1]) / 2e-5, abs=1e-8)


def test_curvature_is_the_mean_damage():
    rows = _rows()
    value, slopes = jax.value_and_grad(estimators.curvature().increase, argnums=3)(
        SPACE, _params(), _batches()[1], rows, KEY, MOMENT
    )
    expected = sum(float(np.asarray(row) @ (errors**2 / 2)) for row, errors in zip(rows, SPACE.errors, strict=True))
    assert value == pytest.approx(expected)
    np.testing.assert_allclose(slopes[0], [0.0, 0.045, 0.245])


def test_sampled_runs_one_strategy_of_each_node_as_often_as_it_weighs():
    sampled = estimators.sampled()
    assert sampled.weights is not None
    weights = sampled.weights
    drawn = jax.vmap(lambda key: weights(_rows(), key))(jax.random.split(KEY, 4000))
    assert sampled.running is not None
    assert sampled.running(_rows(), KEY) == [row.argmax() for row in weights(_rows(), KEY)]
    for rows, row in zip(drawn, _rows(), strict=True):
        np.testing.assert_allclose(np.asarray(rows).max(axis=1), 1.0)
        np.testing.assert_allclose(np.abs(np.asarray(rows)).sum(axis=1), 1.0, atol=1e-12)
        np.testing.assert_allclose(np.asarray(rows).mean(axis=0), row, atol=0.03)


def test_sampled_slopes_are_those_of_the_softened_draw():
    """With a linear function of the row the straight-through slope is that of softmax(log p + gumbel)."""
    row, weights = _rows()[0], jnp.array([1.0, -2.0, 0.5])
    drawn = estimators.sampled(temperature=0.7).weights
    assert drawn is not None
    slope = jax.grad(lambda r: drawn([r], KEY)[0] @ weights)(row)
    noise = jax.random.gumbel(jax.random.split(KEY, 1)[0], (3,))
    soft = jax.grad(lambda r: jax.nn.softmax((jnp.log(r) + noise) / 0.7) @ weights)(row)
    np.testing.assert_allclose(slope, soft, rtol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_unrolled_slope_is_that_of_the_loss_after_the_step(name: str):
    optimizer = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.1)}[name]
    params, rows = _params(), _rows()
    opt_state = optimizer.update(jax.grad(_train_loss)({"w": jnp.ones(3)}, rows), optimizer.init(params), params)[1]
    move = functools.partial(_move, optimizer, params, opt_state)
    gradients = jax.grad(_train_loss)(params, rows)
    value, slopes = estimators.unrolled(_increase, _train_loss, move, params, rows, gradients)

    def after(rows):
        return _increase_over_constant(move(jax.grad(_train_loss)(params, rows)), rows)

    expected = jax.grad(after)(rows)
    for slope, other in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-6, atol=1e-9)
    assert value == pytest.approx(float(_increase(move(gradients), rows)))


def _increase_over_constant(params, rows):
    """The validation loss alone: what the exact choice would lose is no part of the slope."""
    return SPACE.mixed_loss(params, _batches()[1], rows, KEY)


def test_the_unrolled_slope_by_an_explicit_hessian():
    """DARTS' equation 7 written out: ∂p L_val(θ', p) - ξ (∂p ∂θ L_train) ∇L_val(θ')."""
    rate, params, rows = 0.1, _params(), _rows()
    gradients = jax.grad(_train_loss)(params, rows)
    ahead = {"w": params["w"] - rate * gradients["w"]}
    mixed = jax.jacobian(jax.grad(_train_loss), argnums=1)(params, rows)["w"]  # V arrays [WIDTH, S_v]
    toward = jax.grad(_increase)(ahead, rows)["w"]
    direct = jax.grad(_increase, argnums=1)(ahead, rows)
    expected = [d - rate * toward @ m for d, m in zip(direct, mixed, strict=True)]
    move = functools.partial(_move, optax.sgd(rate), params, optax.sgd(rate).init(params))
    _, slopes = estimators.unrolled(_increase, _train_loss, move, params, rows, gradients)
    for slope, other, d in zip(slopes, expected, direct, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-7)
        assert np.abs(np.asarray(other) - np.asarray(d)).max() > 1e-4  # there is something to unroll


def test_a_gradient_of_zero_has_no_derivative_through_adam_and_does_not_spoil_the_rest():
    def train_loss(params, rows):
        return _train_loss({"w": params["w"]}, rows) + 0.0 * params["unused"]

    def increase(params, rows):
        return _increase(params, rows) + params["unused"]

    params = {**_params(), "unused": jnp.zeros(())}
    optimizer = optax.adam(0.1)
    move = functools.partial(_move, optimizer, params, optimizer.init(params))
    gradients = jax.grad(train_loss)(params, _rows())
    _, slopes = estimators.unrolled(increase, train_loss, move, params, _rows(), gradients)
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_names_and_functions_become_estimators():
    assert estimators.resolve("mixture").running is not None
    increase = estimators.curvature().increase
    assert estimators.resolve(increase) == estimators.Estimator(increase)
    assert estimators.resolve(estimators.sampled(0.5)).needs == "mixed_loss"
    with pytest.raises(ValueError, match="`estimator` must be one of curvature, mixture, sampled"):
        estimators.resolve("darts")
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        estimators.sampled(0.0)


def test_the_space_is_what_it_says():
    """Errors add half their square where the residual is 0 (the signs have mean square 1 and mean product 0)."""
    inputs, _ = _batches()[0]
    fitted = (inputs, inputs @ start()["w"])
    assert SPACE.loss(start(), fitted, (2, 1), KEY, 0) == pytest.approx(0.7**2 / 2 + 0.5**2 / 2)
