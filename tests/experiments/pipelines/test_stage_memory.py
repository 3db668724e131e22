"""The memory of stages: what lives between programs is what lives when the step runs, and XLA's bytes come on top."""

import dataclasses
import importlib.util

import jax
import pytest

from cost.pipeline_schedules import graph_of, in_flight
from diffshard.checks.targets import gpu_mesh
from diffshard.pipelines.copies import bytes_each
from diffshard.pipelines.stage_calls import StageCalls
from diffshard.pipelines.stage_plans import split_bytes
from experiments.pipelines.stage_memory import stage_memory
from search_spaces.pipelines.stage_labels import Label
from tests.diffshard.pipelines.small_pipeline import arguments, by_example, small_execution, train_step


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_arrays_between_programs_are_those_that_live_when_the_step_runs(schedule):
    counts, num_microbatches = (4, 2), 4
    num_state = len(jax.tree.leaves(arguments()[0]))
    execution, _ = small_execution(train_step, counts, num_microbatches, schedule, by_example, donate=range(num_state))
    memories = stage_memory(execution.calls, execution.graph)
    flat = [jax.device_put(a, execution.place(i)) for i, a in enumerate(jax.tree.leaves(arguments()))]
    before = {id(array) for array in jax.live_arrays()} - {id(array) for array in flat}
    live = [0, 0]

    def watched(label, call):
        devices = set(execution.calls.meshes[label.stage].devices.flat)

        def function(totals, given_up, reads):
            there = [a for a in jax.live_arrays() if id(a) not in before and set(a.devices()) == devices]
            shards = {shard.data.unsafe_buffer_pointer(): shard for a in there for shard in a.addressable_shards}
            on_first = [s.data.nbytes for s in shards.values() if s.device == min(devices, key=lambda d: d.id)]
            live[label.stage] = max(live[label.stage], sum(on_first))
            return call.function(totals, given_up, reads)

        return dataclasses.replace(call, function=function)

    calls = execution.calls.calls
    calls.update({label: watched(label, call) for label, call in calls.items()})
    execution(flat)
    execution.wait()
    for stage, memory in enumerate(memories):
        between = memory.peak_bytes - memory.programs[memory.peak].added_bytes
        assert live[stage] == pytest.approx(between, rel=0.1)
        assert memory.sum_bytes > 0
        assert max(p.argument_bytes for p in memory.programs.values()) <= between * 1.1


def test_what_waits_for_the_gradients_of_weights_is_counted():
    """Between programs a stage has as much for its micro-batches as sizing with the code that runs them finds."""
    execution, _ = small_execution(train_step, (4, 4), 4, "zb-h1", by_example)
    calls, graph = execution.calls, execution.graph
    staged = calls.staged
    for stage, memory in enumerate(stage_memory(calls, graph)):
        programs = [staged.programs.get(Label(kind, stage)) for kind in ("backward", "weights")]
        read = {key for program in programs if program is not None for key in program.reads}
        residuals = [k for k in read if k in staged.makers and staged.makers[k].kind == "forward"]
        kept = sum(
            bytes_each(staged.avals[k].shape, staged.avals[k].dtype, calls.sharding(stage, k)) for k in residuals
        )
        found = in_flight(graph)[stage] * kept + split_bytes(staged, stage, graph, calls.sharding)
        assert found == pytest.approx(memory.microbatch_bytes, rel=0.05)
        assert abs(found - in_flight(graph)[stage] * kept) > 0.01 * found  # residuals alone are another number


def test_micro_batches_take_memory_by_those_in_flight():
    execution, _ = small_execution(train_step, (4, 4), 4, "1f1b", by_example)
    few = stage_memory(execution.calls, graph_of("1f1b", 2, 4))[0]
    many = stage_memory(execution.calls, graph_of("gpipe", 2, 4))[0]
    flights = [in_flight(graph_of(schedule, 2, 4))[0] for schedule in ("1f1b", "gpipe")]
    assert many.microbatch_bytes / few.microbatch_bytes == pytest.approx(flights[1] / flights[0], rel=0.1)
    assert (many.step_bytes, many.sum_bytes) == (few.step_bytes, few.sum_bytes)


needs_gpu_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
    reason="needs the extra `gpu-compile`",
)


@needs_gpu_compiler
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of devices that are not here
def test_programs_compile_for_gpus_that_are_not_here():
    execution, _ = small_execution(train_step, (4, 4), 4, "1f1b")
    staged = execution.calls.staged
    meshes = [gpu_mesh({"data": 4}) for _ in range(2)]
    memories = stage_memory(StageCalls(staged, meshes, lambda stage, key: None), execution.graph)
    host = stage_memory(execution.calls, execution.graph)
    assert [m.sum_bytes for m in memories] == [m.sum_bytes for m in host]
    assert all(m.peak_bytes > m.step_bytes + m.sum_bytes for m in memories)
