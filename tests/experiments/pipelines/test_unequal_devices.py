"""The experiment with unequal devices prices replicas, even splits and the fast devices alone."""

from experiments.pipelines import unequal_devices


def test_all_ways_to_use_the_devices_are_priced(capsys):
    sizes = ["--layers", "2", "--width", "16", "--batch", "64", "--microbatches", "4", "--max-stages", "1"]
    unequal_devices.main(["--model", "residual", "--hosts", "1xt4,1xv100", *sizes])
    printed = capsys.readouterr().out
    for words in ("no replicas", "T4-16GB alone", "even replicas", "a stage for each host"):
        assert words in printed
