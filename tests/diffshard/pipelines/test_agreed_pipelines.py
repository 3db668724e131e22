"""Processes that ask for different pipelines are told so; those that ask for the same run the same."""

from tests.processes import run_processes

_PLAN = """
import diffshard
from tests.diffshard.pipelines.small_pipeline import arguments, train_step

cluster = diffshard.Cluster.from_devices(jax.devices(), hardware="h100")

def pipelined(microbatches):
    pipeline = diffshard.Pipeline(microbatches=(microbatches,), schedules=("1f1b",), max_stages=1)
    return diffshard.search(train_step, cluster, pipeline=pipeline)

try:
    pipelined(4 if process == 0 else 8).plan(*arguments())
except diffshard.ProcessesError as error:
    print("differs:", str(error).replace(chr(10), " "), flush=True)
plan = pipelined(4).plan(*arguments())
print("same:", plan.num_microbatches, len(plan.stages), flush=True)
"""


def test_processes_agree_on_a_pipeline(tmp_path):
    outputs = run_processes(_PLAN, 2, tmp_path)
    for output in outputs:
        assert "differs:" in output.stdout
        assert "`pipeline`" in output.stdout
        assert "same: 4 1" in output.stdout
