"""An encoder-decoder of transformers (FlaxT5): dropout by a random key that the state carries, adafactor."""

import types

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxT5ForConditionalGeneration, T5Config  # pyright: ignore[reportMissingImports]
from transformers.models.t5 import modeling_flax_t5  # pyright: ignore[reportMissingImports]

from experiments.zoo.base import TrainingStep

# The last releases of transformers with Flax models call `jnp.clip(x, a_max=...)`, a name that JAX has dropped.
modeling_flax_t5.jnp = types.SimpleNamespace(**vars(jnp) | {"clip": lambda x, a_max: jnp.clip(x, max=a_max)})


def make() -> TrainingStep:
    """Makes a T5 of two layers on each side, on random tokens."""
    config = T5Config(
        vocab_size=512,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    model = FlaxT5ForConditionalGeneration(config, seed=0, input_shape=(1, 16))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3, min_dim_size_to_factor=64))

    def train_step(params, opt_state, key, batch):
        dropout_key, key = jax.random.split(key)

        def loss_fn(params):
            logits = model(
                input_ids=batch["source"],
                attention_mask=batch["mask"],
                decoder_input_ids=batch["target"],
                params=params,
                dropout_rng=dropout_key,
                train=True,
            ).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["target"][:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    source_key, target_key = jax.random.split(jax.random.key(1))
    source = jax.random.randint(source_key, (16, 32), 1, 512)
    batch = {
        "source": source,
        "mask": jnp.broadcast_to(jnp.arange(32) < 28, source.shape).astype(jnp.int32),
        "target": jax.random.randint(target_key, (16, 24), 1, 512),
    }
    return TrainingStep(train_step, (model.params, optimizer.init(model.params), jax.random.key(2)), (batch,))
