"""Published training runs as this repository can rebuild them: sizes, mesh, layout, remat, hardware, measured seconds.

A row becomes a `Run`, or a sentence that says what is missing to rebuild it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cost.base import Hardware
from cost.measured_presets import measured_device_and_network
from cost.measured_rates import NOT_MEASURED, MeasuredRates
from cost.networks import links_of
from cost.presets import device_and_network
from experiments.published.data import held_out
from experiments.published.decoder import Remat, Sizes, Split

JAX_FAMILY = "JAX on GPUs"
Prices = Literal["measured", "preset", "datasheet"]
"""What kernels cost: as measured; by the preset, which has measured attention only; attention as any other product."""
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


@dataclass(frozen=True, eq=False)  # equal by identity: each is a row of the file
class Run:
    """A published training run.

    Attributes:
      number: its row in the file, from 0.
      name: model, devices and what else tells it from others.
      family: the framework, on which kind of hardware.
      model: what layouts are compared within.
      sizes, split, remat: of the decoder.
      mesh_axes: devices along each axis, slowest first.
      batch, accumulation: sequences in a step, and parts in which they are computed.
      attention: "cudnn" for a fused kernel, "scores" where scores are in memory.
      device: the preset's name, and words that `hardware_of` knows.
      seconds: measured, of a step.
      is_scanned: whether the run had its layers in a scan.
      is_held_out: whether nothing may be chosen by this row.
    """

    number: int
    name: str
    family: str
    model: str
    sizes: Sizes
    split: Split
    remat: Remat
    mesh_axes: Mapping[str, int]
    batch: int
    accumulation: int
    attention: str
    device: str
    seconds: float
    is_scanned: bool = False
    is_held_out: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        product = 1
        for size in self.mesh_axes.values():
            product *= size
        return product


class NotRebuilt(NamedTuple):
    """A row that cannot be rebuilt.

    Attributes:
      number: its row in the file.
      family: its framework.
      why: what is missing, as a phrase.
    """

    number: int
    family: str
    why: str


def runs_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Run], list[NotRebuilt]]:
    """Returns the runs that can be rebuilt, a third of each family marked as held out, and why others cannot."""
    results = [_rebuilt(number, row) for number, row in enumerate(rows)]
    runs = [run for run in results if isinstance(run, Run)]
    marks = held_out([run.family for run in runs])
    marked = [dataclasses.replace(run, is_held_out=bool(mark)) for run, mark in zip(runs, marks, strict=True)]
    return marked, [run for run in results if isinstance(run, NotRebuilt)]


def hardware_of(run: Run, prices: Prices = "measured") -> Hardware:
    """Returns a run's hardware at some prices."""
    name = run.device.split()[0]
    device, network = measured_device_and_network(name) if prices == "measured" else device_and_network(name)
    if "40 GB" in run.device:
        device = dataclasses.replace(
            device, name="A100-40GB", memory_bytes_per_s=_A100_40_MEMORY, memory_bytes=40 * 2**30
        )
    if "A3" in run.device:
        share = network.network_bytes_per_s / (8 * 50e9)  # pyright: ignore[reportAttributeAccessIssue]
        network = dataclasses.replace(network, network_bytes_per_s=share * _A3_HOST_BYTES_PER_S)
    if run.family == JAX_FAMILY and run.num_devices > 8:
        device = dataclasses.replace(device, exposed_share=_EXPOSED_BY_PROPAGATION)
    if prices == "datasheet":
        device = dataclasses.replace(device, measured=NOT_MEASURED)
    elif "Triton" in run.device:
        device = dataclasses.replace(device, measured=_with_triton(device, name))
    return dataclasses.replace(device, links=links_of(network, run.mesh_axes))


def _with_triton(device: Hardware, name: str) -> MeasuredRates:
    """Returns what was measured of a device with FlashAttention in Triton in place of the measured kernel."""
    attention = device.measured.attention
    assert attention is not None
    newer = _FLASH_ATTENTION_2_ON_H100 if name == "h100" else attention.flops_per_s
    older = dataclasses.replace(
        attention, flops_per_s=newer / _TRITON_SLOWER, bytes_per_s=attention.bytes_per_s / _TRITON_SLOWER
    )
    return dataclasses.replace(device.measured, attention=older)


def _rebuilt(number: int, row: Mapping[str, Any]) -> Run | NotRebuilt:
    family = _family(row)
    why = _missing(row)
    if why:
        return NotRebuilt(number, family, why)
    if "Foundry" in row["framework"]:
        return _foundry(number, row)
    if "JAX" in row["framework"]:
        return _jax(number, row)
    return _other(number, row, family)


def _family(row: Mapping[str, Any]) -> str:
    framework = row["framework"]
    if "JAX" in framework:
        return JAX_FAMILY if "GPU" in framework else "JAX on TPUs"
    device = next((name for name in ("A100", "H100") if name.lower() in row["hardware"].lower()), row["hardware"])
    return f"{framework.split(' (')[0]}, {device}"


