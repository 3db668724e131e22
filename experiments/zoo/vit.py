"""A vision transformer of transformers (FlaxViT): gradients are accumulated over two calls, in optax.MultiSteps."""

import jax
import optax
from transformers import FlaxViTForImageClassification, ViTConfig  # pyright: ignore[reportMissingImports]

from experiments.zoo.base import TrainingStep


def make() -> TrainingStep:
    """Makes a ViT of two layers for 32 classes, on random images; every second call updates the weights."""
    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=32,
        patch_size=8,
        num_labels=32,
    )
    model = FlaxViTForImageClassification(config, seed=0)
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2)

    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits = model(batch["pixels"], params=params, train=True, dropout_rng=jax.random.key(0)).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    pixel_key, label_key = jax.random.split(jax.random.key(1))
    batch = {
        "pixels": jax.random.normal(pixel_key, (32, 3, 32, 32)),
        "labels": jax.random.randint(label_key, (32,), 0, 32),
    }
    return TrainingStep(train_step, (model.params, optimizer.init(model.params)), (batch,))
