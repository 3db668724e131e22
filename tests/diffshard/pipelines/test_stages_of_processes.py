"""Stages on devices of different processes give the results of one device, and a process that is lost is named.

One program does all, because a start of processes takes longer than what it does.
"""

import re

import pytest

from tests.processes import run_processes

_TRAIN = """
import signal
import numpy as np
from diffshard.pipelines.execution import StagedExecution, StageError
from tests.diffshard.pipelines import small_pipeline

small_pipeline.LAYERS = 2
step = small_pipeline.train_step
args = small_pipeline.arguments()
is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
flat = [leaf if is_key(leaf) else np.asarray(leaf) for leaf in jax.tree.leaves(args)]
num_state = len(flat) - 2
expected = args
for _ in range(2):
    state, told = jax.jit(step)(expected[0], args[1])
    expected = state, told
expected = jax.tree.leaves(expected)

counts, order = {meshes}
execution, _ = small_pipeline.small_execution(step, counts, 2, "1f1b", order=order)
one = small_pipeline.meshes((1, *counts[1:]), order)
try:
    StagedExecution(execution.calls.staged, one, execution.graph, lambda stage, key: None)
except ValueError as error:
    print(error, flush=True)

found = execution(flat)
found = execution(found[:num_state] + flat[num_state:])
execution.wait()
own = [i for i, array in enumerate(found) if array.is_fully_addressable]
small_pipeline.check_close([found[i] for i in own], [expected[i] for i in own])
places = [sorted({{device.process_index for device in array.sharding.device_set}}) for array in found]
print("owns", len(own), sum(place == [process] for place in places), len(found), flush=True)

if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        execution(flat)
        execution.wait()
except StageError as error:
    print(error, flush=True)
os._exit(0)  # the service of a job that has lost a process would end this one
"""


@pytest.mark.parametrize("meshes", ["(4, 4), None", "(2, 3, 2), (0, 1, 4, 5, 6, 2, 3)"])
def test_results_are_those_of_one_device_until_a_process_is_lost(meshes, tmp_path):
    outputs = run_processes(_TRAIN.format(meshes=meshes), 2, tmp_path, check=False)
    assert [output.status for output in outputs] == [0, -9], outputs
    owned = [
        [int(number) for number in match.groups()]
        for output in outputs
        if (match := re.search(r"owns (\d+) (\d+) (\d+)", output.stdout))
    ]
    assert len(owned) == 2
    assert all(held == placed for held, placed, _ in owned)
    assert all(0 < held < total for held, _, total in owned)
    assert re.search(
        r"Stage \d on .* of process \d: a copy from stage \d on .* of process \d failed", outputs[0].stdout
    )


_REPLICAS = """
import numpy as np
from cost.pipeline_times import joined_graph
from cost.pipeline_schedules import graph_of
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.microbatches import divided_call, traced_call
from search_spaces.pipelines.replicas import replicated_step
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import step_parts
from tests.diffshard.pipelines import small_pipeline
from tests.diffshard.pipelines.small_pipeline import train_step

small_pipeline.LAYERS = 2
args = small_pipeline.arguments()
parts = step_parts(divided_call(traced_call(train_step, 4, BatchArguments((1,), ()), args, {}), 4))
staged = staged_step(parts, small_pipeline.even_cuts(parts, 2))
graph = joined_graph([graph_of("1f1b", 2, 3), graph_of("1f1b", 2, 1)])
on = small_pipeline.meshes((2, 2, 2, 2))
execution = StagedExecution(replicated_step([staged, staged], [3, 1]), on, graph, lambda stage, key: None)
is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
flat = [leaf if is_key(leaf) else np.asarray(leaf) for leaf in jax.tree.leaves(args)]
found = execution(flat)
execution.wait()
expected = jax.tree.leaves(jax.jit(train_step)(*args))
own = [i for i, array in enumerate(found) if array.is_fully_addressable]
small_pipeline.check_close([found[i] for i in own], [expected[i] for i in own])
print("owns", len(own), "of", len(found), flush=True)
"""


def test_a_replica_in_another_process_gives_the_results_of_one_device(tmp_path):
    main, other = run_processes(_REPLICAS, 2, tmp_path)
    numbers = re.search(r"owns (\d+) of (\d+)", main.stdout)
    assert numbers is not None
    assert numbers.group(1) == numbers.group(2)
    assert "owns 0 of" in other.stdout  # all results are those of the main replica
