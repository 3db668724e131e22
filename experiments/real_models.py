"""Whole real models on 8 to 2,048 absent H100s: seconds of planning and compiling, and what their steps would take.

    python -m experiments.real_models [--models "Llama 3 70B" ...] [--devices 64 256] [--no-compile] [--records FILE]

Each step (scanned layers, float32 state, bfloat16 arithmetic, adamw, fused attention) is planned freely on a mesh of
hosts and their 8 devices, once for each way to compute activations again, and the fastest that fits is kept. It is
priced with kernels as they were measured. Then it is compiled for H100s (the extra `gpu-compile`). Attention is not
split over sequences. Nothing is executed. Published speeds stand beside where there are any, and what differs.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import diffshard
from cost.base import Hardware
from cost.calibration import measured_preset
from experiments.long_context import attention_split_by
from experiments.models import expert_decoder
from experiments.models.expert_decoder import ExpertSizes, LatentAttention
from experiments.published import decoder
from experiments.published.decoder import Remat, Sizes, training_step
from experiments.tables import print_table
from experiments.targets import h100_mesh
from search_spaces.sharding.custom_calls.cudnn import planned_without_cudnn

PEAK_FLOPS_PER_S = 989e12  # of an H100 in bfloat16, without sparsity; source as of the preset
TPU_PEAK_FLOPS_PER_S = 918e12  # of a TPU v6e in bfloat16. Source: docs.cloud.google.com/tpu/docs/v6e
REMATS: tuple[Remat, ...] = ("products and attention", "full")
"""What is tried for each model, from little that is computed again to everything."""


@dataclass(frozen=True)
class RealModel:
    """A model as it was trained.

    Attributes:
      sizes: of the decoder.
      sequences_per_device: in a step.
      devices: numbers of devices to plan for.
      published: by number of devices, tokens per second and device that others reached.
      difference: what is different there.
      tpu_flops_per_s: of a TPU v6e, as MaxText trained it in bfloat16; its peak is `TPU_PEAK_FLOPS_PER_S`.
    """

    sizes: Sizes
    sequences_per_device: int
    devices: tuple[int, ...]
    published: dict[int, float]
    difference: str = ""
    tpu_flops_per_s: float | None = None


_MEGATRON = "FP8, Megatron-Core"
# Sources: Dubey et al., The Llama 3 herd of models (arXiv:2407.21783), table 3; Brown et al. (arXiv:2005.14165), table
# 2.1; and as `experiments.models.expert_decoder`. Speeds are rows 218, 131, 106, 374 and 227 of the training runs that
# `experiments.published_runs` reads, and rows 34, 29, 27, 24 and 37 on TPUs.
MODELS: dict[str, RealModel] = {
    "Llama 3 8B": RealModel(
        Sizes(32, 4096, 32, 8, 14336, 128256, 8192, gated=True), 2, (8, 64), {8: 14079.0}, _MEGATRON, 413.4e12,
    ),
    "Llama 3 70B": RealModel(
        Sizes(80, 8192, 64, 8, 28672, 128256, 8192, gated=True), 1, (64, 256), {64: 1633.0}, _MEGATRON, 422.1e12,
    ),
    "Llama 3 405B": RealModel(
        Sizes(126, 16384, 128, 8, 53248, 128256, 8192, gated=True), 1, (1024, 2048), {1024: 328.0}, _MEGATRON, 392.5e12,
    ),
    "GPT-3 175B": RealModel(
        Sizes(96, 12288, 96, 96, 49152, 51200, 2048, tied=True), 2, (128, 2048), {128: 697.0}, _MEGATRON, 384.9e12,
    ),
    "Mixtral 8x7B": RealModel(
        ExpertSizes(32, 4096, 32, 8, 0, 32000, 4096, gated=True, experts=8, chosen=2, expert_hidden=14336),
        4, (64, 256), {}, "", 302.3e12,
    ),
    "DeepSeek-V3": RealModel(
        ExpertSizes(
            61, 7168, 128, 128, 18432, 129280, 4096, gated=True, experts=256, chosen=8, expert_hidden=2048,
            shared=True, dense_layers=3, latent=LatentAttention(1536, 512, 64, 128),
        ),
        2, (256, 2048), {256: 1002.0}, "bfloat16, pipeline of 4, experts over 64, NeMo",
    ),
}  # fmt: skip


class Row(NamedTuple):
    """The results of one model on some devices.

    Attributes:
      model, devices, batch: what is planned.
      remat: what is computed again.
      plan_s, compile_s: processor seconds; NaN where it was not compiled.
      step_s, gap, peak_bytes: of the plan.
      tokens_per_s: of a device.
      model_share: arithmetic that the model needs, without what is computed again, over the peak rate.
      compiled_bytes: memory by the compiler.
      waiting_share: of the step, for links.
      note: why there is no plan or program.
    """

    model: str
    devices: int
    batch: int
    remat: str = ""
    plan_s: float = math.nan
    compile_s: float = math.nan
    step_s: float = math.nan
    gap: float = math.nan
    peak_bytes: float = math.nan
    tokens_per_s: float = math.nan
    model_share: float = math.nan
    compiled_bytes: float = math.nan
    waiting_share: float = math.nan
    note: str = ""


def num_params(sizes: Sizes) -> tuple[float, float]:
    """Returns how many parameters there are, and how many a token is multiplied by."""
    params = _abstract_state(sizes)[0]
    total = active = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        total += leaf.size
        if name == "embedding" and sizes.tied:
            active += leaf.size
        elif name not in ("embedding", "positions") and not name.endswith("norm"):
            share = sizes.chosen / sizes.experts if name.startswith("expert_") and isinstance(sizes, ExpertSizes) else 1
            active += share * leaf.size
    return total, active


def flops_per_token(sizes: Sizes) -> float:
    """Returns the arithmetic that a training step needs for each token: forward, and twice as much backward.

    Attention is causal, so that half of its products count.
    """
    latent = sizes.latent if isinstance(sizes, ExpertSizes) else None
    query, value = (latent.head + latent.position, latent.head) if latent else (sizes.head, sizes.head)
    attention = sizes.layers * sizes.sequence * sizes.heads * (query + value)
    return 3 * (2 * num_params(sizes)[1] + attention)


def step_of(sizes: Sizes, remat: Remat) -> Callable[[Any, jax.Array], Any]:
    """Returns the training step, with the sharding of everything left open."""
    if isinstance(sizes, ExpertSizes):
        return training_step(expert_decoder.loss_function(sizes, remat), 1, None)
    no_mesh = jax.sharding.AbstractMesh((), ())
    return training_step(decoder.loss_function(sizes, None, no_mesh, remat, "cudnn"), 1, None)


def arguments_of(sizes: Sizes, batch: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns state and tokens of a step."""
    return _abstract_state(sizes), jax.ShapeDtypeStruct((batch, sizes.sequence + 1), jnp.int32)


