"""Where the stages of a pipeline are, and the plans of their programs, which together run as their layouts say.

The layout of a whole stage (`stage_search`) says how it stores every array that goes from one of its programs to
another. With these fixed, the forward and the backward program are planned each for itself.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware
from cost.clusters import Cluster, Submesh
from cost.pipeline_schedules import BACKWARD, FORWARD, WEIGHTS, ScheduleGraph, in_flight
from diffshard.base import InfeasibleError
from diffshard.pipelines.copies import bytes_each, transfer_shardings
from diffshard.pipelines.cutting import CutStep
from diffshard.pipelines.options import PipelineOptions, mesh_shape
from diffshard.pipelines.stage_search import StageLayout
from diffshard.plans.base import Tensor
from diffshard.processes import Processes
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import plan_of_first_process
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.planning import find_plan
from search_spaces.partition_specs import NamedSpec, num_parts
from search_spaces.pipelines.divided_program import is_between
from search_spaces.pipelines.stage_labels import MICROBATCH_KINDS, Key, Label, ProgramKind
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.pipelines.step_parts import num_bytes


def place_stages(cluster: Cluster, submeshes: Sequence[Submesh]) -> list[list[int]]:
    """Returns the numbers of the devices of each stage, kind by kind and host by host; the largest are placed first.

    Raises:
      InfeasibleError: the parts of hosts that the stages need do not fit the hosts.
    """
    free: list[list[list[int]]] = []  # by kind and host
    number = 0
    for hosts in cluster.kinds:
        of_kind = []
        for _ in range(hosts.count):
            of_kind.append(list(range(number, number + hosts.devices)))
            number += hosts.devices
        free.append(of_kind)
    numbers: list[list[int]] = [[] for _ in submeshes]
    for i in sorted(range(len(submeshes)), key=lambda i: -submeshes[i].num_devices):
        kind, count = submeshes[i].kind, submeshes[i].num_devices
        in_host = min(count, cluster.kinds[kind].devices)
        hosts = [host for host in free[kind] if len(host) >= in_host][: count // in_host]
        if len(hosts) * in_host < count:
            raise InfeasibleError(
                f"The stages need {[s.num_devices for s in submeshes if s.kind == kind]} devices of hosts of "
                f"{cluster.kinds[kind].devices} x {cluster.kinds[kind].name}, of which there are {len(free[kind])}. "
                "Describe hosts with a power of two of devices, or give another `Pipeline.max_stages`."
            )
        for host in hosts:
            numbers[i] += host[:in_host]
            del host[:in_host]
    return numbers


def mesh_of(cluster: Cluster, numbers: Sequence[int], shape: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Returns the mesh of a stage; an abstract one where the cluster is only described."""
    if not cluster.devices:
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    flat = [device for kind in cluster.devices for host in kind for device in host]
    return Mesh(np.array([flat[n] for n in numbers]).reshape(tuple(shape.values())), tuple(shape))


def sends_s(
    staged: StagedStep, cluster: Cluster, submeshes: Sequence[Submesh], devices: Sequence[int] = ()
) -> tuple[list[float], list[float]]:
    """Returns the seconds of what a micro-batch sends from each stage to the next and back, `[S - 1]` both.

    Args:
      submeshes: `[S]`, of the stages.
      devices: `[S]`, numbers that are equal for stages on the same devices, which send each other nothing; by default
        there are none.
    """
    forward, backward = ([0.0] * (len(submeshes) - 1) for _ in range(2))
    for i, (one, other) in enumerate(itertools.pairwise(submeshes)):
        if not devices or devices[i] != devices[i + 1]:
            sent, returned = _sent_bytes(staged, i)
            forward[i], backward[i] = cluster.link_s(sent, one, other), cluster.link_s(returned, other, one)
    return forward, backward


def _sent_bytes(staged: StagedStep, i: int) -> tuple[float, float]:
    """Returns the bytes that a micro-batch sends from stage i to the next and back."""
    forward = backward = 0.0
    for key, label in staged.makers.items():
        for target in staged.readers.get(key, frozenset()) - {label.stage}:
            if label.kind == "forward" and label.stage <= i < target:
                forward += num_bytes(staged.avals[key])
            if label.kind == "backward" and target <= i < label.stage and not isinstance(key, tuple):
                backward += num_bytes(staged.avals[key])
    return forward, backward


