"""What the first process of a job finds of a pipeline, in a form that all others can read.

The keys of arrays are variables of a trace, which every process makes for itself. All traces are the same, so that an
array is known by its place among the arrays of the staged step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cost.pipeline_schedules import Schedule
from diffshard.pipelines.cutting import UncutStep
from diffshard.pipelines.options import PipelineOptions
from diffshard.pipelines.stage_programme import Stage
from diffshard.pipelines.stage_search import StageLayout
from diffshard.plans.json_values import from_json_values, to_json_values
from diffshard.processes import Processes
from diffshard.sharding_search.fingerprints import versions
from diffshard.sharding_search.program_text import program_text, value_text
from search_spaces.partition_specs import NamedSpec
from search_spaces.pipelines.stage_keys import Key
from search_spaces.pipelines.stage_programs import StagedStep, copy_of


class ChosenPipeline(NamedTuple):
    """What a search chose, before the programs of its stages are planned.

    Attributes:
      num_microbatches: M.
      schedule: of the forward and backward operations.
      stages: the layers and the submesh of each.
      in_flight: `[S]`, how many micro-batches each keeps at most.
      bound_s: no pipeline that could be chosen takes less.
      tried: numbers of micro-batches and schedules with the seconds of the best step.
      num_groups: R, over how many groups of examples gradients are reduced once; 1: in each micro-batch.
      notes: sentences for the user.
      recomputed: `[S]`, what each makes again (`StageLayout.recomputed`); empty: each stage is searched for it.
      offloaded: `[S]`, what waits on the host (`StageLayout.offloaded`); as long as `recomputed`.
      estimate_s: what a step takes before the programs of the stages are planned one by one.
    """

    num_microbatches: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    in_flight: tuple[int, ...]
    bound_s: float
    tried: tuple[tuple[int, Schedule, float], ...]
    num_groups: int = 1
    notes: tuple[str, ...] = ()
    recomputed: tuple[tuple[int, ...], ...] = ()
    offloaded: tuple[tuple[int, ...], ...] = ()
    estimate_s: float = 0.0


def shared_layouts(
    processes: Processes, staged: StagedStep, solve: Callable[[], list[StageLayout]]
) -> list[StageLayout]:
    """Returns the layouts of the stages that the first process finds; in one process only, it just solves them.

    Args:
      processes: those that own devices of the cluster.
      staged: the step in stages, the same in all of them.
      solve: finds the layouts.

    Raises:
      InfeasibleError: as `solve`, in all processes.
      ProcessesError: as `Processes.shared`.
    """
    keys = [form for key in staged.avals for form in (key, copy_of(key))]
    places: dict[Key, int] = {key: place for place, key in enumerate(keys)}

    def pack(layouts: Sequence[StageLayout]) -> bytes:
        specs = [[(places.get(key, key), spec) for key, spec in layout.specs.items()] for layout in layouts]
        values = [to_json_values(replace(layout, specs={})) for layout in layouts]
        return json.dumps([{**v, "specs": own} for v, own in zip(values, specs, strict=True)], allow_nan=False).encode()

    def specs_of(pairs: Sequence[tuple[Any, Any]]) -> dict[Key, NamedSpec]:
        read = [(from_json_values(Any, place), from_json_values(NamedSpec, spec)) for place, spec in pairs]
        return {keys[place] if isinstance(place, int) else place: spec for place, spec in read}

    def unpack(content: bytes) -> list[StageLayout]:
        converters = {dict[Key, NamedSpec]: specs_of}
        return [from_json_values(StageLayout, values, converters) for values in json.loads(content)]

    return processes.shared("find the shardings of a pipeline's stages", solve, pack=pack, unpack=unpack)


def request_facts(options: PipelineOptions) -> dict[str, str]:
    """Returns the texts of what is asked for, which have to be the same in all processes; a time limit need not be."""
    devices = [device.id for kind in options.cluster.devices for host in kind for device in host]
    return {
        "`pipeline`": str(options.pipeline),
        "`memory_limit_bytes`": repr(options.memory_limit_bytes),
        "`solver`": value_text(options.solver),
        "`donate_argnums`": value_text((options.donate_argnums, options.donate_argnames)),
        "the cluster": str(options.cluster),
        "the devices of the cluster": str(devices),
    }


def trace_facts(steps: Sequence[UncutStep]) -> Mapping[str, str]:
    """Returns the texts of a traced step, which have to be the same in all processes."""
    call = steps[0].call
    arrays = zip(call.paths, call.arrays, strict=True)
    return {
        **{f"`{path}`": f"{array.dtype}[{','.join(map(str, array.shape))}]" for path, array in arrays},
        "the numbers of micro-batches that divide the batch": str([step.parts.num_microbatches for step in steps]),
        "what the results replace in the next call": str(tuple(call.feedback)),
        "the program that the function traces to": program_text(call.program),
    }


def search_facts(options: PipelineOptions, steps: Sequence[UncutStep]) -> dict[str, str]:
    """Returns the texts on which what a search decides depends, with the versions that decide it."""
    limit = {"`time_limit_s`": repr(options.time_limit_s)}
    return {**versions(), **request_facts(options), **limit, **trace_facts(steps)}


def program_facts(staged: StagedStep) -> Mapping[str, str]:
    """Returns the texts of the programs of the stages, which have to be the same in all processes."""
    return {
        f"the {label.kind} program {label.phase} of stage {label.stage}": program_text(program.program)
        for label, program in staged.programs.items()
    }
