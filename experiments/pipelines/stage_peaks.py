"""The predicted peak memory of each stage of a pipeline beside XLA's, compiled for H100s.

    python -m experiments.pipelines.stage_peaks [--models mlp gpt ...] [--stages 2 4] [--schedule 1f1b] [--programs]

Each model is cut into stages of about as many layers, on two or four parts of a host of eight H100s that need not be
there (`pip install '.[gpu-compile]'`). The peak that the search predicts for a stage stands beside the one that
`experiments.pipelines.stage_memory` finds: XLA's bytes of each compiled program, and the arrays between programs.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from cost.clusters import Cluster
from cost.pipeline_schedules import Schedule, graph_of, kept_microbatches
from diffshard.checks.targets import gpu_mesh
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.cutting import uncut_step
from diffshard.pipelines.decisions import ChosenPipeline
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline, planned_pipeline
from diffshard.pipelines.stage_calls import StageCalls
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.step_search import StepSearch
from diffshard.processes import Processes
from experiments.models import decoder, diffusion_transformer, encoder_decoder, gpt, mlp, moe, tied_gpt
from experiments.models.model import Model, abstract_arguments
from experiments.pipelines.stage_memory import StageMemory, stage_memory
from experiments.tables import print_table
from experiments.zoo import muon_decoder
from experiments.zoo.base import TrainingStep

_SIZES = {"layers": 4, "width": 1024, "heads": 8, "vocabulary": 8192, "sequence": 512}
_GPT = partial(gpt.make, batch=64, **_SIZES)
MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: mlp.make(layers=8, width=2048, batch=65536),
    "gpt": _GPT,
    "gpt, remat": partial(_GPT, block=nn.remat(gpt.Block)),
    "gpt, scanned": partial(_GPT, stack=gpt.scanned),
    "gpt, scanned, remat": partial(_GPT, stack=gpt.scanned, block=nn.remat(gpt.Block)),
    "gpt, tied, bfloat16, remat": partial(tied_gpt.make, batch=64, **_SIZES),
    "mixture of experts": partial(moe.make, batch=64, **_SIZES),
    "encoder and decoder": lambda: encoder_decoder.make(
        batch=64, layers=2, width=1024, heads=8, hidden=4096, vocabulary=8192, source=512, target=256
    ),
}
HELD_OUT: dict[str, Callable[[], Model]] = {
    "decoder": partial(decoder.make, batch=64, hidden=4096, key_value_heads=2, **_SIZES),
    "diffusion transformer": lambda: diffusion_transformer.make(
        batch=256, layers=4, width=1024, heads=8, hidden=4096, latent=32, patch=2, classes=1000
    ),
    "muon decoder": lambda: _of_zoo("muon decoder", partial(muon_decoder.make, batch=64, **_SIZES)),
}
"""Models at which nobody looked while the prediction was improved; at the decoder only once before the end."""
NUM_DEVICES, NUM_MICROBATCHES = 8, 8
COLUMNS = ("model", "stages", "stage", "mesh", "in flight", "predicted MB", "XLA MB", "ratio", "peak in")
SUMMARY_COLUMNS = ("model", "stages", "within 10%", "least ratio", "median", "largest")


def _of_zoo(name: str, make: Callable[[], TrainingStep]) -> Model:
    """Returns a model of the zoo, without its arrays."""
    made: list[TrainingStep] = []

    def arguments() -> tuple[Any, Any]:
        made.append(make())
        return made[0].state, made[0].batch

    state, batch = jax.eval_shape(arguments)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        *new_state, loss = made[0].function(*state, *batch)
        return tuple(new_state), loss

    def zeros(shapes: Any) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return Model(name, step, lambda key: zeros(state), lambda key: zeros(batch))


class StagePeak(NamedTuple):
    """A stage's peak.

    Attributes:
      model, num_stages, stage: which stage it is.
      mesh_axes: its mesh.
      in_flight: how many micro-batches it keeps at most.
      predicted_bytes: by the search.
      compiled: XLA's.
    """

    model: str
    num_stages: int
    stage: int
    mesh_axes: dict[str, int]
    in_flight: int
    predicted_bytes: float
    compiled: StageMemory

    @property
    def ratio(self) -> float:
        """The predicted peak over the compiled one."""
        return self.predicted_bytes / self.compiled.peak_bytes


def h100s() -> list[Any]:
    """Returns the devices of a host of H100s that is only described."""
    return list(gpu_mesh({"x": NUM_DEVICES}).devices.flat)


def evenly_cut(
    model: Model, num_stages: int, schedule: Schedule, devices: Sequence[Any]
) -> tuple[FoundPipeline, StepSearch]:
    """Plans a model's step in stages of about as many layers, on equal parts of a host; it is priced as one of H100s.

    Args:
      model: the step.
      num_stages: a divisor of 8.
      schedule: of the stages.
      devices: the host's 8 devices.
    """
    cluster = Cluster.from_devices(devices, hardware="h100")
    pipeline = Pipeline(microbatches=NUM_MICROBATCHES, max_stages=num_stages, schedules=(schedule,))
    options = PipelineOptions(fn=model.step, cluster=cluster, pipeline=pipeline, donate_argnums=(0,))
    arguments = abstract_arguments(model)
    step = uncut_step(options.fn, NUM_MICROBATCHES, pipeline.batch, arguments, {})
    search = StepSearch(options, step, donated_arrays(options, arguments, {}))
    bounds = [len(search.chain) * i // num_stages for i in range(num_stages + 1)]
    sizes = [submesh.num_devices for submesh in search.submeshes]
    submesh = sizes.index(NUM_DEVICES // num_stages)
    chosen = ChosenPipeline(
        NUM_MICROBATCHES,
        schedule,
        tuple(Stage(a, b, submesh) for a, b in itertools.pairwise(bounds)),
        tuple(kept_microbatches(schedule, num_stages - i, NUM_MICROBATCHES) for i in range(num_stages)),
        0.0,
        (),
    )
    return planned_pipeline(search, chosen, Processes((0,))), search


def measure(name: str, model: Model, num_stages: int, schedule: Schedule, devices: Sequence[Any]) -> list[StagePeak]:
    """Plans and compiles a model in stages, as `evenly_cut`, and returns the peaks of all of them."""
    found, search = evenly_cut(model, num_stages, schedule, devices)
    flags = donated_arrays(search.options, abstract_arguments(model), {})
    calls = StageCalls(
        found.staged,
        [stage.mesh for stage in found.plans.stages if isinstance(stage.mesh, Mesh)],
        found.plans.sharding,
        found.plans.function,
        found.step.donated(flags),
    )
    compiled = stage_memory(calls, graph_of(found.plan.schedule, num_stages, NUM_MICROBATCHES))
    return [
        StagePeak(name, num_stages, i, dict(stage.mesh_axes), stage.in_flight, stage.peak_bytes, memory)
        for i, (stage, memory) in enumerate(zip(found.plan.stages, compiled, strict=True))
    ]


def cells(peak: StagePeak) -> tuple[str, ...]:
    """Returns the cells of a stage's row in the table."""
    return (
        peak.model,
        str(peak.num_stages),
        str(peak.stage),
        "x".join(map(str, peak.mesh_axes.values())),
        str(peak.in_flight),
        f"{peak.predicted_bytes / 1e6:.0f}",
        f"{peak.compiled.peak_bytes / 1e6:.0f}",
        f"{peak.ratio:.2f}",
        peak.compiled.peak.kind,
    )