def split_bytes(
    staged: StagedStep, stage: int, graph: ScheduleGraph, sharding: Callable[[int, Key], NamedSharding]
) -> int:
    """Returns the bytes that a stage keeps more on each device than its residuals times the micro-batches in flight.

    Args:
      staged: a step with split backward programs.
    """
    programs = [staged.programs.get(Label(kind, stage)) for kind in ("backward", "weights")]
    backward, weights = (set() if program is None else set(program.reads) for program in programs)

    def total(keys: set[Key], *kinds: str) -> int:
        of_kinds = (key for key in keys if key in staged.makers and staged.makers[key].kind in kinds)
        avals = ((key, staged.avals[key]) for key in of_kinds)
        return sum(bytes_each(aval.shape, aval.dtype, sharding(stage, key)) for key, aval in avals)

    before, after = total(backward | weights, "forward"), total(weights, "forward", "backward")
    change = {FORWARD: before, BACKWARD: after - before, WEIGHTS: -after}
    kinds = graph.kind[(graph.stage == stage)].tolist()
    most = max(itertools.accumulate(change.get(kind, 0) for kind in kinds))
    return most - int(in_flight(graph)[stage]) * before


def arguments_of(step: CutStep, staged: StagedStep, layout: StageLayout, stage: int) -> tuple[Tensor, ...]:
    """Returns the arguments that a stage keeps, with their shardings."""
    return tuple(
        Tensor(path, tuple(array.shape), str(array.dtype), layout.specs.get(key, ((),) * len(array.shape)))
        for path, array, key, home in zip(step.call.paths, step.call.arrays, staged.inputs, staged.homes, strict=True)
        if home == stage
    )


class StageDevices(NamedTuple):
    """The devices of a stage, and how its arrays lie on them.

    Attributes:
      mesh: its sub-mesh, of devices or abstract.
      hardware: of the mesh.
      layout: the specs of its arrays.
    """

    mesh: Mesh | AbstractMesh
    hardware: Hardware
    layout: StageLayout


def stage_devices(cluster: Cluster, submesh: Submesh, numbers: Sequence[int], layout: StageLayout) -> StageDevices:
    """Returns the mesh, the hardware and the layout of a stage, given the numbers of its devices in a cluster."""
    shape = mesh_shape(submesh)
    return StageDevices(mesh_of(cluster, numbers, shape), cluster.hardware(submesh.kind, shape), layout)


