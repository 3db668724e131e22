"""Published training runs as this repository can rebuild them: sizes, mesh, layout, remat, hardware, measured seconds.

A row becomes a `Run`, or a sentence that says what is missing to rebuild it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.published.data import held_out
from experiments.published.decoder import Remat, Sizes, Split

JAX_FAMILY, TPU_FAMILY = "JAX on GPUs", "JAX on TPUs"
ADDED_LATER = (TPU_FAMILY, "Megatron-LM 2021 pipelines, A100", f"{TPU_FAMILY}, experts")
"""Families in the order in which they were added, so that none changes which runs of an earlier one are held out."""
# What the scripts of these runs tell XLA, as far as its compiler still knows it. Sources: MaxText,
# src/maxtext/configs/gpu/a3/llama_2_7b/8vm.sh and 16vm.sh; JAX-Toolbox, rosetta/rosetta/projects/maxtext/xla_flags/
# llama2-7b-1N8G.env and rosetta/rosetta/projects/pax/xla_flags/gpt-5b.env and gpt-126m.env.
_COMBINED_REDUCTIONS = "xla_gpu_all_reduce_combine_threshold_bytes"
_MAXTEXT_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    _COMBINED_REDUCTIONS: 2**30,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
}
_PAXML_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_allow_excess_precision": True,
}


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
      xla_options: what the run's published script told XLA, where it is a run of JAX.
      stages: of a pipeline, in each of which the mesh's axes are.
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
    xla_options: Mapping[str, bool | int] | None = None
    stages: int = 1
    is_held_out: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of the meshes of all stages."""
        return math.prod(self.mesh_axes.values()) * self.stages


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
    marks = _marks([run.family for run in runs])
    marked = [dataclasses.replace(run, is_held_out=bool(mark)) for run, mark in zip(runs, marks, strict=True)]
    return marked, [run for run in results if isinstance(run, NotRebuilt)]


def _marks(families: list[str]) -> np.ndarray:
    """Returns which runs are held out, `[runs]`: of each family as drawn when it was added, with those before it."""
    marks = np.zeros(len(families), bool)
    rounds = [family for family in ADDED_LATER if family in families]
    for number in range(len(rounds) + 1):
        drawn_now = [i for i, family in enumerate(families) if family not in rounds[number:]]
        drawn = held_out([families[i] for i in drawn_now])
        new = rounds[number - 1 : number] if number else set(families) - set(rounds)
        for i, mark in zip(drawn_now, drawn, strict=True):
            if families[i] in new:
                marks[i] = mark
    return marks


def _rebuilt(number: int, row: Mapping[str, Any]) -> Run | NotRebuilt:
    family = _family(row)
    why = _missing(row)
    if why:
        return NotRebuilt(number, family, why)
    if "Foundry" in row["framework"]:
        return _foundry(number, row)
    if "TPU" in family:
        return _tpu(number, row)
    if "JAX" in row["framework"]:
        return _jax(number, row)
    return _other(number, row, family)


def _family(row: Mapping[str, Any]) -> str:
    framework = row["framework"]
    if framework.startswith("Megatron-LM") and (row.get("pp") or 1) > 1:
        framework += " pipelines"
    if "JAX" in framework:
        return JAX_FAMILY if "GPU" in framework else TPU_FAMILY + ", experts" * bool(row.get("experts"))
    device = next((name for name in ("A100", "H100") if name.lower() in row["hardware"].lower()), row["hardware"])
    return f"{framework.split(' (')[0]}, {device}"


def _missing(row: Mapping[str, Any]) -> str | None:
    """Says why a row cannot be rebuilt; None where it can."""
    precision = str(row.get("precision", "")).lower()
    if "TPU" in row["hardware"]:
        return _missing_of_tpu(row)
    if "8" in precision or "nvfp4" in precision or "not stated" in precision:
        return "numbers of 8 bits, or not stated"
    if row.get("pp") not in (None, 1) and not (row["framework"].startswith("Megatron-LM") and row.get("micro_batch")):
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


def _missing_of_tpu(row: Mapping[str, Any]) -> str | None:
    if "v6e" not in row["hardware"]:
        return "no preset for this TPU, or what its remat keeps"
    if row.get("experts") and "capacity_factor" not in row.get("maxtext_config", {}):
        return "a mixture of experts"
    return None if row.get("layers") and row.get("global_batch") else "sizes or seconds"


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
    reduced_bytes = 2**25 if "126M" in row["model"] else 51200
    options = _MAXTEXT_OPTIONS if is_llama else {**_PAXML_OPTIONS, _COMBINED_REDUCTIONS: reduced_bytes}
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
        xla_options=options,
    )


def _tpu(number: int, row: Mapping[str, Any]) -> Run:
    """MaxText on slices of v6e: state and batch over both dimensions of the torus, and over slices.

    What remat keeps on the host is kept on the device here, because copies to hosts overlap with arithmetic.
    """
    slices = int(row["hardware"].split("-")[1].split(" x")[1].split()[0])
    chips = row["num_devices"] // slices
    rows = 2 ** (math.floor(math.log2(chips)) // 2)
    mesh_axes = {"slice": slices} if slices > 1 else {}
    mesh_axes |= {"x": rows, "y": chips // rows}
    kept = row["maxtext_config"]
    remat: Remat = (
        "projections"
        if "out_proj" in kept
        else "queries, keys and values"
        if "query_proj" in kept or "qkv" in row["remat"]
        else "full"
    )
    is_gpt = "GPT" in row["model"]
    # One row has more sequences in its batch than its tokens are: seconds were measured with the tokens.
    length = row.get("seq") or row["tokens_per_step"] // row["global_batch"]
    return Run(
        number=number,
        name=f"{row['model']}, {row['num_devices']} v6e, MaxText",
        family=_family(row),
        model=f"{row['model']} v6e",
        sizes=dataclasses.replace(
            _sizes({**row, "seq": length}, gated=not is_gpt, tied=is_gpt),
            experts=row.get("experts", 0),
            capacity_factor=float(kept.get("capacity_factor", 1)),
        ),
        split=Split(tuple(mesh_axes), None, tuple(mesh_axes)),
        remat=remat,
        mesh_axes=mesh_axes,
        batch=row["tokens_per_step"] // length,
        accumulation=1,
        attention="cudnn",
        device="tpu_v6e",
        seconds=_seconds(row),
        is_scanned=True,
    )


def _other(number: int, row: Mapping[str, Any], family: str) -> Run | NotRebuilt:
    """Megatron with tensor parallelism, and Llama in PyTorch FSDP, sharded within hosts."""
    stages = int(row.get("pp") or 1)
    devices, tensor = row["num_devices"] // stages, int(row["tp"])
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
        name=f"{row['model']}, {row['num_devices']} {device}, {row['framework'].split(' (')[0]}",
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
        stages=stages,
    )
