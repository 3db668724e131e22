"""A process of several is killed in the middle of training; the others go on with what was saved."""

import json
import signal
from pathlib import Path

import numpy as np

from tests.diffshard.elastic.test_resume import uninterrupted
from tests.processes import Output, run_processes

_TRAIN = """
import json, signal, sys
from jax.sharding import AxisType
import diffshard
from tests.diffshard.elastic.small_training import batch_of, init, train_step

mesh = jax.make_mesh((jax.process_count(), 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
training = diffshard.resume(
    os.environ["CHECKPOINTS"], train_step, mesh, init, batch_of(0), hardware="h100", executor="constraints",
    progress="none", save_interval_steps=2,
)
try:
    state = training.restore()
    for number in range(training.num_steps, 6):
        state, loss = training.step(state, training.plan.shard(batch=batch_of(number)))
        print(json.dumps({"number": number, "loss": float(loss)}), flush=True)
        if process == int(os.environ["KILLED"]) and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        training.save(number + 1, state)
        if number == 3:
            training.wait()  # so that it is known which checkpoint there is
    training.close()
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)
"""


def losses_of(output: Output) -> dict[int, float]:
    steps = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    return {step["number"]: step["loss"] for step in steps}


def test_the_others_go_on_where_the_last_checkpoint_is(tmp_path: Path):
    environment = {"CHECKPOINTS": str(tmp_path / "checkpoints")}
    (tmp_path / "first").mkdir()
    first = run_processes(
        _TRAIN,
        3,
        tmp_path / "first",
        devices_each=2,
        timeout_s=500,
        check=False,
        environment={**environment, "KILLED": "2"},
    )
    assert first[2].status == -signal.SIGKILL
    assert all(output.status != 0 for output in first)  # nobody took the death of one for the end of the training
    assert list(losses_of(first[2])) == [0, 1, 2, 3, 4]
    (tmp_path / "second").mkdir()
    second = run_processes(
        _TRAIN, 2, tmp_path / "second", devices_each=2, timeout_s=500, environment={**environment, "KILLED": "-1"}
    )
    expected = uninterrupted(10)
    for output in second:
        losses = losses_of(output)
        assert list(losses) == [4, 5]
        np.testing.assert_allclose([*losses.values()], [expected[4], expected[5]], rtol=1e-5)
    for number, loss in losses_of(first[0]).items():
        np.testing.assert_allclose(loss, expected[number], rtol=1e-5)
