"""Low-rank adapters of nnx (`nnx.LoRA`) beside frozen layers: only the adapters are trained."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.zoo.base import TrainingStep

WIDTH, RANK, CLASSES = 128, 8, 16


class Adapted(nnx.Module):
    """Frozen layers with adapters beside them."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.LoRALinear(WIDTH, CLASSES, lora_rank=RANK, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits `[batch, classes]`."""
        for layer in self.layers:
            x = x + nnx.gelu(layer(self.norm(x)))
        return self.head(x)


def make() -> TrainingStep:
    """Makes a residual network of four layers, on random features."""

    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return loss

    model = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    x_key, label_key = jax.random.split(jax.random.key(1))
    batch = {
        "x": jax.random.normal(x_key, (256, WIDTH)),
        "label": jax.random.randint(label_key, (256,), 0, CLASSES).astype(jnp.int32),
    }
    return TrainingStep(train_step, (model, optimizer), (batch,), jit=nnx.jit)
