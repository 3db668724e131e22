"""The experiment on residuals, for a tiny GPT."""

from experiments.pipelines import residuals


def test_main_prints_a_row_for_each_memory_and_choice(capsys):
    sizes = ["--layers", "2", "--width", "64", "--words", "64", "--length", "16", "--batch", "4"]
    residuals.main(
        [*sizes, "--gpus", "1", "--microbatches", "2", "--memory", "1", "--choices", "all kept", "recomputed"]
    )
    printed = capsys.readouterr().out
    assert "GPT of 2 layers, width 64" in printed
    assert printed.count("all kept") == printed.count("recomputed") == 1