class StagePlans:
    """The plans of the forward and backward programs of all stages, and how arrays are stored between programs.

    Where a backward program is split, the plan of its first half says how it stores what the second one reads. XLA
    partitions the programs that begin and finish a step, between the shardings that are fixed here.

    Args:
      processes: those that own devices of any stage; the first one searches the plans of all.
      time_limit_s: for the solver, for each program.

    Attributes:
      plans: of the programs, by label.
    """

    def __init__(
        self,
        staged: StagedStep,
        stages: Sequence[StageDevices],
        processes: Processes,
        options: PipelineOptions,
        time_limit_s: float,
    ):
        self.staged, self.stages, self._options, self._processes = staged, list(stages), options, processes
        self._time_limit_s = time_limit_s
        self._functions: dict[Label, PlannedFunction[Plan]] = {}
        self._between: dict[Key, NamedSpec] = {}
        self.plans: dict[Label, Plan] = {}
        for label, program in staged.programs.items():
            if label.kind in MICROBATCH_KINDS:
                self._functions[label] = function = self._planned(program)
                self.plans[label] = plan = function.plan([staged.type_of(key) for key in program.reads])
                chosen = zip(program.makes, plan.outputs, strict=True)
                self._between.update({key: tensor.spec for key, tensor in chosen if is_between(key)})

    def seconds(self, label: Label) -> float:
        """Returns the predicted seconds of a program, with adding up its sums; 0 if there is none."""
        if label not in self.plans:
            return 0.0
        stage, added_bytes = self.stages[label.stage], 0.0
        for a in self.staged.programs[label].accumulations:
            parts = num_parts(stage.layout.specs.get(a.total, ()), stage.mesh.shape)
            added_bytes += 3 * num_bytes(self.staged.avals[a.total]) / parts  # reads both, writes one
        return self.plans[label].step_s + added_bytes / stage.hardware.reached_memory_bytes_per_s

    def pass_seconds(self, kind: ProgramKind) -> list[float]:
        """Returns the predicted seconds of each stage's program of a kind, `[S]`."""
        return [self.seconds(Label(kind, i)) for i in range(len(self.stages))]

    def function(self, program: StageProgram) -> Callable[..., Sequence[Any]]:
        """Returns the function that runs a program: with its plan, if it has one."""
        planned = self._functions.get(program.label)
        if planned is None:
            return core.jaxpr_as_fun(program.program)
        return lambda *arrays: list(planned([_of_strong_type(array) for array in arrays]).values())

    def sharding(self, stage: int, key: Key) -> NamedSharding:
        """Returns how a stage stores an array, on its own mesh."""
        return NamedSharding(self.stages[stage].mesh, self.spec(stage, key))  # type: ignore[arg-type]

    def transfer(self, key: Key, source: int, target: int) -> tuple[NamedSharding, NamedSharding]:
        """Returns how an array leaves a stage for another one, and how it arrives there."""
        meshes = self.stages[source].mesh, self.stages[target].mesh
        return transfer_shardings(self.staged.avals[key].shape, *meshes)

    def spec(self, stage: int, key: Key) -> PartitionSpec:
        """Returns how a stage stores an array; what it receives stays as it came, and small arrays are replicated."""
        maker = self.staged.makers.get(key)
        if maker is not None and maker.stage != stage and maker.kind != "begin":
            return self.transfer(key, maker.stage, stage)[1].spec
        named = self._between[key] if key in self._between else self.stages[stage].layout.specs.get(key, ())
        return PartitionSpec(*(axes or None for axes in named))

    def _planned(self, program: StageProgram) -> PlannedFunction[Plan]:
        label, devices, run = program.label, self.stages[program.label.stage], core.jaxpr_as_fun(program.program)
        total_of = {a.part: a.total for a in program.accumulations}
        specs = [None if is_between(k) else self._left_spec(label, k, total_of) for k in program.makes]

        def function(arrays: list[Any]) -> dict[str, Any]:
            made = run(*arrays)
            left = [
                array if spec is None else _fixed(array, devices.mesh, spec)
                for array, spec in zip(made, specs, strict=True)
            ]
            return {f"result {i:06}": array for i, array in enumerate(left)}  # sorted by name

        function.__name__ = function.__qualname__ = f"stage_{label.stage}_{label.kind}"
        asked_for = self._options
        options = Options(
            fn=function,
            mesh=devices.mesh,
            hardware=devices.hardware,
            memory_limit_bytes=devices.hardware.memory_bytes,
            in_shardings=([self.spec(label.stage, key) for key in program.reads],),
            progress="none",
            solver=asked_for.solver,
            key=asked_for.key,
            executor=asked_for.executor,
            judged_by=asked_for.judged_by,
            time_limit_s=self._time_limit_s,
        )
        find = asked_for.judge or find_plan
        return PlannedFunction(options, partial(plan_of_first_process, find, processes=self._processes))

    def _left_spec(self, label: Label, key: Key, total_of: dict[Key, Key]) -> PartitionSpec:
        """Returns how a program leaves an array: as its own stage stores it, or else as it is sent."""
        readers = self.staged.readers.get(key, frozenset())
        if key in total_of:
            return self.spec(label.stage, total_of[key])
        if readers and label.stage not in readers:
            return self.transfer(key, label.stage, min(readers))[0].spec
        return self.spec(label.stage, key)


def _of_strong_type(array: Any) -> Any:
    """Returns an array with the type that a program was planned for; types of another kind would be planned again."""
    return jax.lax.convert_element_type(array, array.dtype) if array.aval.weak_type else array


def _fixed(array: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    if not array.ndim or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))  # type: ignore[arg-type]
