"""A training step that is cut into stages gives the results of one device, waits for nothing, and forgets in time."""

import dataclasses
import threading
import weakref
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cost.pipeline_schedules import graph_of, in_flight
from diffshard.pipelines.execution import StagedExecution, StageError
from diffshard.pipelines.stage_calls import program_as_traced
from search_spaces.pipelines.stage_labels import Label
from tests.diffshard.pipelines.small_pipeline import (
    arguments,
    by_example,
    check_close,
    meshes,
    remat_step,
    small_execution,
    train_step,
)


@pytest.mark.parametrize(
    ("step", "counts", "num_microbatches", "schedule"),
    [
        (train_step, (4, 4), 4, "1f1b"),
        (remat_step, (4, 2, 2), 8, "eager"),
        (train_step, (1, 2, 1, 4), 16, "gpipe"),
        (remat_step, (4, 4), 4, "interleaved"),
        (remat_step, (4, 4), 4, "zb-h1"),
        (train_step, (4, 2), 4, "zb-v"),
    ],
)
def test_results_are_those_of_one_device(step, counts, num_microbatches, schedule):
    args = arguments()
    execution, result = small_execution(step, counts, num_microbatches, schedule)
    expected = jax.jit(step)(*args)
    for _ in range(2):
        found = jax.tree.unflatten(result, execution(jax.tree.leaves(args)))
        execution.wait()
        check_close(found, expected)
        args, expected = (found[0], args[1]), jax.jit(step)(expected[0], args[1])


class Gate:
    """What holds up an array until it is opened; it opens by itself after a while, and tells so."""

    def __init__(self):
        self.opened, self.was_late = threading.Event(), False

    def _wait(self, array):
        self.was_late |= not self.opened.wait(60.0)
        return np.asarray(array)

    def held_up(self, array, sharding):
        """Returns an array that is ready when the gate is open."""

        def wait(array):
            return jax.pure_callback(self._wait, jax.ShapeDtypeStruct(array.shape, array.dtype), array)

        return jax.jit(wait, out_shardings=sharding)(jax.device_put(array, sharding))


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (3, 1, 2, 2)])
def test_no_copy_waits_in_the_steady_state(counts):
    execution, result = small_execution(train_step, counts, 4, "1f1b")
    flat = [jax.device_put(array, execution.place(i)) for i, array in enumerate(jax.tree.leaves(arguments()))]
    execution(flat)
    execution.wait()  # all is compiled
    gate, tokens = Gate(), len(flat) - 2
    held_up = gate.held_up(flat[tokens], execution.place(tokens))
    first = execution([*flat[:tokens], held_up, flat[-1]])
    copied_first = dataclasses.replace(execution.copied)
    second = execution([*jax.tree.leaves(jax.tree.unflatten(result, first)[0]), held_up, flat[-1]])
    assert not any(array.is_ready() for array in second if hasattr(array, "is_ready"))
    gate.opened.set()
    execution.wait()
    assert not gate.was_late  # both steps were dispatched before their first program could run
    assert copied_first.blocked == execution.copied.blocked == 0
    assert execution.copied.copies >= 2 * 3 * 4  # an activation and its gradient, at each cut, of each micro-batch
    assert execution.copied.bytes >= execution.copied.copies


