"""A Fourier neural operator of linen modules: FFTs over space, complex weights for the low frequencies."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.zoo.base import TrainingStep

POINTS, WIDTH, FREQUENCIES = 64, 64, 16


def complex_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws complex weights."""
    return jax.random.normal(key, shape, jnp.complex64) / shape[0]


class Spectral(nn.Module):
    """Mixes the channels of each low frequency, and those of each point."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, points, width]` to the same shape."""
        weights = self.param("weights", complex_normal, (WIDTH, WIDTH, FREQUENCIES))
        low = jnp.fft.rfft(x, axis=1)[:, :FREQUENCIES]
        mixed = jnp.zeros((x.shape[0], POINTS // 2 + 1, WIDTH), jnp.complex64)
        mixed = mixed.at[:, :FREQUENCIES].set(jnp.einsum("bfi,iof->bfo", low, weights))
        return nn.gelu(jnp.fft.irfft(mixed, n=POINTS, axis=1) + nn.Dense(WIDTH)(x))


class Operator(nn.Module):
    """Lifts a function of one dimension, mixes it and projects it back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps functions `[batch, points, 1]` to functions of the same shape."""
        grid = jnp.broadcast_to(jnp.linspace(0, 1, POINTS)[None, :, None], x.shape)
        x = nn.Dense(WIDTH)(jnp.concatenate([x, grid], axis=-1))
        for _ in range(2):
            x = Spectral()(x)
        return nn.Dense(1)(nn.gelu(nn.Dense(128)(x)))


def make() -> TrainingStep:
    """Makes an operator of two layers, on random smooth functions."""
    model = Operator()

    def train_step(state, batch):
        def loss_fn(params):
            predicted: Any = state.apply_fn(params, batch["from"])
            error = jnp.sqrt(jnp.sum((predicted - batch["to"]) ** 2, axis=(1, 2)))
            return jnp.mean(error / jnp.sqrt(jnp.sum(batch["to"] ** 2, axis=(1, 2))))

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        gradients = jax.tree.map(jnp.conj, gradients)
        return state.apply_gradients(grads=gradients), loss

    functions = jnp.cumsum(jax.random.normal(jax.random.key(0), (2, 64, POINTS, 1)), axis=2)
    params = model.init(jax.random.key(1), functions[0])
    optimizer = optax.contrib.split_real_and_imaginary(optax.adamw(1e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    return TrainingStep(train_step, (state,), ({"from": functions[0], "to": functions[1]},))
