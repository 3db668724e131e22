"""Stages on devices of different processes give the results of one device, also where their numbers of devices differ.

One program does all, because a start of processes takes longer than what it does.
"""

import pytest

from tests.processes import run_processes

_TRAIN = """

import numpy as np
from jax.random import key_data
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
found = execution(flat)
found = execution(found[:num_state] + flat[num_state:])
execution.wait()
own = [i for i, array in enumerate(found) if array.is_fully_addressable]
small_pipeline.check_close([found[i] for i in own], [expected[i] for i in own])
places = [sorted({{device.process_index for device in array.sharding.device_set}}) for array in found]
print(len(own), sum(place == [process] for place in places), len(found))
"""


@pytest.mark.parametrize("meshes", ["(4, 4), None", "(2, 3, 2), (0, 1, 4, 5, 6, 2, 3)"])
def test_results_are_those_of_one_device(meshes, tmp_path):
    outputs = run_processes(_TRAIN.format(meshes=meshes), 2, tmp_path)
    owned = [[int(word) for word in output.stdout.splitlines()[-1].split()[:3]] for output in outputs]
    assert all(held == placed for held, placed, _ in owned)
    assert all(0 < held < total for held, _, total in owned)
