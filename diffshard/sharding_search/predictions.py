"""What a plan predicts beside its seconds: its device program, played without compiling it, its memory, and whole work.

Work is left whole where it cannot be split: it is written down with names, and told by a warning.
"""

import warnings
from collections import defaultdict
from dataclasses import replace

import numpy as np

from cost.streams import Played, play
from diffshard.checks.kernel_work import BETWEEN_HOSTS as BETWEEN_HOSTS_NAME
from diffshard.checks.kernel_work import HOST_MEMORY as HOST_NAME
from diffshard.checks.kernel_work import INSIDE_HOST as INSIDE_HOST_NAME
from diffshard.checks.timeline import COMPUTE, Span, Timeline
from diffshard.checks.timeline_lanes import lanes_of
from diffshard.plans.base import PlanData
from diffshard.plans.printing import format_count, short_name
from diffshard.plans.sections import (
    LEAST_SHARE_AT_PEAK,
    HeldTensor,
    MemoryProfile,
    WholeWork,
    WholeWorkWarning,
    warning_of,
)
from diffshard.plans.timeline import PredictedTimeline, PredictedWait
from diffshard.sharding_search.request import PlanRequest
from search_spaces.sharding.base import Layout
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.memory import MemoryUse
from search_spaces.sharding.program_steps import BETWEEN_HOSTS, HOST_MEMORY, INSIDE_HOST, ProgramSteps
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.whole_work import UnevenDimension, whole_work

_NAMES = {0: COMPUTE, INSIDE_HOST: INSIDE_HOST_NAME, BETWEEN_HOSTS: BETWEEN_HOSTS_NAME, HOST_MEMORY: HOST_NAME}
_LEAST_SHARE = 1e-3  # of a step: shorter waits are not listed


def predicted_timeline(space: ShardingSpace, layout: Layout) -> PredictedTimeline | None:
    """Returns the timeline of a layout's device program; None where collectives hold arithmetic.

    Its bound is the sum of the least seconds of arithmetic of all operations. A timeline takes at least as long as its
    busiest stream, and arithmetic is one of them.
    """
    if space.hardware.exposed_share == 1:
        return None
    program = space.program_steps(layout)
    played = play(program.steps)
    timeline = _timeline(space, program, played)
    least_s = space.least_compute_s
    return PredictedTimeline(
        seconds=timeline.step_s,
        lower_bound_s=min(least_s, timeline.step_s),
        busy_s=timeline.busy_s,
        waits=_waits(space, program, played),
        lanes=lanes_of(timeline),
    )


def _timeline(space: ShardingSpace, program: ProgramSteps, played: Played) -> Timeline:
    """Returns the played program as a timeline, the form that compiled programs have as well."""
    spans: list[Span] = []
    busy_s: dict[str, float] = defaultdict(float)
    waited_s: dict[tuple[str, str], float] = defaultdict(float)
    for i in played.order:
        step, origin = program.steps[i], program.origins[i]
        vertex = space.graph.vertices[origin.vertex]
        is_copy = origin.kind == "copy"
        transfer = f"{origin.kind} {_axes(space, origin.axes)}" if origin.axes else "copy host" if is_copy else ""
        source = f"{vertex.scope}/{vertex.primitive}" if not transfer else ""
        for stream in step.streams if step.seconds else ():
            name = _NAMES[stream]
            spans.append(Span(vertex.primitive, name, played.start_s[i], played.end_s[i], source, transfer))
            busy_s[name] += step.seconds
    for wait in played.waits:
        origin = program.origins[wait.transfer]
        waited_s[origin.kind, _axes(space, origin.axes)] += wait.seconds
    return Timeline(played.seconds, dict(busy_s), dict(waited_s), tuple(spans))


def _waits(space: ShardingSpace, program: ProgramSteps, played: Played) -> tuple[PredictedWait, ...]:
    seconds: dict[tuple, float] = defaultdict(float)
    for wait in played.waits:
        transfer = program.origins[wait.transfer]
        reader = None if wait.step is None else program.origins[wait.step]
        read_by = None if reader is None or reader.vertex < 0 else reader.vertex
        seconds[transfer.kind, tuple(sorted(transfer.axes)), transfer.vertex, read_by] += wait.seconds
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple(
        PredictedWait(kind, tuple(space.axis_names[a] for a in axes), waited_s, made_by, read_by)
        for (kind, axes, made_by, read_by), waited_s in longest
        if waited_s >= _LEAST_SHARE * played.seconds
    )


def _axes(space: ShardingSpace, axes: tuple[int, ...]) -> str:
    return "+".join(space.axis_names[axis] for axis in sorted(axes))


def memory_profile_of(graph: Graph, memory: MemoryUse) -> MemoryProfile:
    """Returns the memory of a step as a plan says it: for each operation at which it changes the bytes in use.

    Positions without an operation, such as the end of a loop, count as the operation before them; of several changes at
    one operation the largest stays, so that the peak is exact.
    """
    positions = [vertex.position for vertex in graph.vertices]  # ascending, as vertices are in program order
    running = np.searchsorted(positions, memory.times - 1, side="right") - 1
    largest = {-1: 0.0}
    for index, num_bytes in zip(running.tolist(), memory.num_bytes.tolist(), strict=True):
        largest[index] = max(largest.get(index, 0.0), num_bytes)
    peak_bytes = float(np.max(memory.num_bytes))
    held = (
        HeldTensor(graph.values[a.value].vertex, graph.values[a.value].result, a.num_bytes, a.is_copy)
        for a in memory.at_peak
        if a.num_bytes >= LEAST_SHARE_AT_PEAK * peak_bytes
    )
    return MemoryProfile(tuple(sorted(largest.items())), tuple(held))


def whole_work_of(request: PlanRequest, layout: Layout) -> tuple[WholeWork, ...]:
    """Returns the arithmetic that a layout of a request's space leaves whole because it cannot be split."""
    space, found = request.space, []
    for work in whole_work(space.graph, space.rules, space.nodes, layout.strategies, space.node_costs, space.loaded):
        (name, where), *others = sources_of(space.graph.vertices[i] for i in work.vertices)
        record = WholeWork(
            operations=f"{name} ({where})" + (f" and {format_count(len(others), 'other kind')}" if others else ""),
            indices=work.vertices,
            seconds=work.seconds,
            has_rule=all(space.rules[i] is not None for i in work.vertices),
        )
        found.append(record if work.uneven is None else _with_dimension(record, work.uneven, request))
    return tuple(found)


def warn_of_whole_work(plan: PlanData) -> None:
    """Warns of a plan in which devices repeat more than a tenth of the arithmetic."""
    text = warning_of(short_name(plan.function), plan.whole_work, plan.compute_s)
    if text is not None:
        warnings.warn(text, WholeWorkWarning, stacklevel=2)


def _with_dimension(record: WholeWork, uneven: UnevenDimension, request: PlanRequest) -> WholeWork:
    return replace(
        record,
        size=uneven.size,
        padded_size=-(-uneven.size // uneven.parts) * uneven.parts,
        axes=tuple(request.options.axis_names[a] for a in uneven.axes),
        arguments=tuple(request.traced_function.call.paths[i] for i, _ in uneven.inputs),
        dimension=uneven.inputs[0][1] if uneven.inputs else None,
    )
