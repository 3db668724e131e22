"""The experiment on the store of plans runs on a small setting; its times are for people."""

from pathlib import Path

from experiments import plan_store
from tests.experiments.printed_tables import printed_rows


def test_prints_the_table(capsys, monkeypatch):
    monkeypatch.setattr(plan_store, "STARTS", 1)
    plan_store.main(["--quick"])
    ((layers, vertices, *numbers),) = printed_rows(capsys.readouterr().out)
    assert layers == "1"
    assert int(vertices) > 100
    assert len(numbers) == 6
    assert min(map(float, numbers)) > 0


def test_the_second_start_takes_the_plan_of_the_first_one(tmp_path: Path):
    first, second = (plan_store.start(1, str(tmp_path), plan_store.SMALL) for _ in range(2))
    assert first["num_bytes"] == 0
    assert second["num_bytes"] > 1000
    assert second["operations"] == first["operations"]
