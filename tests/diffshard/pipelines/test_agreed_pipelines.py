"""Processes that ask for different pipelines are told so; else the first one searches, and all run what it found."""

from tests.processes import run_processes

_PLAN = """
import numpy as np
import diffshard
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.plans.consistency import to_json
from tests.diffshard.pipelines import small_pipeline

small_pipeline.LAYERS = 2
cluster = diffshard.Cluster.from_devices(jax.devices(), hardware="h100")

def pipelined(microbatches, **options):
    pipeline = diffshard.Pipeline(microbatches=microbatches, schedules=("1f1b",), max_stages=2, residuals=("keep",))
    return diffshard.search(small_pipeline.train_step, cluster, pipeline=pipeline, **options)

try:
    pipelined(4 if process == 0 else 8).plan(*small_pipeline.arguments())
except diffshard.ProcessesError as error:
    print("differs:", str(error).replace(chr(10), " "), flush=True)
try:
    pipelined(4, check=None if process == 0 else "numbers").plan(*small_pipeline.arguments())
except diffshard.ProcessesError as error:
    print("checks differ:", str(error), flush=True)
try:
    pipelined(4, memory_limit_bytes=64.0).plan(*small_pipeline.arguments())
except diffshard.InfeasibleError as error:
    print("does not fit:", str(error).replace(chr(10), " "), flush=True)

initialise = DivisionSearch.__post_init__

def in_halves(self):  # leaves no submesh but half of all devices, and no stage of all layers
    initialise(self)
    sizes = np.array([submesh.num_devices for submesh in self.submeshes])
    lengths = np.arange(len(self.chain) + 1)[None, :] - np.arange(len(self.chain))[:, None]
    self.least_s[(lengths == len(self.chain))[:, :, None] | (sizes != 4)[None, None, :]] = np.inf

def not_here(*args):
    raise AssertionError("only the first process searches")

DivisionSearch.__post_init__ = not_here if process else in_halves
StageFunction.__init__ = not_here if process else StageFunction.__init__
step, args = pipelined(4, time_limit_s=20.0 + process), small_pipeline.arguments()
plan = step.plan(*args)
print("plan:", to_json(plan), flush=True)
expected = jax.jit(small_pipeline.train_step)(*args)
found = step(*args)
step.execution(*args).wait()
leaves = [(f, e) for f, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True) if f.is_fully_addressable]
small_pipeline.check_close(*map(list, zip(*leaves)))
print("stages:", len(plan.stages), "own:", len(leaves) > 1, flush=True)
"""


def test_processes_agree_on_a_pipeline(tmp_path):
    outputs = run_processes(_PLAN, 2, tmp_path, timeout_s=240.0)
    for output in outputs:
        assert "differs:" in output.stdout
        assert "`pipeline`" in output.stdout
        assert 'checks differ: The processes cannot search a pipeline: `check` "numbers" is not given' in output.stdout
        assert "does not fit: No pipeline of train_step" in output.stdout
        assert "stages: 2 own: True" in output.stdout
    (first,), (other,) = (
        [line for line in output.stdout.splitlines() if line.startswith("plan:")] for output in outputs
    )
    assert first == other
