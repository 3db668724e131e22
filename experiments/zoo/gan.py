"""Two nnx models that train against each other, with batch norm and transposed convolutions, in one step."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.zoo.base import TrainingStep

NOISE = 32


class Generator(nnx.Module):
    """Images of 16 by 16 pixels from noise."""

    def __init__(self, rngs: nnx.Rngs):
        self.start = nnx.Linear(NOISE, 4 * 4 * 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.up = nnx.ConvTranspose(64, 32, (4, 4), strides=(2, 2), rngs=rngs)
        self.second_norm = nnx.BatchNorm(32, rngs=rngs)
        self.out = nnx.ConvTranspose(32, 1, (4, 4), strides=(2, 2), rngs=rngs)

    def __call__(self, noise: jax.Array) -> jax.Array:
        """Returns images `[batch, 16, 16, 1]`."""
        x = nnx.relu(self.norm(self.start(noise).reshape(-1, 4, 4, 64)))
        return jnp.tanh(self.out(nnx.relu(self.second_norm(self.up(x)))))


class Critic(nnx.Module):
    """How real images look."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 32, (4, 4), strides=(2, 2), rngs=rngs)
        self.second = nnx.Conv(32, 64, (4, 4), strides=(2, 2), rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 64, 1, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits `[batch]`."""
        x = nnx.leaky_relu(self.first(images), 0.2)
        x = self.dropout(nnx.leaky_relu(self.second(x), 0.2))
        return self.out(x.reshape(x.shape[0], -1))[:, 0]


def make() -> TrainingStep:
    """Makes both models, on random images."""

    def train_step(generator, critic, optimizers, rngs, images):
        noise = rngs.noise.normal((images.shape[0], NOISE))
        fakes = generator(noise)

        def critic_loss(critic):
            return jnp.mean(nnx.softplus(-critic(images))) + jnp.mean(nnx.softplus(critic(fakes)))

        def generator_loss(generator, critic):
            return jnp.mean(nnx.softplus(-critic(generator(noise))))

        loss, gradients = nnx.value_and_grad(critic_loss)(critic)
        optimizers["critic"].update(critic, gradients)
        other, gradients = nnx.value_and_grad(generator_loss)(generator, critic)
        optimizers["generator"].update(generator, gradients)
        return loss + other

    generator, critic = Generator(nnx.Rngs(0)), Critic(nnx.Rngs(1, dropout=2))
    optimizers = nnx.Dict(
        critic=nnx.Optimizer(critic, optax.adam(2e-4, b1=0.5, eps=1e-6), wrt=nnx.Param),
        generator=nnx.Optimizer(generator, optax.adam(2e-4, b1=0.5, eps=1e-6), wrt=nnx.Param),
    )
    images = jnp.tanh(jax.random.normal(jax.random.key(3), (32, 16, 16, 1)))
    return TrainingStep(train_step, (generator, critic, optimizers, nnx.Rngs(noise=4)), (images,), jit=nnx.jit)
