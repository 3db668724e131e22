"""The models that `experiments.timeline` compiles: bfloat16 over float32 state, remat around layers, adamw.

Layers are few so that a program compiles in half a minute, and as wide as in models that people train, so that each
layer's times are real. The held-out models were first planned for the published table: nothing was tuned on them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.models import (
    contrastive,
    decoder,
    diffusion_transformer,
    encoder_decoder,
    masked_encoder,
    moe,
    parallel_decoder,
    tied_gpt,
    unet,
    vision_transformer,
)
from experiments.models.model import Model


class Case(NamedTuple):
    """A model with its sizes.

    Attributes:
      make: makes the model from a batch and sizes.
      full: sizes of the published table.
      small: sizes for tests.
      batches: sequences or images in a batch by mesh, at full size.
      is_held_out: whether nothing was tuned on this model.
    """

    make: Callable[..., Model]
    full: dict[str, Any]
    small: dict[str, Any]
    batches: dict[str, int]
    is_held_out: bool = False


_SMALL_DECODER = {
    "layers": 1, "width": 64, "heads": 8, "key_value_heads": 4, "hidden": 128, "vocabulary": 256, "sequence": 32
}  # fmt: skip

CASES: dict[str, Case] = {
    "decoder": Case(
        decoder.make,
        {
            "layers": 4, "width": 4096, "heads": 32, "key_value_heads": 8, "hidden": 14336, "vocabulary": 32768,
            "sequence": 2048,
        },
        _SMALL_DECODER,
        {"2x4": 16, "4x8": 32, "8x8": 64},
    ),
    "mixture of experts": Case(
        moe.make_decoder,
        {"layers": 2, "width": 2048, "heads": 16, "key_value_heads": 8, "vocabulary": 32768, "sequence": 2048},
        {name: size for name, size in _SMALL_DECODER.items() if name != "hidden"},
        {"2x4": 16, "4x8": 64, "8x8": 128},
    ),
    "encoder-decoder": Case(
        encoder_decoder.make,
        {
            "layers": 2, "width": 2048, "heads": 16, "hidden": 8192, "vocabulary": 32768, "source": 1024,
            "target": 512,
        },
        {"layers": 1},
        {"2x4": 32, "4x8": 128, "8x8": 256},
    ),
    "unet": Case(
        unet.make,
        {"width": 256, "levels": 3, "blocks": 2, "heads": 16, "image": 64},
        {},
        {"2x4": 64, "4x8": 256, "8x8": 512},
    ),
    "vision transformer": Case(
        vision_transformer.make,
        {"layers": 4, "width": 1408, "heads": 16, "hidden": 6144, "patch": 14, "image": 224, "classes": 1000},
        {"layers": 1},
        {"2x4": 128, "4x8": 512, "8x8": 1024},
        is_held_out=True,
    ),
    "tied gpt": Case(
        tied_gpt.make,
        {"layers": 2, "width": 2048, "heads": 16, "vocabulary": 50257, "sequence": 8192},
        {"layers": 1, "width": 32, "heads": 4, "vocabulary": 61, "sequence": 32},
        {"2x4": 8, "4x8": 32, "8x8": 64},
    ),
    "diffusion transformer": Case(
        diffusion_transformer.make,
        {
            "layers": 4, "width": 1152, "heads": 16, "hidden": 4608, "patch": 2, "latent": 32, "channels": 4,
            "classes": 1000,
        },
        {"layers": 1},
        {"2x4": 128, "4x8": 512, "8x8": 1024},
        is_held_out=True,
    ),
    "contrastive": Case(
        contrastive.make,
        {
            "layers": 3, "width": 1024, "heads": 16, "hidden": 4096, "embedding": 1024, "patch": 16, "image": 256,
            "vocabulary": 49408, "sequence": 64,
        },
        {"layers": 1},
        {"2x4": 256, "4x8": 1024, "8x8": 2048},
        is_held_out=True,
    ),
    "masked encoder": Case(
        masked_encoder.make,
        {"layers": 3, "width": 1024, "heads": 16, "hidden": 4096, "vocabulary": 30720, "sequence": 512},
        {"layers": 1},
        {"2x4": 64, "4x8": 256, "8x8": 512},
        is_held_out=True,
    ),
    "parallel decoder": Case(
        parallel_decoder.make,
        {
            "layers": 3, "width": 4096, "heads": 16, "key_value_heads": 1, "hidden": 16384, "vocabulary": 32768,
            "sequence": 2048,
        },
        {**_SMALL_DECODER, "key_value_heads": 1},
        {"2x4": 16, "4x8": 32, "8x8": 64},
        is_held_out=True,
    ),
}  # fmt: skip