def planned(
    sizes: Sizes, batch: int, mesh: Any, hardware: Hardware, remats: Sequence[Remat], time_limit_s: float | None
) -> tuple[Remat, diffshard.Plan, Any]:
    """Returns the fastest of the plans with each remat that fit the memory, and its searched step.

    Raises:
      InfeasibleError: none fits.
    """
    found: list[tuple[Remat, diffshard.Plan, Any]] = []
    reason: diffshard.InfeasibleError | None = None
    for remat in remats:
        step = diffshard.search(
            step_of(sizes, remat), mesh, hardware=hardware, donate_argnums=0, time_limit_s=time_limit_s
        )
        try:
            found.append((remat, step.plan(*arguments_of(sizes, batch)), step))
        except diffshard.InfeasibleError as error:
            reason = error
    if not found:
        assert reason is not None
        raise reason
    return min(found, key=lambda one: one[1].step_s)


def row_of(
    name: str, model: RealModel, devices: int, *, time_limit_s: float | None = None, compiles: bool = True
) -> Row:
    """Plans and compiles a model for a number of devices."""
    sizes, batch = model.sizes, model.sequences_per_device * devices
    axes = {"hosts": devices // 8, "local": 8} if devices > 8 else {"local": devices}
    row = Row(name, devices, batch)
    mesh = h100_mesh(tuple(axes.values())) if compiles else _abstract_mesh(axes)
    hardware = measured_preset("h100", dict(zip(mesh.axis_names, axes.values(), strict=True)))
    with planned_without_cudnn(), attention_split_by("heads"):
        start_s = time.process_time()
        try:
            remat, plan, step = planned(sizes, batch, mesh, hardware, REMATS, time_limit_s)
        except diffshard.InfeasibleError as error:
            return row._replace(plan_s=time.process_time() - start_s, note=str(error))
        tokens = batch * sizes.sequence / plan.step_s / devices
        row = row._replace(
            remat=remat,
            plan_s=time.process_time() - start_s,
            step_s=plan.step_s,
            gap=plan.gap,
            peak_bytes=plan.peak_bytes,
            tokens_per_s=tokens,
            model_share=tokens * flops_per_token(sizes) / PEAK_FLOPS_PER_S,
            waiting_share=1 - plan.compute_s / plan.step_s,
        )
        if not compiles:
            return row
        start_s = time.process_time()
        try:
            memory = step.lower(*arguments_of(sizes, batch)).compile().memory_analysis()
        except Exception as error:  # the compiler of another version may refuse what is not its own
            return row._replace(note=f"not compiled: {error}".splitlines()[0])
    return row._replace(compile_s=time.process_time() - start_s, compiled_bytes=memory.peak_memory_in_bytes)


def _abstract_state(sizes: Sizes) -> Any:
    if not isinstance(sizes, ExpertSizes):
        return decoder.abstract_state(sizes)
    params = expert_decoder.abstract_params(sizes)
    return params, jax.eval_shape(optax.adamw(1e-4).init, params)


def _abstract_mesh(axes: dict[str, int]) -> jax.sharding.AbstractMesh:
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


def cells(row: Row, model: RealModel) -> tuple[str, ...]:
    """Returns a row of the table."""
    published = model.published.get(row.devices)
    beside = "-" if published is None else f"{published:,.0f}"
    if math.isnan(row.step_s):
        return row.model, f"{row.devices:,}", str(row.batch), "none fits", f"{row.plan_s:.0f}", *("-",) * 7, beside
    return (
        row.model, f"{row.devices:,}", str(row.batch), row.remat, f"{row.plan_s:.0f}", f"{row.compile_s:.0f}",
        f"{row.step_s:.3g}", f"{row.gap:.2%}", f"{row.waiting_share:.0%}", f"{row.tokens_per_s:,.0f}",
        f"{row.model_share:.0%}", f"{row.peak_bytes / 2**30:.0f} / {row.compiled_bytes / 2**30:.0f}", beside,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None, models: dict[str, RealModel] = MODELS) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(models))
    parser.add_argument("--devices", nargs="+", type=int, help="only these numbers")
    parser.add_argument("--no-compile", action="store_true", help="plans only, without the extra `gpu-compile`")
    parser.add_argument("--time-limit", type=float, help="seconds for each search; none by default")
    parser.add_argument("--records", type=Path, help="a file of rows: those already there are not made again")
    options = parser.parse_args(arguments)
    known = [Row(**json.loads(line)) for line in _lines(options.records)]
    rows: list[tuple[str, ...]] = []
    for name in options.models:
        for devices in models[name].devices:
            if options.devices and devices not in options.devices:
                continue
            row = next((r for r in known if (r.model, r.devices) == (name, devices)), None)
            if row is None:
                compiles = not options.no_compile
                row = row_of(name, models[name], devices, time_limit_s=options.time_limit, compiles=compiles)
                if options.records:
                    with options.records.open("a") as file:
                        file.write(json.dumps(row._asdict()) + "\n")
            rows.append(cells(row, models[name]))
            print(*rows[-1], row.note, sep=" | ", flush=True)
    columns = (
        "model", "H100s", "sequences", "computed again", "plan CPU s", "compile CPU s", "step s", "gap", "waiting",
        "tokens/s each", "of peak", "peak GiB / compiled", "published",
    )  # fmt: skip
    print_table("Whole models, predicted on H100s", columns, rows)
    facts = [(name, *facts_of(model)) for name, model in models.items()]
    columns = ("model", "G parameters", "G for each token", "sequence", "published is", "of peak, MaxText on v6e")
    print_table("Models", columns, facts)


def facts_of(model: RealModel) -> tuple[str, ...]:
    """Returns a model's cells in the table of models."""
    total, used = num_params(model.sizes)
    tpu = "-" if model.tpu_flops_per_s is None else f"{model.tpu_flops_per_s / TPU_PEAK_FLOPS_PER_S:.0%}"
    return f"{total / 1e9:,.1f}", f"{used / 1e9:,.1f}", str(model.sizes.sequence), model.difference or "-", tpu


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


if __name__ == "__main__":
    main()
