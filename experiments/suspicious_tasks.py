"""Tasks and faults for `experiments.suspicious_gradients`: models on real data, and what may happen to gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.models import digits, text
from experiments.models.gpt import GPT, Sizes, next_token_loss

_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class Task:
    """A model with data.

    Attributes:
      init: parameters of a key.
      loss: `loss(params, batch)`, the mean over a batch.
      draw: `draw(key, count)`, a random batch of training data.
      held_out: data that is never drawn.
      poison: what bad data makes of a batch.
      optimizer: optax's.
      step_size: of Zeno's score.
      per_replica: examples of a replica at a step; a check batch has as many.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    draw: Callable[[jax.Array, int], Any]
    held_out: Any
    poison: Callable[[Any], Any]
    optimizer: optax.GradientTransformation
    step_size: float
    per_replica: int


def gpt(sequence: int = 32, width: int = 32) -> Task:
    """Makes a byte GPT on the Python reference, trained by adamw; poisoned text is reversed."""
    tokens = text.load("python_reference")
    train, rest = np.split(tokens, [int(len(tokens) * (1 - _HELD_OUT_SHARE))])
    starts = np.linspace(0, len(rest) - sequence - 1, 128).astype(int)
    network = GPT(Sizes(layers=2, width=width, heads=2, vocabulary=text.VOCABULARY, sequence=sequence))
    return Task(
        init=lambda key: network.init(key, jnp.zeros((1, sequence), jnp.int32))["params"],
        loss=lambda params, batch: next_token_loss(
            jnp.asarray(network.apply({"params": params}, batch[:, :-1])), batch
        ),
        draw=lambda key, count: text.sample(train, key, count, sequence),
        held_out=jnp.asarray(rest[starts[:, None] + np.arange(sequence + 1)]),
        poison=lambda batch: batch[:, ::-1],
        optimizer=optax.adamw(3e-3),
        step_size=0.1,
        per_replica=8,
    )


def classifier(width: int = 64) -> Task:
    """Makes a classifier of handwritten digits, trained by plain gradient descent; poisoned labels are off by one."""
    pictures, labels, held_out = _digits()

    def loss(params: Any, batch: Any) -> jax.Array:
        pictures, labels = batch
        hidden = jax.nn.relu(pictures @ params["up"] + params["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["down"], labels).mean()

    return Task(
        init=lambda key: {
            "up": jax.random.normal(key, (pictures.shape[1], width)) / 8,
            "bias": jnp.zeros(width),
            "down": jnp.zeros((width, digits.CLASSES)),
        },
        loss=loss,
        draw=lambda key, count: _picked((pictures, labels), key, count),
        held_out=held_out,
        poison=lambda batch: (batch[0], (batch[1] + 1) % digits.CLASSES),
        optimizer=optax.sgd(0.1),
        step_size=0.1,
        per_replica=64,
    )


def autoencoder(width: int = 24) -> Task:
    """Makes an autoencoder of handwritten digits, trained with momentum; poisoned pictures are inverted."""
    pictures, _, held_out = _digits()
    size = pictures.shape[1]

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch @ params["up"] + params["up_bias"])
        return jnp.mean((hidden @ params["down"] + params["down_bias"] - batch) ** 2)

    def init(key: jax.Array) -> Any:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (size, width)) / 8, "up_bias": jnp.zeros(width),
            "down": jax.random.normal(down, (width, size)) / 5, "down_bias": jnp.zeros(size),
        }  # fmt: skip

    def poison(batch: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, batch.shape), 0, 1 - batch)

    return Task(
        init=init,
        loss=loss,
        draw=lambda key, count: _picked(pictures, key, count),
        held_out=held_out[0],
        poison=poison,
        optimizer=optax.sgd(0.3, momentum=0.9),
        step_size=0.3,
        per_replica=32,
    )


