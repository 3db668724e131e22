"""The predicted increase against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffshard.bilevel_search.base import TrainingProgress
from diffshard.bilevel_search.search import curvature
from tests.diffshard.bilevel_search.perturbed import Perturbed, batch_of, start

SPACE = Perturbed([[0.0, 0.3, -0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]])
KEY = jax.random.key(0)
PROGRESS = TrainingProgress(jnp.int32(0), None)
RELAXED = [jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.4])]


def test_curvature_is_the_mean_predicted_increase():
    value, slopes = jax.value_and_grad(curvature, argnums=3)(SPACE, start(), batch_of(1), RELAXED, KEY, PROGRESS)
    expected = sum(float(np.asarray(row) @ (errors**2 / 2)) for row, errors in zip(RELAXED, SPACE.errors, strict=True))
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(slopes[0], [0.0, 0.045, 0.245], rtol=1e-6)


def test_the_space_is_what_it_says():
    """Errors add half their square where the residual is 0 (the signs have mean square 1 and mean product 0)."""
    inputs, _ = batch_of(0)
    fitted = (inputs, inputs @ start()["w"])
    assert SPACE.loss(start(), fitted, (2, 1), KEY, 0) == pytest.approx(0.7**2 / 2 + 0.5**2 / 2, rel=1e-5)
