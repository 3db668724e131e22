"""The experiment of long sequences on a tiny model."""

import pytest

from experiments import long_context


def test_each_way_to_split_attention_is_kept_to(capsys):
    plans = ["found", "megatron", "fsdp, whole keys", "fsdp, all-to-all", "fsdp, ring"]
    options = ["--sizes", "small", "--sequence", "64", "--mesh", "2x4", "--batch", "2", "--layers", "1"]
    assert long_context.main([*options, "--target", "host", "--time-limit", "1", "--plans", *plans]) == 0
    rows = {
        name: line for line in capsys.readouterr().out.splitlines() for name in plans if line.startswith(name + " |")
    }
    assert "3x batch: data, heads: model" in rows["megatron"]
    assert "sequence" not in rows["fsdp, all-to-all"].split(" | ")[1]
    for name, other in (("fsdp, whole keys", "ring"), ("fsdp, ring", "whole keys")):
        assert "heads" not in rows[name].split(" | ")[1]
        assert other not in rows[name].split(" | ")[1]
    assert all("-" not in line.split(" | ")[-3:] for line in rows.values()), "all are compiled"


def test_a_baseline_that_does_not_apply_says_so(capsys):
    options = ["--sizes", "small", "--sequence", "64", "--mesh", "2x4", "--batch", "2", "--layers", "1"]
    assert long_context.main([*options, "--target", "host", "--no-timeline", "--plans", "fsdp"]) == 0
    assert (
        "fsdp does not apply: It would split the leading dimension of batch, 2, into 8 parts."
        in capsys.readouterr().out
    )


def test_bad_plans_are_refused():
    with pytest.raises(SystemExit):
        long_context.main(["--plans", "striped"])
