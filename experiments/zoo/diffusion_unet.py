"""A conditional U-Net of diffusers that predicts noise, with an exponential moving average of its weights."""

import jax
import jax.numpy as jnp
import optax
from diffusers import FlaxDDPMScheduler, FlaxUNet2DConditionModel  # pyright: ignore[reportMissingImports]

from experiments.zoo.base import TrainingStep


def make() -> TrainingStep:
    """Makes a U-Net of two resolutions with cross attention to a text's embeddings, on random latents."""
    unet = FlaxUNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=64,
    )
    scheduler = FlaxDDPMScheduler(num_train_timesteps=100, beta_schedule="scaled_linear")
    noise_schedule = scheduler.create_state()
    # Biases before a norm of one channel a group have no gradient but rounding, which a smaller eps would make a step.
    optimizer = optax.adamw(1e-4, eps=1e-6, weight_decay=1e-2)

    def train_step(params, opt_state, average, key, batch):
        key, noise_key, time_key = jax.random.split(key, 3)
        latents = batch["latents"]
        noise = jax.random.normal(noise_key, latents.shape)
        times = jax.random.randint(time_key, (latents.shape[0],), 0, 100)
        noisy = scheduler.add_noise(noise_schedule, latents, noise, times)

        def loss_fn(params):
            predicted = unet.apply({"params": params}, noisy, times, batch["text"], train=True).sample
            return jnp.mean((predicted - noise) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, optax.incremental_update(params, average, step_size=0.01), key, loss

    params = unet.init_weights(jax.random.PRNGKey(0))
    latent_key, text_key = jax.random.split(jax.random.key(1))
    batch = {
        "latents": jax.random.normal(latent_key, (8, 4, 16, 16)),
        "text": jax.random.normal(text_key, (8, 16, 64)),
    }
    average = jax.tree.map(jnp.copy, params)
    return TrainingStep(train_step, (params, optimizer.init(params), average, jax.random.key(2)), (batch,))
