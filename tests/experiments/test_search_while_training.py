"""The experiment counts every step of three trainings, and notices losses that differ."""

import os

from experiments import search_while_training as experiment
from experiments.models import mlp


def test_three_trainings_make_the_same_losses_and_all_their_steps_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(experiment, "SETTLED_ROUNDS", 3)
    monkeypatch.setattr(experiment, "MOST_ROUNDS", 40)
    model, cores = mlp.make(layers=2, width=16, batch=8), os.sched_getaffinity(0)
    best = experiment.searched(model, experiment.right_preset())
    result = experiment.result_of(model, experiment.WRONG_PRESETS[0], best, 10_000, True)
    assert os.sched_getaffinity(0) == cores
    assert result.difference < experiment.MOST_DIFFERENCE
    assert result.seconds[0] > result.search_s > 0
    for seconds, step_s in zip(result.seconds, result.step_s, strict=True):
        assert seconds > 4_000 * step_s  # the second half is counted at what its last steps took
    experiment.print_results([result, result], 10_000)
    printed = capsys.readouterr().out
    assert "after 10,000 steps" in printed
    assert "Geometric means" in printed