def test_a_copy_to_other_shards_counts_as_one_that_waits():
    execution, _ = small_execution(train_step, (4, 4), 4, "1f1b")
    mesh = meshes((4,))[0]
    gate = Gate()
    array = gate.held_up(np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec("b")))
    threading.Timer(0.3, gate.opened.set).start()
    execution._actions.copier.from_host(array, NamedSharding(meshes((4, 4))[1], PartitionSpec(None, "b")))
    assert (execution.copied.blocked, execution.copied.copies, execution.copied.bytes) == (1, 1, 256)
    assert execution.copied.blocked_s > 0


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe", "interleaved"])
def test_a_stage_keeps_residuals_of_the_micro_batches_in_flight(schedule):
    counts = (4, 4) if schedule == "interleaved" else (2, 2, 2, 2)
    execution, _ = small_execution(train_step, counts, 4, schedule)
    staged, calls = execution.calls.staged, execution.calls.calls
    alive, most = {}, Counter()

    def watched(label, call):
        if label.kind not in ("forward", "backward"):
            return call
        backward = staged.programs[label._replace(kind="backward")]
        residuals = [n for n, leaving in enumerate(call.leaves) if leaving.is_kept and leaving.key in backward.reads]

        def function(totals, given_up, reads):
            found = call.function(totals, given_up, reads)
            if label.kind == "forward":
                assert residuals
                alive.setdefault(label.stage, []).append([weakref.ref(found[1][n]) for n in residuals])
            sets = [any(ref() is not None for ref in refs) for refs in alive[label.stage]]
            most[label.stage] = max(most[label.stage], sum(sets))
            return found

        return dataclasses.replace(call, function=function)

    calls.update({label: watched(label, call) for label, call in calls.items()})
    execution(jax.tree.leaves(arguments()))
    assert [most[stage] for stage in range(4)] == in_flight(graph_of(schedule, 4, 4)).tolist()
    assert not any(ref() is not None for sets in alive.values() for refs in sets for ref in refs)


def test_results_take_the_memory_of_donated_arguments():
    args = arguments()
    num_state = len(jax.tree.leaves(args[0]))
    execution, result = small_execution(remat_step, (4, 4), 4, "1f1b", by_example, donate=range(num_state))
    flat = [jax.device_put(array, execution.place(i)) for i, array in enumerate(jax.tree.leaves(args))]
    found = execution(flat)
    execution.wait()
    floats = [array for array in flat[:num_state] if array.dtype == np.float32]
    assert floats
    assert all(array.is_deleted() for array in floats)
    assert not any(array.is_deleted() for array in flat[num_state:])
    residuals = [call for label, call in execution.calls.calls.items() if label.kind == "backward" and call.given_up]
    assert residuals  # a backward program makes a gradient in the memory of what it reads last
    check_close(jax.tree.unflatten(result, found), jax.jit(remat_step)(*arguments()))


def test_what_does_not_fit_the_step_is_refused_before_it_runs():
    execution, _ = small_execution(train_step, (4, 4), 4, "1f1b")
    staged = execution.calls.staged

    def make(counts=(4, 4), graph=("1f1b", 2, 4), given=None, **options):
        return StagedExecution(staged, given or meshes(counts), graph_of(*graph), lambda stage, key: None, **options)

    with pytest.raises(ValueError, match="each of the 2 stages, not 1"):
        make(counts=(4,))
    with pytest.raises(ValueError, match="stages 0 and 1"):
        make(given=meshes((4,)) * 2)
    with pytest.raises(ValueError, match="4 micro-batches, not for 2 and 8"):
        make(graph=("1f1b", 2, 8))
    with pytest.raises(ValueError, match="split the backward pass"):
        make(graph=("zb-h1", 2, 4))
    with pytest.raises(ValueError, match="`donate` must have positions"):
        make(donate=(1000,))


def test_an_error_of_a_program_names_the_stage_its_devices_and_the_micro_batch():
    def fail(array):
        raise RuntimeError("no memory left")

    def function_of(program):
        run = program_as_traced(program)

        def failing(*arrays):
            first, *others = run(*arrays)
            return [jax.pure_callback(fail, jax.ShapeDtypeStruct(first.shape, first.dtype), first), *others]

        return failing if program.label == Label("forward", 1) else run

    execution, _ = small_execution(train_step, (4, 1), 4, "1f1b", function_of=function_of)
    with pytest.raises(StageError, match=r"Stage 1 on .*:4: the forward program of micro-batch 0 (.|\n)*no memory"):
        _run(execution)


def test_an_error_when_a_program_is_compiled_names_the_stage():
    def function_of(program):
        run = program_as_traced(program)
        return (lambda *arrays: run(*arrays[1:])) if program.label == Label("backward", 0) else run

    execution, _ = small_execution(train_step, (4, 4), 4, "1f1b", function_of=function_of)
    with pytest.raises(StageError, match=r"Stage 0 on .*:0, .*: the backward program of micro-batch 0 failed"):
        _run(execution)


def _run(execution):
    execution(jax.tree.leaves(arguments()))
    execution.wait()