def main(argv: Sequence[str] | None = None) -> list[StagePeak]:
    """Plans and compiles the models, prints both tables, and returns the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *HELD_OUT], default=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedule", choices=["1f1b", "eager", "gpipe"], default="1f1b")
    parser.add_argument("--programs", action="store_true", help="also print XLA's bytes of each program")
    options = parser.parse_args(argv)
    peaks: list[StagePeak] = []
    devices = h100s()
    for name in options.models:
        for num_stages in options.stages:
            begin_s = time.process_time()
            own = measure(name, {**MODELS, **HELD_OUT}[name](), num_stages, options.schedule, devices)
            for peak in own:
                print(" | ".join(cells(peak)), flush=True)
                if options.programs:
                    _print_programs(peak)
            print(f"  {time.process_time() - begin_s:.0f} processor seconds", flush=True)
            peaks += own
    print_tables(peaks)
    return peaks


def print_tables(peaks: Sequence[StagePeak]) -> None:
    """Prints a table of all stages, and one with a row for each model and one for all."""
    print_table("Peaks of stages on H100s", COLUMNS, [cells(peak) for peak in peaks])
    names = dict.fromkeys(peak.model for peak in peaks)
    rows = [summary(name, [peak for peak in peaks if peak.model == name]) for name in names]
    print_table("By model", SUMMARY_COLUMNS, [*rows, summary("all", peaks)])


def _print_programs(peak: StagePeak) -> None:
    memory = peak.compiled
    lives = memory.step_bytes, memory.sum_bytes, memory.microbatch_bytes
    print("  step {:.0f}, sums {:.0f}, micro-batches {:.0f} MB".format(*(n / 1e6 for n in lives)))
    for label, program in memory.programs.items():
        numbers = program.argument_bytes, program.output_bytes, program.alias_bytes, program.temporary_bytes
        text = "reads {:.0f}, leaves {:.0f}, in place {:.0f}, temporary {:.0f} MB".format(*(n / 1e6 for n in numbers))
        print(f"  {label.kind}: {text}")


def summary(name: str, peaks: Sequence[StagePeak]) -> tuple[str, ...]:
    """Returns the cells of a row that says how near the predictions of some stages are."""
    ratios = [peak.ratio for peak in peaks]
    near = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
    numbers = min(ratios), float(np.median(ratios)), max(ratios)
    return name, str(len(peaks)), str(near), *(f"{number:.2f}" for number in numbers)


if __name__ == "__main__":
    main()
