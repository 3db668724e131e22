"""The experiments of suspicious gradients, with few steps."""

from experiments import suspicious_gradients, suspicious_overhead


def test_scaled_gradients_spoil_the_mean_and_not_zeno(capsys):
    options = ["--tasks", "autoencoder", "--faults", "times -10", "--faulty", "3", "--seeds", "1", "--steps", "30"]
    assert suspicious_gradients.main(options) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("autoencoder | times -10 | 3"))
    mean, _, zeno, with_memory = line.split(" | ")[3:]
    assert mean == "fails"
    assert float(zeno) < 1.1
    assert float(with_memory) < 1.1


def test_the_overhead_is_printed_beside_the_plain_step(capsys):
    options = ["--layers", "1", "--width", "64", "--sequence", "32", "--shares", "1"]
    assert suspicious_overhead.main(options) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("plain |", "zeno"))]
    over_plain = [float(row[2]) for row in rows]
    assert over_plain[0] == 1 < over_plain[1] < 3
