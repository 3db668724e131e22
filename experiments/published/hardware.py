"""The hardware of published runs, at several prices of kernels and links."""

import dataclasses
from typing import Literal

from cost.base import Hardware
from cost.calibration import MEASURED, measured_device_and_network
from cost.measured_rates import NOT_MEASURED, MeasuredRates
from cost.networks import Network, SwitchedHost, links_of
from cost.presets import EXPOSED_ON_GPU, device_and_network
from experiments.published.runs import JAX_FAMILY, Run

Prices = Literal["measured", "slowest device", "compiled", "preset", "datasheet"]
"""What kernels cost: as measured; the same with waits for the slowest device, and in runs of JAX with the waits of the
program that XLA makes of them; with the second of these only; by the preset, which has measured attention only;
attention as any other product."""
# The measured kernels are FlashAttention-2's on A100s and FlashAttention-3's on H100s. LLM Foundry ran FlashAttention
# in Triton (`--attn_impl` of scripts/train/benchmarking/submit_benchmarks.py). On H100s FlashAttention-2 reaches 35% of
# 989 TFLOP/s. Source: Shah et al., FlashAttention-3 (arXiv:2407.08608), abstract.
_FLASH_ATTENTION_2_ON_H100 = 0.35 * 989e12
# FlashAttention-2 is 1.3 to 2.5 times faster than FlashAttention in Triton; the geometric mean of both is taken.
# Source: Dao, FlashAttention-2 (arXiv:2307.08691), section 4.
_TRITON_SLOWER = (1.3 * 2.5) ** 0.5
# These plans run by XLA's propagation, and not as programs for each device. Compiled so for 4 and 8 hosts, steps with
# fully sharded state waited for 0.35 to 0.75 of the seconds of their collectives, 0.55 in the median
# (docs/measured/timeline_rows.jsonl). No published run was used for this number.
_EXPOSED_BY_PROPAGATION = 0.55
_A100_40_MEMORY = 1555e9  # bytes/s. Source: A100 datasheet, 40 GB SXM
# Google's A3 High has 8 H100s in a host, four of whose cards with 200 Gbit/s serve them. Source:
# cloud.google.com/compute/docs/gpus/gpu-network-bandwidth (1,000 Gbit/s with the host's own).
_A3_HOST_BYTES_PER_S = 4 * 25e9


def hardware_of(run: Run, prices: Prices = "measured") -> Hardware:
    """Returns a run's hardware at some prices."""
    device, network = device_of(run, prices)
    return dataclasses.replace(device, links=links_of(network, run.mesh_axes))


def device_of(run: Run, prices: Prices = "measured") -> tuple[Hardware, Network]:
    """Returns a run's device without links, and the hosts and the network that such devices are in."""
    name = run.device.split()[0]
    if name not in MEASURED:
        # Nothing was measured of the waits of TPUs: as many as of GPUs are assumed.
        device, network = device_and_network(name)
        return dataclasses.replace(device, exposed_share=EXPOSED_ON_GPU), network
    device, network = (
        device_and_network(name) if prices in ("preset", "datasheet") else measured_device_and_network(name)
    )
    assert isinstance(network, SwitchedHost)
    if "40 GB" in run.device:
        device = dataclasses.replace(
            device, name="A100-40GB", memory_bytes_per_s=_A100_40_MEMORY, memory_bytes=40 * 2**30
        )
    if "A3" in run.device:
        share = network.network_bytes_per_s / (8 * 50e9)
        network = dataclasses.replace(network, network_bytes_per_s=share * _A3_HOST_BYTES_PER_S)
    if run.family == JAX_FAMILY and run.num_devices > 8:
        device = dataclasses.replace(device, exposed_share=_EXPOSED_BY_PROPAGATION)
    if prices == "datasheet":
        device = dataclasses.replace(device, measured=NOT_MEASURED)
    elif "Triton" in run.device:
        device = dataclasses.replace(device, measured=_with_triton(device, name))
    return device, network


def _with_triton(device: Hardware, name: str) -> MeasuredRates:
    """Returns the measured rates of a device with FlashAttention in Triton in place of the measured kernel."""
    attention = device.measured.attention
    assert attention is not None
    newer = _FLASH_ATTENTION_2_ON_H100 if name == "h100" else attention.flops_per_s
    older = dataclasses.replace(
        attention, flops_per_s=newer / _TRITON_SLOWER, bytes_per_s=attention.bytes_per_s / _TRITON_SLOWER
    )
    return dataclasses.replace(device.measured, attention=older)
