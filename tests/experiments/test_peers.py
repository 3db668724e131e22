"""Found plans against plans by hand."""

from experiments import peers
from experiments.host_devices import host_mesh
from experiments.models import mlp


def test_main_says_which_baselines_break_a_limit(capsys):
    # 4 layers of 4096x4096 and adam: 805 MB of state on each device of data parallelism.
    assert peers.main(["--models", "mlp", "--memory-limit", "7e8", "--time-limit", "10"]) == 0
    rows = {line.split("│")[2].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert set(rows) == {"found", "data parallel", "fsdp", "megatron", "megatron fsdp"}
    assert [name for name, line in rows.items() if "does not fit" in line] == ["data parallel"]


def test_a_found_plan_that_does_not_exist_or_is_slower_is_not_best():
    model, mesh = mlp.make(layers=2, width=64, batch=64), host_mesh((2, 4))
    rows = peers.compare("mlp", model, mesh, hardware="h100", time_limit_s=1)[:2]
    assert peers.best_is_found(rows)
    assert not peers.best_is_found([rows[0]._replace(plan=None), rows[1]])
