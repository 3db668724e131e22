"""What the search for a pipeline decides, in a form from which every process makes the programs again.

In a job of several processes the first one decides, and every process makes the pipeline of what it says. A plan keeps
the same messages, so that a process that has the plan decides nothing. The keys of arrays are variables of a trace,
which every process makes for itself. All traces are the same, so that an array is known by its place among the arrays
of the staged step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cost.pipeline_schedules import Schedule
from diffshard.base import PlanError
from diffshard.pipelines.cutting import UncutStep
from diffshard.pipelines.options import PipelineOptions
from diffshard.pipelines.plans.base import Decision, PipelinePlanData
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.stage_search import StageLayout
from diffshard.plans.documents import DAMAGE
from diffshard.plans.json_values import from_json_values, to_json_values
from diffshard.processes import Processes
from diffshard.sharding_search.fingerprints import digest_of, key_text, setting_facts, versions
from diffshard.sharding_search.program_text import program_text, value_text
from search_spaces.partition_specs import NamedSpec
from search_spaces.pipelines.stage_labels import Key
from search_spaces.pipelines.stage_programs import StagedStep, copy_of

T = TypeVar("T")
_PROGRAM = "the program that the function traces to"
DAMAGED_DECISIONS = "The decisions of the plan are not those of its stages: it is damaged, or of other hardware."


@dataclass(frozen=True)
class RecordingProcesses(Processes):
    """Processes that write down what their first one decides.

    Attributes:
      made: what was decided and what writes it as bytes, in order.
    """

    made: list[tuple[str, Callable[[], bytes]]] = field(default_factory=list, compare=False)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions so far."""
        return tuple(Decision(what, json.loads(pack())) for what, pack in self.made)

    def _from_first(
        self, what: str, name: str, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]
    ) -> T:
        made = super()._from_first(what, name, make, pack, unpack)
        self.made.append((what, partial(pack, made)))
        return made


@dataclass(frozen=True)
class DecidedProcesses(Processes):
    """Processes that take decisions from a plan, in its order, and decide nothing themselves."""

    decisions: tuple[Decision, ...] = ()
    taken: list[str] = field(default_factory=list, compare=False)

    @property
    def are_taken(self) -> bool:
        """Returns whether all decisions of the plan are taken."""
        return len(self.taken) == len(self.decisions)

    def _from_first(
        self, what: str, name: str, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]
    ) -> T:
        if self.are_taken:
            raise PlanError(f"{DAMAGED_DECISIONS} It does not decide to {what}.")
        decision = self.decisions[len(self.taken)]
        self.taken.append(what)
        if decision.what != what:
            raise PlanError(f"The plan decides to {decision.what}, where the function asks to {what}.")
        return unpack(json.dumps(decision.content).encode())


class ChosenPipeline(NamedTuple):
    """A chosen pipeline, before the programs of its stages are planned.

    Attributes:
      num_microbatches: M.
      stages: the layers and the submesh of each.
      in_flight: `[S]`, how many micro-batches each keeps at most.
      bound_s: no pipeline that could be chosen takes less.
      tried: numbers of micro-batches and schedules with the seconds of the best step.
      num_groups: R, over how many groups of examples gradients are reduced once; 1: in each micro-batch.
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
    stages_per_device: int = 1


def shared_layouts(
    processes: Processes, staged: StagedStep, solve: Callable[[], list[StageLayout]]
) -> list[StageLayout]:
    """Returns the layouts of the stages that the first process finds; in one process only, it just solves them.

    Args:
      processes: those that own devices of the cluster.
      staged: the step in stages, the same in all of them.

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


def not_decided() -> Any:
    """Stands for what is to be decided where a plan has to have it."""
    raise PlanError("The plan has no decisions.")


def layouts_of(plan: PipelinePlanData, staged: StagedStep) -> list[StageLayout]:
    """Returns the shardings of the stages of a plan without replicas for the same stages; none if it is damaged."""
    try:
        return shared_layouts(DecidedProcesses((0,), plan.decisions[1:]), staged, not_decided)
    except (PlanError, *DAMAGE):
        return []


def request_facts(options: PipelineOptions) -> dict[str, str]:
    """Returns the texts of what is asked for, which have to be the same in all processes; a time limit need not be."""
    devices = [device.id for kind in options.cluster.devices for host in kind for device in host]
    return {
        "`pipeline`": str(options.pipeline),
        "`memory_limit_bytes`": repr(options.memory_limit_bytes),
        "`solver`": value_text(options.solver),
        "`key`": key_text(options.key),
        "`executor`": value_text(options.executor),
        "`check`": options.judged_by,
        "`donate_argnums`": value_text((options.donate_argnums, options.donate_argnames)),
        "the cluster": str(options.cluster),
        "the devices of the cluster": str(devices),
        **setting_facts(),
    }


def trace_facts(steps: Sequence[UncutStep]) -> Mapping[str, str]:
    """Returns the texts of a traced step, which have to be the same in all processes."""
    counts = str([step.parts.num_microbatches for step in steps])
    given = dict(zip(steps[0].call.paths, steps[0].given, strict=False))
    return {
        "the numbers of micro-batches that divide the batch": counts,
        "`in_shardings`": str({path: str(spec) for path, spec in given.items() if spec is not None}),
        **_step_facts(steps[0]),
    }


def planned_facts(step: UncutStep) -> dict[str, str]:
    """Returns the texts of a traced step that a plan keeps, to tell the function that it was made for from others."""
    facts = _step_facts(step)
    return {**facts, _PROGRAM: digest_of({_PROGRAM: facts[_PROGRAM]})}


def _step_facts(step: UncutStep) -> dict[str, str]:
    call = step.call
    arrays = zip(call.paths, call.arrays, strict=True)
    return {
        **{f"`{path}`": f"{array.dtype}[{','.join(map(str, array.shape))}]" for path, array in arrays},
        "what the results replace in the next call": str(tuple(call.feedback)),
        _PROGRAM: program_text(call.program),
    }


def question_facts(options: PipelineOptions, steps: Sequence[UncutStep]) -> dict[str, str]:
    """Returns the texts on which the best pipeline depends, with the versions that decide it."""
    return {**versions(), **request_facts(options), **trace_facts(steps)}


def program_facts(staged: StagedStep) -> Mapping[str, str]:
    """Returns the texts of the programs of the stages, which have to be the same in all processes."""
    return {
        f"the {label.kind} program {label.phase} of stage {label.stage}": program_text(program.program)
        for label, program in staged.programs.items()
    }
