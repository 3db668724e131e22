"""What stages of a GPT take on V100s, layer by layer, with data and tensor parallelism as in Megatron.

A micro-batch runs forward, then backward with its blocks computed again (full recomputation). Products run at the rate
of the preset "v100", everything else at the rate of memory, and collectives take the measured lines of the preset.
Weights and activations are float16; optimizer state, float32, is split over the replicas of a stage.

The chain is the embedding, the blocks and the head. Letters for sizes: L layers (with embedding and head), P submeshes,
b samples of a micro-batch on one device, s tokens, h width, a heads, V vocabulary, t devices that split a layer.

Source: Shoeybi et al., "Megatron-LM" (2019), for the collectives; Korthikanti et al. (2022), equation 2, for the bytes
of a block's activations; Alpa's benchmark/alpa/suite_manual_gpt.py for the sizes of models.
"""

from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from cost.collectives import collective_s
from cost.presets import preset
from diffshard.pipelines.stage_dynamic_program import Submesh

FREE_BYTES = 2**30
"""Memory of a device that is left for libraries and fragments: about what CUDA and NCCL take on a V100."""


class Gpt(NamedTuple):
    """The sizes of a model.

    Attributes:
      num_blocks: transformer blocks.
      width: h.
      num_heads: a.
      num_tokens: s, of a sample.
      vocabulary: V.
    """

    num_blocks: int
    width: int
    num_heads: int
    num_tokens: int = 1024
    vocabulary: int = 51200


MODELS = {
    "1.3B": Gpt(24, 2048, 32),
    "2.6B": Gpt(32, 2560, 32),
    "6.7B": Gpt(32, 4096, 32),
    "13B": Gpt(40, 5120, 40),
    "15B": Gpt(48, 5120, 40),
    "39B": Gpt(48, 8192, 64),
}


class StageTables(NamedTuple):
    """The costs of every stage on every submesh: all that the search and the simulation read.

    Prices from elsewhere, as those of searched sharding plans, can take their place.

    Attributes:
      forward_s: `[L, L + 1, P]`, seconds of layers `start` to `end` (exclusive) for one micro-batch.
      backward_s: `[L, L + 1, P]`.
      step_s: `[L, L + 1, P]`, once in a step: the sum of gradients and the update.
      state_bytes: `[L, L + 1, P]`, weights, gradients and optimizer state of a device.
      residual_bytes: `[L, L + 1, P]`, what a device keeps for each micro-batch in flight.
      transient_bytes: `[L, L + 1, P]`, what it needs beside while it computes.
      sent_bytes: `[L]`, what a micro-batch sends over the cut before a layer, all devices together.
      memory_bytes: of a device.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    step_s: np.ndarray
    state_bytes: np.ndarray
    residual_bytes: np.ndarray
    transient_bytes: np.ndarray
    sent_bytes: np.ndarray
    memory_bytes: float


class _Layers(NamedTuple):
    """The same for each layer on one submesh, `[L]`; `num_weights` are those of a device."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    num_weights: np.ndarray
    residual_bytes: np.ndarray
    transient_bytes: np.ndarray


def submeshes_of(num_devices: int, devices_in_host: int = 8) -> list[Submesh]:
    """Returns all submeshes of powers of two devices as replicas times devices that split a layer, in one host."""
    submeshes = []
    size = 1
    while size <= num_devices:
        split = 1
        while split <= min(size, devices_in_host):
            submeshes.append(Submesh(0, size, (size // split, split)))
            split *= 2
        size *= 2
    return submeshes


def stage_tables(model: Gpt, submeshes: list[Submesh], microbatch_samples: int) -> StageTables:
    """Computes what all stages take for a micro-batch; infinite where it has fewer samples than replicas."""
    size = model.num_blocks + 2
    shape = (size, size + 1, len(submeshes))
    tables = [np.full(shape, np.inf) for _ in range(6)]
    memory = 0.0
    for p, submesh in enumerate(submeshes):
        replicas, split = submesh.shape
        hardware = preset("v100", {"data": replicas, "model": split})
        memory = hardware.memory_bytes - FREE_BYTES
        if microbatch_samples % replicas:
            continue
        layers = _layers(model, hardware, microbatch_samples // replicas, split)
        weights = _sums(layers.num_weights)
        update_s = (
            28 * weights / replicas / hardware.reached_memory_bytes_per_s
        )  # bytes of Adam for a weight, read and written
        gradient_s = collective_s("all_reduce", 2 * weights, replicas, hardware.links["data"])
        entries = (
            _sums(layers.forward_s),
            _sums(layers.backward_s),
            gradient_s + update_s,
            weights * (4 + 12 / replicas),
            _sums(layers.residual_bytes),
            _maxima(layers.transient_bytes),
        )
        for table, entry in zip(tables, entries, strict=True):
            table[..., p] = entry
    sent = np.full(size, 2.0 * microbatch_samples * model.num_tokens * model.width)
    return StageTables(*tables, sent_bytes=sent, memory_bytes=memory)


def _layers(model: Gpt, hardware: Hardware, samples: int, split: int) -> _Layers:
    """Returns the seconds of each layer on a device with b samples whose layers are split over t devices."""
    h, tokens = model.width, samples * model.num_tokens  # tokens: b·s
    scores = samples * model.num_heads * model.num_tokens**2
    rate = hardware.reached_flops_per_s("float16")
    memory_rate = hardware.reached_memory_bytes_per_s
    sum_s = float(collective_s("all_reduce", 2.0 * tokens * h, split, hardware.links["model"]))

    # A block: two norms and two residuals (whole on every device), GELU, and softmax with dropout; bytes in float16.
    products = (24 * tokens * h**2 + 4 * tokens * model.num_tokens * h) / split / rate
    block_s = products + (20 * tokens * h + (16 * tokens * h + 13 * scores) / split) / memory_rate
    block_forward_s = block_s + 2 * sum_s
    block_backward_s = block_forward_s + 2 * block_s + 2 * sum_s
    block_bytes = tokens * h * (10 + 24 / split) + 5 * scores / split

    lookup_s = 6 * tokens * h / memory_rate
    head_s = 2 * tokens * h * model.vocabulary / split / rate + 14 * tokens * model.vocabulary / split / memory_rate
    table = model.vocabulary * h / split
    n = model.num_blocks

    def along_chain(first: float, block: float, last: float) -> np.ndarray:
        return np.array([first, *[block] * n, last])

    return _Layers(
        forward_s=along_chain(lookup_s + sum_s, block_forward_s, head_s),
        backward_s=along_chain(2 * lookup_s, block_backward_s, 2 * head_s + sum_s),
        num_weights=along_chain(table + model.num_tokens * h, (12 * h**2 + 13 * h) / split, table),
        residual_bytes=along_chain(0.0, 2.0 * tokens * h, 2.0 * tokens * h),
        transient_bytes=along_chain(0.0, block_bytes, 6.0 * tokens * model.vocabulary / split),
    )


def _sums(layers: np.ndarray) -> np.ndarray:
    """Returns `[L, L + 1]`, the sums over layers `start` to `end`; entries with `end < start` mean nothing."""
    total = np.concatenate([np.zeros(1), np.cumsum(layers)])
    return np.maximum(total[None, :] - total[:-1, None], 0.0)


def _maxima(layers: np.ndarray) -> np.ndarray:
    """Returns `[L, L + 1]`, the largest over layers `start` to `end`; entries with `end <= start` mean nothing."""
    size = len(layers)
    largest = np.zeros((size, size + 1))
    for start in range(size):
        largest[start, start + 1 :] = np.maximum.accumulate(layers[start:])
    return largest
