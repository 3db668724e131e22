"""Step sizes against optimisers whose answer to an impulse is known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffshard.bilevel_search.model import step_sizes

KEY = jax.random.key(0)
PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([[3.0]])}
GRADIENTS = {"a": jnp.array([0.1, -4.0, 0.0]), "b": jnp.array([[2.0]])}


def _after(optimizer: optax.GradientTransformation, num_steps: int):
    state = optimizer.init(PARAMS)
    for step in range(num_steps):
        noise = 0.3 * (-1) ** step
        noisy = {name: leaf + noise * jnp.abs(leaf) for name, leaf in GRADIENTS.items()}
        _, state = optimizer.update(noisy, state, PARAMS)
    return state


def _sizes(optimizer: optax.GradientTransformation, num_steps: int = 0):
    return step_sizes(optimizer, _after(optimizer, num_steps), PARAMS, GRADIENTS, KEY)


def test_gradient_descent_moves_by_its_rate_and_momentum_by_more():
    for leaf in jax.tree.leaves(_sizes(optax.sgd(0.1))):
        np.testing.assert_allclose(leaf, 0.1, rtol=1e-6)
    for leaf in jax.tree.leaves(_sizes(optax.sgd(0.1, momentum=0.5))):
        np.testing.assert_allclose(leaf, 0.1 * (2 - 0.5**7), rtol=1e-6)


def test_a_schedule_is_followed():
    rate = optax.linear_schedule(0.2, 0.1, 10)
    np.testing.assert_allclose(_sizes(optax.sgd(rate), 3)["a"], 0.17, rtol=1e-6)


def test_adam_moves_by_its_rate_over_the_root_mean_square():
    """As far as eight steps show its momentum; where a gradient was always 0 there is no answer, and none is given."""
    sizes = _sizes(optax.adam(0.1), 2000)
    for name, rms in (("a", np.abs(GRADIENTS["a"][:2])), ("b", np.abs(GRADIENTS["b"]))):
        expected = 0.1 * (1 - 0.9**8) / (rms * 1.09**0.5)
        np.testing.assert_allclose(sizes[name].ravel()[: rms.size], expected.ravel(), rtol=0.02)
    assert sizes["a"][2] == 0


@pytest.mark.parametrize(("optimizer", "num_steps"), [(optax.lion(0.1, weight_decay=0.0), 50), (optax.adam(0.1), 0)])
def test_a_sign_has_the_size_of_its_steps(optimizer: optax.GradientTransformation, num_steps: int):
    """Weights decay in neither, and gradients that are 0 throughout move nothing."""
    state = optimizer.init(PARAMS)
    for _ in range(num_steps):
        _, state = optimizer.update(GRADIENTS, state, PARAMS)
    found = step_sizes(optimizer, state, PARAMS, {**GRADIENTS, "b": jnp.zeros((1, 1))}, KEY)
    moves = 0.1 * np.sqrt(2 / 3)  # two of three elements have a gradient
    np.testing.assert_allclose(found["a"], moves / np.sqrt(np.square(GRADIENTS["a"]).mean()), rtol=1e-3)
    if not num_steps:
        np.testing.assert_array_equal(found["b"], 0.0)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (jnp.float16, optax.adamw(0.1)),
        (jnp.bfloat16, optax.adamw(0.1, mu_dtype=jnp.float32)),
        (jnp.float16, optax.lion(0.1)),
        (jnp.float32, optax.lamb(0.1)),
    ],
)
def test_small_gradients_in_narrow_types_have_sizes(dtype: Any, optimizer: optax.GradientTransformation):
    """Their squares are 0 in float16; in its first step lamb answers to almost no gradient."""
    params = jnp.ones((4, 3), dtype)
    gradients = 1e-4 * jax.random.normal(KEY, (4, 3)).astype(dtype)
    found = step_sizes(optimizer, optimizer.init(params), params, gradients, KEY)
    assert found.dtype == jnp.float32
    assert (np.asarray(found) > 1.0).mean() > 0.5  # a step of about 0.1 for gradients of about 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_a_clipped_norm_is_estimated_by_its_diagonal(seed: int):
    """The derivative is not diagonal there: the mean over signs is its diagonal."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    gradients = {"a": jax.random.normal(jax.random.key(seed), (4,)) * 3}
    state = optimizer.init(gradients)
    keys = jax.random.split(KEY, 2000)
    found = jax.vmap(lambda key: step_sizes(optimizer, state, gradients, gradients, key)["a"])(keys).mean(axis=0)

    def update(gradient: jax.Array) -> Any:
        updates: Any = optimizer.update({"a": gradient}, state, gradients)[0]
        return updates["a"]

    exact = -jnp.diag(jax.jacobian(update)(gradients["a"]))
    np.testing.assert_allclose(found, exact, atol=0.02 * 0.1 + 0.1 * float(exact.max()))