def _missing(row: Mapping[str, Any]) -> str | None:
    """Says why a row cannot be rebuilt; None where it can."""
    precision = str(row.get("precision", "")).lower()
    if "TPU" in row["hardware"]:
        return "no preset for this TPU, or a layout with offloading"
    if "8" in precision or "nvfp4" in precision or "not stated" in precision:
        return "numbers of 8 bits, or not stated"
    if row.get("pp") not in (None, 1):
        return "a pipeline"
    if row.get("experts") or "MoE" in row["model"] or "Nemotron" in row["model"]:
        return "a mixture of experts"
    if "LoRA" in row["notes"] or "LoRA" in row.get("workload", "") or "T5" in row["model"]:
        return "LoRA, or an encoder-decoder"
    if not row.get("layers") or not (row.get("step_time_s") or row.get("step_time_s_derived")):
        return "sizes or seconds"
    if (
        not any(name in row["hardware"].lower() for name in ("a100", "h100", "b200"))
        or "gb200" in row["hardware"].lower()
    ):
        return "no preset for this GPU"
    return None


def _seconds(row: Mapping[str, Any]) -> float:
    return float(row.get("step_time_s") or row["step_time_s_derived"])


def _sizes(row: Mapping[str, Any], *, gated: bool = False, tied: bool = False) -> Sizes:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    layers, width, heads, groups, hidden, words, length = (int(row[name]) for name in names)
    return Sizes(layers, width, heads, groups, hidden, words, length, gated, tied)


def _foundry(number: int, row: Mapping[str, Any]) -> Run:
    """MPT: fully sharded over all devices, learned positions, tied head, flash attention."""
    hardware = row["hardware"]
    device = f"{hardware[:4]}{' 40 GB' if '40gb' in hardware else ''} Triton"
    devices = row["num_devices"]
    return Run(
        number=number,
        name=f"{row['model']}, {devices} {hardware.split(' ')[0].replace('_', ' ')}, sequence {row['seq']}",
        family=_family(row),
        model=f"{row['model']} {device} {row['remat']}",
        sizes=_sizes(row, tied=True),
        split=Split(("data",), None, ("data",)),
        remat="full" if row["remat"] == "full" else "none",
        mesh_axes={"data": devices},
        batch=row["global_batch"],
        accumulation=row["grad_accumulation"],
        attention="cudnn",
        device=device,
        seconds=_seconds(row),
    )


def _jax(number: int, row: Mapping[str, Any]) -> Run:
    """PaxML and MaxText: scanned or not, the layers are alike; a mesh of replicas and of fully sharded state."""
    fsdp, devices = int(row["fsdp"]), row["num_devices"]
    is_llama = "Llama" in row["model"]
    remat_text = str(row["remat"])
    remat: Remat = (
        "products and attention" if "minimal" in remat_text else "products" if "SAVE" in remat_text else "none"
    )
    mesh_axes = {"data": devices} if fsdp in (1, devices) else {"replica": devices // fsdp, "data": fsdp}
    device = "a100" if "A100" in row["hardware"] else "h100 A3" if "A3" in row["hardware"] else "h100"
    return Run(
        number=number,
        name=f"{row['model']}, {devices} {device.split()[0]}, {row['framework'].split('(')[1].split(')')[0]}",
        family=_family(row),
        model=f"{row['model']} {device}",
        sizes=_sizes(row, gated=is_llama, tied=not is_llama),
        split=Split(tuple(mesh_axes), None, ("data",) if fsdp > 1 else ()),
        remat=remat,
        mesh_axes=mesh_axes,
        batch=int(row["global_batch"]),
        accumulation=1,
        attention="scores" if "126M" in row["model"] else "cudnn",
        device=device,
        seconds=_seconds(row),
        is_scanned=bool(row.get("scan")),
    )


def _other(number: int, row: Mapping[str, Any], family: str) -> Run | NotRebuilt:
    """Megatron with tensor parallelism, and Llama in PyTorch FSDP, sharded within hosts."""
    devices, tensor = row["num_devices"], int(row["tp"])
    device = "a100" if "A100" in row["hardware"] else "h100"
    is_llama = "Llama" in row["model"]
    if is_llama:
        fsdp = int(row.get("fsdp") or 1)
        mesh_axes = {"replica": devices // fsdp, "data": fsdp}
        split = Split(("replica", "data"), None, ("data",))
    else:
        mesh_axes = {"data": devices // tensor, "tensor": tensor}
        # Megatron-Core splits the optimiser's state over replicas, and sequences; the version of 2021 does neither.
        is_core = "Core" in family
        split = Split(("data",), "tensor", ("data",) if is_core else (), is_core, is_core)
    # Where the micro-batch is not stated, all sequences of a replica are in one part.
    micro_batch = row.get("micro_batch") or row["global_batch"] * tensor // devices
    return Run(
        number=number,
        name=f"{row['model']}, {devices} {device}, {row['framework'].split(' (')[0]}",
        family=family,
        model=f"{row['model']} {device}",
        sizes=_sizes(row, gated=is_llama, tied=not is_llama),
        split=split,
        remat="full" if "full" in str(row.get("remat")) else "none",
        mesh_axes=mesh_axes,
        batch=row["global_batch"],
        accumulation=max(1, round(row["global_batch"] * tensor / (devices * micro_batch))) if not is_llama else 1,
        attention="scores" if "2021" in family else "cudnn",
        device=device,
        seconds=_seconds(row),
    )
