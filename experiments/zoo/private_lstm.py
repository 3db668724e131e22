"""Haiku's LSTM trained with differential privacy: one gradient for each example, clipped and blurred (DP-SGD)."""

import haiku as hk  # pyright: ignore[reportMissingImports]
import jax
import optax

from experiments.zoo.base import TrainingStep

VOCABULARY, WIDTH = 128, 64


def make() -> TrainingStep:
    """Makes a language model of one recurrent layer, on random tokens."""

    def network(tokens):
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        core = hk.LSTM(WIDTH)
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        return hk.Linear(VOCABULARY)(x)

    net = hk.without_apply_rng(hk.transform(network))
    optimizer = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.3, seed=0)

    def train_step(params, opt_state, tokens):
        def loss_fn(params, tokens):
            logits = net.apply(params, tokens[:-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

        losses, gradients = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    tokens = jax.random.randint(jax.random.key(1), (32, 17), 0, VOCABULARY)
    params = net.init(jax.random.PRNGKey(0), tokens[0])
    return TrainingStep(train_step, (params, optimizer.init(params)), (tokens,))
