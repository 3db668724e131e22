"""What the bilevel experiments train: small models on 2 x 4 simulated devices, on disjoint parts of real data."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import device_gpt, device_images, device_moe, digits, text

_SHARES = {"train": (0.0, 0.61), "search": (0.61, 0.74), "validation": (0.74, 0.87), "test": (0.87, 1.0)}
"""Where each part of the data begins and ends, as shares of all of it."""
PARTS = tuple(_SHARES)
_EVALUATED = 32  # batches of text


class Task(NamedTuple):
    """A model as every device computes it, with data.

    Attributes:
      init: whole parameters of a key.
      loss: `loss(params, batch)`, one device's.
      param_specs: of `params`.
      batch_specs: of a batch.
      draw: `draw(part, key, count)`, random batches of a part of the data, `[count, ...]`.
      evaluated: `evaluated(part)`, all or evenly spaced examples of a part, `[batches, ...]`.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    param_specs: Any
    batch_specs: Any
    draw: Callable[[str, jax.Array, int], Any]
    evaluated: Callable[[str], Any]


def gpt(layers: int = 2, width: int = 64, heads: int = 4, sequence: int = 64) -> Task:
    """Makes a byte GPT, tensor parallel, on the Python reference."""
    sizes = device_gpt.DeviceSizes(layers, width, heads, sequence)
    return _on_text(
        partial(device_gpt.init, sizes=sizes), device_gpt.loss_fn, device_gpt.SPECS, device_gpt.BATCH_SPEC, sequence
    )


def experts(layers: int = 2, width: int = 64, sequence: int = 64) -> Task:
    """Makes a byte model with experts and a split sequence, on the Python reference; capacity and window vary."""
    sizes = device_moe.MoeSizes(layers=layers, width=width, sequence=sequence)
    return _on_text(
        partial(device_moe.init, sizes=sizes), device_moe.loss_fn, device_moe.SPECS, device_moe.BATCH_SPEC, sequence
    )


def images(layers: int = 2, width: int = 32, batch: int = 64) -> Task:
    """Makes an MLP-Mixer on handwritten digits, which training shifts by up to a pixel."""
    sizes = device_images.ImageSizes(layers=layers, width=width)
    pictures, labels = digits.load()
    order = np.random.default_rng(0).permutation(len(labels))  # writers come in turn

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        begin, end = _ends(name, len(labels))
        return pictures[order[begin:end]], labels[order[begin:end]]

    def draw(name: str, key: jax.Array, count: int) -> Any:
        pictures_in_part, digits_in_part = map(jnp.asarray, part(name))

        def shifted(image: jax.Array, by: jax.Array) -> jax.Array:
            padded = jnp.pad(image, 1)
            return jax.lax.dynamic_slice(padded, by, image.shape)

        which, by = jax.random.split(key)
        picks = jax.random.randint(which, (count, batch), 0, len(pictures_in_part))
        shifts = jax.random.randint(by, (count, batch, 2), 0, 3)
        return jax.vmap(jax.vmap(shifted))(pictures_in_part[picks], shifts), digits_in_part[picks]

    def evaluated(name: str) -> Any:
        pictures_in_part, digits_in_part = part(name)
        count = len(pictures_in_part) // batch
        return (
            jnp.asarray(pictures_in_part[: count * batch]).reshape(count, batch, *pictures_in_part.shape[1:]),
            jnp.asarray(digits_in_part[: count * batch]).reshape(count, batch),
        )

    specs = device_images.BATCH_SPEC, device_images.BATCH_SPEC
    return Task(
        partial(device_images.init, sizes=sizes), device_images.loss_fn, device_images.SPECS, specs, draw, evaluated
    )


def _on_text(init: Any, loss: Any, param_specs: Any, batch_specs: Any, sequence: int, batch: int = 8) -> Task:
    tokens = text.load("python_reference")

    def part(name: str) -> np.ndarray:
        begin, end = _ends(name, len(tokens))
        return tokens[begin:end]

    def draw(name: str, key: jax.Array, count: int) -> jax.Array:
        return text.sample(part(name), key, count * batch, sequence).reshape(count, batch, sequence + 1)

    def evaluated(name: str) -> jax.Array:
        part_tokens = part(name)
        starts = np.linspace(0, len(part_tokens) - sequence - 1, _EVALUATED * batch).astype(int)
        return jnp.asarray(part_tokens[starts[:, None] + np.arange(sequence + 1)]).reshape(
            _EVALUATED, batch, sequence + 1
        )

    return Task(init, loss, param_specs, batch_specs, draw, evaluated)


def _ends(name: str, length: int) -> tuple[int, int]:
    begin, end = _SHARES[name]
    return int(begin * length), int(end * length)