TASKS: Mapping[str, Callable[[], Task]] = {"gpt": gpt, "classifier": classifier, "autoencoder": autoencoder}
HELD_OUT_TASK = "autoencoder"

Fault = Callable[[jax.Array, jax.Array], jax.Array]
"""`fault(gradient, key)`: what arrives in place of a replica's gradient of one parameter."""


def _noise(gradient: jax.Array, key: jax.Array) -> jax.Array:
    """Returns noise that is ten times as large as the gradient."""
    return 10 * jnp.sqrt(jnp.mean(gradient**2)) * jax.random.normal(key, gradient.shape)


def _bit_flip(gradient: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the gradient with the highest bit of one number's exponent flipped, as a defective chip may do."""
    place = jax.random.randint(key, (), 0, gradient.size)
    bits = jax.lax.bitcast_convert_type(gradient.reshape(-1), jnp.uint32)
    flipped = bits.at[place].set(bits[place] ^ jnp.uint32(1 << 30))
    return jax.lax.bitcast_convert_type(flipped, jnp.float32).reshape(gradient.shape)


FAULTS: Mapping[str, Fault] = {
    "none": lambda gradient, key: gradient,
    "sign": lambda gradient, key: -gradient,
    "times -10": lambda gradient, key: -10 * gradient,
    "times 100": lambda gradient, key: 100 * gradient,
    "NaN": lambda gradient, key: jnp.full_like(gradient, jnp.nan),
    "noise": _noise,
    "bit flip": _bit_flip,
}
CHANGING, POISON = "changing", "poison"
"""Another replica and another of the faults at each step; bad data, which is held out."""
FAULT_NAMES = (*FAULTS, CHANGING, POISON)
HELD_OUT_FAULT = POISON


def with_faults(by_replica: Any, fault: jax.Array, num_faulty: jax.Array, key: jax.Array) -> Any:
    """Returns gradients `[N, ...]` as they arrive when some replicas are faulty: the first ones, or random ones.

    Args:
      by_replica: the right gradients.
      fault: the position of its name in `FAULT_NAMES`. Bad data leaves gradients as they are.
      num_faulty: the number of faulty replicas.
      key: a random key.
    """
    number = len(jax.tree.leaves(by_replica)[0])
    which_key, kind_key, fault_key = jax.random.split(key, 3)
    is_changing = fault == FAULT_NAMES.index(CHANGING)
    order = jnp.where(is_changing, jax.random.permutation(which_key, number), jnp.arange(number))
    kind = jnp.where(is_changing, jax.random.randint(kind_key, (), 1, len(FAULTS)), fault)
    kind = jnp.where(fault == FAULT_NAMES.index(POISON), 0, kind)
    arrays, treedef = jax.tree.flatten(by_replica)
    received = []
    for array, array_key in zip(arrays, jax.random.split(fault_key, len(arrays)), strict=True):
        keys = jax.random.split(array_key, number)
        wrong = jax.vmap(lambda g, k: jax.lax.switch(kind, list(FAULTS.values()), g, k))(array, keys)
        is_faulty = (order < num_faulty).reshape(-1, *[1] * (array.ndim - 1))
        received.append(jnp.where(is_faulty, wrong, array))
    return jax.tree.unflatten(treedef, received)


def _digits() -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns pictures `[examples, pixels]` and labels for training, and the held-out rest."""
    pictures, labels = digits.load()
    order = np.random.default_rng(0).permutation(len(labels))  # writers come in turn
    pictures, labels = jnp.asarray(pictures[order].reshape(len(labels), -1), jnp.float32), jnp.asarray(labels[order])
    end = int(len(labels) * (1 - _HELD_OUT_SHARE))
    return pictures[:end], labels[:end], (pictures[end:], labels[end:])


def _picked(data: Any, key: jax.Array, count: int) -> Any:
    picks = jax.random.randint(key, (count,), 0, len(jax.tree.leaves(data)[0]))
    return jax.tree.map(lambda array: array[picks], data)
