"""Haiku's ResNet in half precision by jmp: batch norm's state, and a loss scale that skips updates which overflow."""

import haiku as hk  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import jmp  # pyright: ignore[reportMissingImports]
import optax

from experiments.zoo.base import TrainingStep


def make() -> TrainingStep:
    """Makes a narrow ResNet for 16 classes, on random images of 32 by 32 pixels."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def forward(images, is_training):
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=16,
            bottleneck=False,
            channels_per_group=(32, 32, 64, 64),
            use_projection=(False, False, True, True),
            strides=(1, 1, 2, 2),
            initial_conv_config={"output_channels": 32, "kernel_shape": 3, "stride": 1},
        )
        return net(policy.cast_to_compute(images), is_training).astype(jnp.float32)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)

    def train_step(params, opt_state, statistics, loss_scale, batch):
        def loss_fn(params):
            logits, new_statistics = net.apply(policy.cast_to_compute(params), statistics, batch["images"], True)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
            return loss_scale.scale(loss), (loss, new_statistics)

        gradients, (loss, new_statistics) = jax.grad(loss_fn, has_aux=True)(params)
        gradients = loss_scale.unscale(policy.cast_to_param(gradients))
        finite = jmp.all_finite(gradients)
        updates, new_opt_state = optimizer.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_statistics
        params, opt_state, statistics = jmp.select_tree(finite, new, (params, opt_state, statistics))
        return params, opt_state, statistics, loss_scale.adjust(finite), loss

    image_key, label_key = jax.random.split(jax.random.key(1))
    batch = {
        "images": jax.random.normal(image_key, (32, 32, 32, 3)),
        "labels": jax.random.randint(label_key, (32,), 0, 16),
    }
    params, statistics = policy.cast_to_param(net.init(jax.random.PRNGKey(0), batch["images"], True))
    # A scale at which the first steps overflow, so that updates are skipped and the scale is halved.
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**20), period=2)
    return TrainingStep(
        train_step, (params, optimizer.init(params), statistics, loss_scale), (batch,), rounding=2.0**-11
    )
