"""Seconds and bytes of a site by the α–β model, and of its encoding by measured kernels or the roofline."""

import json
from datetime import date
from functools import cache
from importlib import resources
from importlib.metadata import version

import jax

from cost.base import Hardware
from cost.calibration import median_s
from cost.collectives import collective_latency_s, collective_transfer_s
from search_spaces.communication.collectives import Stage
from search_spaces.communication.precision import BLOCK, PRECISIONS, Precision, decode, encode
from search_spaces.communication.sites import Site
from search_spaces.communication.strategies import CollectiveStrategy

_DATA = "encoding_seconds.json"


def site_bytes(site: Site, strategy: CollectiveStrategy) -> float:
    """Bytes that each device sends for a site in the mean step."""
    assert site.collective is not None
    return site.trips * sum(stage.sent_bytes for stage in strategy.stages(site.collective, site.shape, site.dtype))


def site_seconds(site: Site, strategy: CollectiveStrategy, hardware: Hardware) -> float:
    """Seconds of a site in the mean step: each stage's latency and transfer, then encoding and decoding."""
    assert site.collective is not None
    stages = strategy.stages(site.collective, site.shape, site.dtype)
    return site.trips * sum(stage.count * _stage_seconds(stage, hardware) for stage in stages)


def _stage_seconds(stage: Stage, hardware: Hardware) -> float:
    link = hardware.link(stage.axis)
    latency = float(collective_latency_s(stage.kind, stage.num_devices, link))
    transfer = float(collective_transfer_s(stage.kind, stage.num_bytes, stage.num_devices, link))
    coding = 0.0 if stage.precision is None else stage.num_coded * coding_s(stage.precision, hardware)
    return latency + transfer + coding


def coding_s(precision: Precision, hardware: Hardware) -> float:
    """Seconds to encode or decode one element.

    Measured where the data has the hardware's kind of device; else what its memory needs to read or write a float32 and
    its code.
    """
    for kind, seconds in measured()["seconds_per_element"].items():
        if hardware.name.lower().startswith(kind) and precision.name in seconds:
            return seconds[precision.name]
    return (4 + precision.bits / 8) / hardware.memory_bytes_per_s


@cache
def measured() -> dict:
    """The measured seconds for each element, by kind of device and precision, with date and versions."""
    return json.loads(resources.files("search_spaces.communication").joinpath(_DATA).read_text())


def measure(num_elements: int = 2**20, repeats: int = 9) -> dict:
    """Measures encoding and decoding on the first device, in the form of the data file.

    Args:
      num_elements: of the array, a multiple of a block.
      repeats: the time is the median of so many calls.

    Raises:
      ValueError: `num_elements` is no positive multiple of a block.
    """
    if num_elements < BLOCK or num_elements % BLOCK:
        raise ValueError(f"`num_elements` must be a positive multiple of {BLOCK}, not {num_elements}.")
    device, key = jax.devices()[0], jax.random.key(0)
    x = jax.random.normal(key, (num_elements,))
    seconds = {}
    for precision in (p for nearest in PRECISIONS for p in (nearest, nearest.stochastic)):
        codes = jax.jit(lambda x, precision=precision: encode(x, precision, key))
        values = jax.jit(lambda e, precision=precision: decode(e, precision, num_elements))
        encoded = codes(x)
        total = median_s(lambda codes=codes: codes(x), repeats) + median_s(
            lambda values=values, encoded=encoded: values(encoded), repeats
        )
        seconds[precision.name] = total / 2 / num_elements
    return {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "num_elements": num_elements,
        "seconds_per_element": {device.device_kind.lower(): seconds},
    }
