"""Proximal policy optimisation on gymnax's CartPole: one call collects a rollout and trains on it, all in scans."""

from typing import Any, NamedTuple

import gymnax  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.zoo.base import TrainingStep

ENVIRONMENTS, TIMES, EPOCHS, MINIBATCHES = 64, 16, 2, 4
DISCOUNT, LAMBDA, CLIP = 0.99, 0.95, 0.2


class ActorCritic(nn.Module):
    """Two networks: the logits of actions and the value of a state."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[..., actions]` and values `[...]` for observations `[..., features]`."""

        def network(name: str, size: int, scale: float) -> jax.Array:
            y = nn.tanh(nn.Dense(128, kernel_init=nn.initializers.orthogonal(2**0.5), name=f"{name}_0")(x))
            y = nn.tanh(nn.Dense(128, kernel_init=nn.initializers.orthogonal(2**0.5), name=f"{name}_1")(y))
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale), name=f"{name}_2")(y)

        return network("actor", self.num_actions, 0.01), network("critic", 1, 1.0)[..., 0]


class Transition(NamedTuple):
    """The events of one time in each environment."""

    observation: Any
    action: Any
    log_probability: Any
    value: Any
    reward: Any
    done: Any


def make() -> TrainingStep:
    """Makes one round of PPO: 16 times in 64 environments, two epochs of four minibatches."""
    environment, environment_params = gymnax.make("CartPole-v1")
    model = ActorCritic(environment.action_space(environment_params).n)

    def collect(train_state, environments, observations, key):
        def step(carry, key):
            environments, observations = carry
            action_key, step_key = jax.random.split(key)
            logits, values = train_state.apply_fn(train_state.params, observations)
            actions = jax.random.categorical(action_key, logits)
            keys = jax.random.split(step_key, ENVIRONMENTS)
            new_observations, environments, rewards, ended, cut, _ = jax.vmap(environment.step, (0, 0, 0, None))(
                keys, environments, actions, environment_params
            )
            log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], axis=1)[:, 0]
            transition = Transition(observations, actions, log_probabilities, values, rewards, ended | cut)
            return (environments, new_observations), transition

        return jax.lax.scan(step, (environments, observations), jax.random.split(key, TIMES))

    def advantages_of(rollout, last_value):
        def step(carry, transition):
            advantage, next_value = carry
            going_on = 1.0 - transition.done
            surprise = transition.reward + DISCOUNT * next_value * going_on - transition.value
            advantage = surprise + DISCOUNT * LAMBDA * going_on * advantage
            return (advantage, transition.value), advantage

        start = (jnp.zeros_like(last_value), last_value)
        return jax.lax.scan(step, start, rollout, reverse=True)[1]

    def loss_fn(params, batch):
        rollout, advantages, targets = batch
        logits, values = model.apply(params, rollout.observation)
        log_probabilities = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_probabilities, rollout.action[:, None], axis=1)[:, 0]
        ratio = jnp.exp(taken - rollout.log_probability)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
        entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=1).mean()
        return 0.5 * jnp.mean((values - targets) ** 2) - gain - 0.01 * entropy

    def train_step(train_state, environments, observations, key):
        key, rollout_key, epoch_key = jax.random.split(key, 3)
        (environments, observations), rollout = collect(train_state, environments, observations, rollout_key)
        advantages = advantages_of(rollout, train_state.apply_fn(train_state.params, observations)[1])
        data = (rollout, advantages, advantages + rollout.value)
        flat = jax.tree.map(lambda x: x.reshape(TIMES * ENVIRONMENTS, *x.shape[2:]), data)

        def minibatch(train_state, batch):
            loss, gradients = jax.value_and_grad(loss_fn)(train_state.params, batch)
            return train_state.apply_gradients(grads=gradients), loss

        def epoch(train_state, key):
            order = jax.random.permutation(key, TIMES * ENVIRONMENTS)
            batches = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), flat)
            return jax.lax.scan(minibatch, train_state, batches)

        train_state, losses = jax.lax.scan(epoch, train_state, jax.random.split(epoch_key, EPOCHS))
        return train_state, environments, observations, key, losses.mean()

    params_key, reset_key, key = jax.random.split(jax.random.key(0), 3)
    observations, environments = jax.vmap(environment.reset, (0, None))(
        jax.random.split(reset_key, ENVIRONMENTS), environment_params
    )
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    train_state = TrainState.create(apply_fn=model.apply, params=model.init(params_key, observations), tx=optimizer)
    return TrainingStep(train_step, (train_state, environments, observations, key))
