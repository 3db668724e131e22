"""Models that are trained small and priced wide, and what their formats are measured by."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import diffshard
from cost.base import Hardware
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.host_devices import AXIS_NAMES
from experiments.models import digits, gpt, masked_encoder, mixer, moe, text, vision_transformer
from experiments.models.model import Model, abstract_arguments

LOOK_STEPS, LOOKS, RUN_STEPS = 20, 2, 60
"""Steps of a look, looks over `LOOKS * LOOK_STEPS` calls, and steps of each of two validation runs."""


def text_batch(model: dict[str, Any], key: jax.Array) -> jax.Array:
    """Draws windows of the Python reference."""
    return text.sample(text.load("python_reference"), key, model["batch"], model["sequence"])


def digits_batch(model: dict[str, Any], key: jax.Array) -> dict[str, jax.Array]:
    """Draws handwritten digits as 16 patches of 2x2 pixels."""
    images, labels = digits.load()
    chosen = np.asarray(jax.random.randint(key, (model["batch"],), 0, len(images)))
    patches = images[chosen].reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    return {"image": jax.numpy.asarray(patches), "label": jax.numpy.asarray(labels[chosen])}


def image_batch(model: dict[str, Any], key: jax.Array) -> dict[str, jax.Array]:
    """Draws handwritten digits as images of 8x8 pixels in three equal channels."""
    images, labels = digits.load()
    chosen = np.asarray(jax.random.randint(key, (model["batch"],), 0, len(images)))
    return {
        "image": jax.numpy.asarray(np.repeat(images[chosen][..., None], 3, axis=-1)),
        "label": jax.numpy.asarray(labels[chosen]),
    }


def masked_batch(model: dict[str, Any], key: jax.Array) -> dict[str, jax.Array]:
    """Draws windows of the Python reference, and which of their bytes are masked."""
    window_key, mask_key = jax.random.split(key)
    tokens = text.sample(text.load("python_reference"), window_key, model["batch"], model["sequence"] - 1)
    return {
        "tokens": tokens,
        "is_masked": jax.random.bernoulli(mask_key, masked_encoder.MASKED_SHARE, tokens.shape),
    }


class Case(NamedTuple):
    """A model that is trained small and priced wide; `tiny` is for tests."""

    make: Callable[..., Model]
    batch: Callable[[dict[str, Any], jax.Array], Any]
    small: dict[str, Any]
    tiny: dict[str, Any]
    wide: dict[str, Any]


_TEXT = {"batch": 64, "layers": 1, "heads": 32, "sequence": 1024, "vocabulary": 32768}
MODELS = {
    "gpt": Case(
        gpt.make, text_batch, {"batch": 8, "layers": 1, "width": 64, "sequence": 32},
        {"batch": 2, "width": 16, "sequence": 16}, {**_TEXT, "width": 4096},
    ),
    "mixer": Case(
        mixer.make, digits_batch, {"batch": 64}, {"batch": 2, "width": 8},
        {"batch": 512, "layers": 1, "width": 4096, "patches": 256, "pixels": 768},
    ),
    "moe": Case(
        moe.make, text_batch, {"batch": 4, "layers": 1, "width": 32, "sequence": 32},
        {"batch": 2, "width": 16, "sequence": 16}, {**_TEXT, "width": 2048, "heads": 16},
    ),
    "masked-encoder": Case(
        masked_encoder.make, masked_batch,
        {"batch": 16, "width": 32, "hidden": 128, "vocabulary": 256, "sequence": 64},
        {"batch": 2, "vocabulary": 256}, {**_TEXT, "width": 4096, "hidden": 16384},
    ),
    "vision-transformer": Case(
        vision_transformer.make, image_batch,
        {"batch": 32, "width": 32, "hidden": 128, "patch": 2, "image": 8},
        {"batch": 2, "patch": 2, "image": 8},
        {"batch": 512, "width": 4096, "heads": 32, "hidden": 16384, "patch": 14, "image": 224, "classes": 1000},
    ),
}  # fmt: skip


class Setting(NamedTuple):
    """A model, small and wide, and the mesh that the wide one is priced for."""

    case: Case
    sizes: dict[str, Any]
    small: Model
    wide: Model
    mesh: AbstractMesh
    hardware: Hardware

    @classmethod
    def of(cls, name: str, sizes: str, hardware: str = "h100", shape: Sequence[int] = (2, 4)) -> "Setting":
        """Returns the setting of a model of `MODELS` on GPUs of a preset."""
        case = MODELS[name]
        small = case.small if sizes == "full" else case.tiny
        mesh = AbstractMesh(tuple(shape), AXIS_NAMES[len(shape)], axis_types=(AxisType.Auto,) * len(shape))
        priced = diffshard.preset(hardware, dict(mesh.shape))
        return cls(case, small, case.make(**small), case.make(**case.wide), mesh, priced)

    def with_small(self, **arguments: Any) -> "Setting":
        """Returns the setting with other arguments of the small model."""
        return self._replace(small=self.case.make(**{**self.sizes, **arguments}))

    def training(self, seed: int, steps: int) -> list[tuple[Any, Any]]:
        """Returns the calls of a training of the small model: its first state and the batches of a seed."""
        state = jax.jit(self.small.init)(jax.random.key(seed))
        keys = jax.random.split(jax.random.key(seed), steps)
        return [(state, self.case.batch(self.sizes, key)) for key in keys]

    def measures(self, seed: int, looks: int = LOOKS) -> dict[str, Any]:
        """Returns the arguments by which `Formats` measures, of seeds that no other search and no table has."""
        first, run = 1000 + 3 * seed, min(RUN_STEPS, 20 * LOOK_STEPS)
        return {
            "measured_fn": self.small.step,
            "calls": self.training(first, looks * LOOK_STEPS),
            "steps": LOOK_STEPS,
            "validation_runs": [self.training(first + 1, run), self.training(first + 2, run)],
        }

    def losses(self, steps: int, seeds: int, num_devices: int = 8, **kinds: Any) -> MeasuredLosses:
        """Returns the measurements of the small model: looks ahead, and a training from its beginning for each seed.

        It runs on one device, and adds up rounded parts as `num_devices` would.
        """
        formats = diffshard.formats.Formats(
            1.0,
            calls=self.training(1000, LOOKS * LOOK_STEPS),
            steps=LOOK_STEPS,
            validation_runs=[self.training(seed, steps) for seed in range(seeds)],
            **kinds,
        )
        one = jax.make_mesh((1,), ("device",), (AxisType.Auto,), devices=jax.devices()[:1])
        hardware = diffshard.preset("b200", dict(one.shape))
        options = Options(fn=self.small.step, mesh=one, hardware=hardware, memory_limit_bytes=1e15)
        traced = trace_function(options, formats.calls[0])
        types = array_types(traced.call.arrays)
        return MeasuredLosses(formats, space_of(options, traced), options, types, traced.out_paths, num_devices)

    def plan(self, limit: float, key: int | None = None, **formats: Any) -> Any:
        """Searches shardings and formats of the wide model together."""
        found = search(self.wide, self.mesh, self.hardware, limit, key, **formats)
        return found.plan(*abstract_arguments(self.wide))


def search(model: Model, mesh: Any, hardware: Any, limit: float, key: int | None = None, **formats: Any) -> Any:
    """Searches shardings and formats together."""
    limits = diffshard.formats.Formats(limit, **formats)
    return diffshard.search(model.step, mesh, hardware=hardware, key=key, formats=limits, progress="none")
