"""What a process that compiles a step writes down: donated arguments are those of the step, and count once."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from diffshard.checks.compilation import HLO, MEMORY, CompiledStep, Job, compile_job
from diffshard.checks.hlo import MemoryPlan
from diffshard.checks.targets import TARGETS
from diffshard.sharding_search.executors import FlatFunction

QUARTER = 16 * 16 * 4 / 4
"""Bytes that a device holds of an array of 16 x 16."""


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_donated_argument_and_the_result_in_its_place_count_once(donated, tmp_path):
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    flat = FlatFunction(lambda w, g: [w - 0.1 * g], (rows, rows), (rows,), donated, {})
    step = flat.export_for("cpu", [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2)
    compile_job(Job(step, donated, {"x": 4}, TARGETS["host"]), tmp_path)
    memory = MemoryPlan(**json.loads((tmp_path / MEMORY).read_text()))
    assert memory[:3] == (2 * QUARTER, QUARTER, len(donated) * QUARTER)
    assert CompiledStep("", memory, 0, 0.0).peak_bytes == (3 - len(donated)) * QUARTER + memory.temporaries
    assert ("input_output_alias" in (tmp_path / HLO).read_text()) == bool(donated)
