"""Checks of what a staged step is to run on, before anything runs."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import Mesh

from cost.pipeline_schedules import WEIGHTS, ScheduleGraph
from search_spaces.pipelines.stage_programs import StagedStep


def check_execution(staged: StagedStep, meshes: Sequence[Mesh], graph: ScheduleGraph, donate: Collection[int]) -> None:
    """Checks that a staged step can run on sub-meshes in the order of a schedule; arguments as of `StagedExecution`.

    Raises:
      ValueError: the meshes or the schedule do not fit the step, or collectives would lose their order.
    """
    if len(meshes) != staged.num_stages:
        raise ValueError(f"`meshes` must have one mesh for each of the {staged.num_stages} stages, not {len(meshes)}.")
    stage_of: dict[Any, int] = {}
    for stage, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            if device in stage_of:
                stages = f"{stage_of[device]} and {stage}"
                raise ValueError(
                    f"`meshes` must have no device in common, but {device} is in those of stages {stages}."
                )
            stage_of[device] = stage
    sizes = (graph.num_stages, graph.num_microbatches)
    if sizes != (staged.num_stages, staged.num_microbatches):
        raise ValueError(
            f"`graph` must be for {staged.num_stages} stages and {staged.num_microbatches} micro-batches, not for "
            f"{sizes[0]} and {sizes[1]}."
        )
    if (graph.kind == WEIGHTS).any():
        raise ValueError("`graph` must not split the backward pass: schedules such as 'zb-h1' are simulated only.")
    _check_processes(meshes)
    wrong = [position for position in donate if not 0 <= position < len(staged.inputs)]
    if wrong:
        raise ValueError(f"`donate` must have positions of the {len(staged.inputs)} flat arguments, not {wrong[0]}.")


def _check_processes(meshes: Sequence[Mesh]) -> None:
    """Checks that collectives between processes keep their order, which XLA for CPUs ensures among several devices."""
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    if len({device.process_index for device in devices}) == 1 or devices[0].platform != "cpu":
        return
    for stage, mesh in enumerate(meshes):
        processes = [device.process_index for device in mesh.devices.flat]
        alone = [process for process in processes if processes.count(process) == 1]
        if alone:
            raise ValueError(
                f"Stage {stage} has one CPU device of process {alone[0]}, but a stage needs two or more of each of its "
                "processes where there are several: XLA for CPUs would run the copies of a single one out of order. "
                'Give each process more devices (`jax.config.update("jax_num_cpu_devices", 4)`) or fewer stages '
                "(`Pipeline.max_stages`)."
            )
