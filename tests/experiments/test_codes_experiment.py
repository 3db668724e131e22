"""The tables of sums and kept arrays as codes, on a tiny model."""

from experiments import codes


def test_each_kind_of_codes_is_trained_with(capsys):
    arguments = ["--sizes", "small", "--steps", "4", "--seeds", "1", "--devices", "2", "--formats", "int8"]
    codes.main([*arguments, "--sgd", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in lines[:4]}
    assert list(rows) == [
        "exact",
        "sums of gradients in int8",
        "sums of gradients in int8 with error feedback",
        "arrays kept for the backward pass in int8",
    ]
    assert rows["exact"] == ["0", "+0.0000"]
    assert all(int(count) > 0 and abs(float(loss)) < 0.1 for count, loss in list(rows.values())[1:])


def test_exchanges_of_some_modules_are_trained_with(capsys):
    arguments = ["--sizes", "small", "--steps", "4", "--seeds", "1", "--kinds", "exchanges", "--formats", "int8"]
    counts = []
    for within in ("", "attention"):
        codes.main([*arguments, "--within", within])
        lines = capsys.readouterr().out.splitlines()
        rows = {line.split("  ")[0]: line.split("  ")[1:] for line in lines[:3]}
        assert list(rows) == [
            "exact",
            "exchanges of the forward pass in int8",
            "exchanges of the backward pass in int8",
        ]
        assert all(abs(float(loss)) < 0.1 for _, loss in rows.values())
        counts.append([int(count) for count, _ in rows.values()])
    (_, *all_counts), (_, *own_counts) = counts
    assert all(0 < own < count for own, count in zip(own_counts, all_counts, strict=True))
