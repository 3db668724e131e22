"""A convolutional network of keras, by its stateless functions: depthwise convolutions, batch norm, dropout seeds."""

import os

import jax

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras  # pyright: ignore[reportMissingImports]

from experiments.zoo.base import TrainingStep


def make() -> TrainingStep:
    """Makes a small Xception for 16 classes with keras's own optimiser, on random images."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(inputs)
    for width in (64, 128):
        x = keras.layers.SeparableConv2D(width, 3, padding="same", use_bias=False)(x)
        x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Dropout(0.2, seed=1)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, keras.layers.Dense(16)(x))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-3, epsilon=1e-6)
    optimizer.build(model.trainable_variables)

    def train_step(trained, others, opt_state, images, labels):
        def loss_fn(trained):
            logits, new = model.stateless_call(trained, others, images, training=True)
            return loss_of(labels, logits), new

        (loss, others), gradients = jax.value_and_grad(loss_fn, has_aux=True)(trained)
        trained, opt_state = optimizer.stateless_apply(opt_state, gradients, trained)
        return trained, others, opt_state, loss

    image_key, label_key = jax.random.split(jax.random.key(1))
    state = [
        [variable.value for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    images = jax.random.normal(image_key, (32, 32, 32, 3))
    return TrainingStep(train_step, tuple(state), (images, jax.random.randint(label_key, (32,), 0, 16)))
