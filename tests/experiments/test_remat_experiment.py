"""The comparison of what is computed again with `jax.checkpoint`, on a tiny model and host devices."""

from functools import partial

from experiments import remat
from experiments.models import mlp


def test_every_plan_has_a_row_and_fits_its_limit(monkeypatch, capsys):
    make = partial(mlp.make, layers=6, width=32, batch=4096)
    monkeypatch.setattr(remat, "MODELS", {"tiny": make})
    monkeypatch.setattr(remat, "EXPERTS", {"tiny": make})
    results = remat.main(["--target", "host", "--mesh", "2", "--shares", "0.95", "0.001", "--plans", "remat"])
    assert [(r.plan, r.share) for r in results] == [
        ("ordinary", float("inf")),
        ("checkpoint", float("inf")),
        ("remat", 0.95),
        ("checkpoint", 0.95),
        ("remat", 0.001),
        ("checkpoint", 0.001),
    ]
    found, impossible = results[2], results[4]
    assert found.peak_bytes is not None
    assert found.peak_bytes <= found.limit_bytes
    assert found.compiled_bytes
    assert results[3].step_s is None  # nothing is checkpointed in this model
    assert impossible.step_s is None
    assert "remat: none fits" in capsys.readouterr().out
