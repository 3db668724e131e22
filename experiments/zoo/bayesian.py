"""Variational inference of numpyro: a hierarchical regression, whose guide and samples are made by handlers."""

import jax
import jax.numpy as jnp
import numpyro  # pyright: ignore[reportMissingImports]
import numpyro.distributions as dist  # pyright: ignore[reportMissingImports]
from numpyro.infer import SVI, TraceMeanField_ELBO  # pyright: ignore[reportMissingImports]
from numpyro.infer.autoguide import AutoNormal  # pyright: ignore[reportMissingImports]

from experiments.zoo.base import TrainingStep

GROUPS, FEATURES, ROWS = 64, 64, 1024


def make() -> TrainingStep:
    """Makes one update of the evidence bound, on random data of 64 groups."""

    def model(x, group, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        mean = numpyro.sample("mean", dist.Normal(jnp.zeros(FEATURES), 1.0).to_event(1))
        with numpyro.plate("groups", GROUPS):
            weights = numpyro.sample("weights", dist.Normal(mean, scale).to_event(1))
        noise = numpyro.sample("noise", dist.Gamma(2.0, 2.0))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.StudentT(4.0, jnp.sum(x * weights[group], axis=-1), noise), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), TraceMeanField_ELBO(num_particles=2))

    def train_step(state, x, group, y):
        return svi.update(state, x, group, y)

    x_key, group_key, y_key, key = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(x_key, (ROWS, FEATURES))
    group = jax.random.randint(group_key, (ROWS,), 0, GROUPS)
    y = jax.random.normal(y_key, (ROWS,))
    return TrainingStep(train_step, (svi.init(key, x, group, y),), (x, group, y))
