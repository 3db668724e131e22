"""The table of formats that are found against rules, on a tiny model with a tied head."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from experiments import format_estimates, format_models, formats
from experiments.models import gpt


class Bigram(nn.Module):
    """A dense layer between an embedding and the head that is tied to it."""

    sizes: gpt.Sizes

    @nn.compact
    def __call__(self, tokens):  # noqa: D102
        embed = nn.Embed(self.sizes.vocabulary, self.sizes.width, name="embed")
        return embed.attend(nn.tanh(nn.Dense(self.sizes.width)(embed(tokens))))


def make(*, batch, **sizes):
    return gpt.training(Bigram(gpt.Sizes(**sizes)), batch, optax.sgd(0.1), "bigram")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(format_models, "LOOK_STEPS", 2)
    monkeypatch.setattr(format_models, "RUN_STEPS", 4)
    monkeypatch.setattr(formats, "SETTINGS", [(1 / 16, True)])
    monkeypatch.setitem(formats.MODELS, "gpt", formats.MODELS["gpt"]._replace(make=make))


def rows_of(capsys, *arguments):
    formats.main(["--sizes", "small", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.strip() or line[0] in " ┌┏")]


def test_what_is_found_stands_beside_the_rules(capsys):
    lines = rows_of(capsys, "--steps", "2", "--seeds", "1", "--budgets", "0.005")
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in lines[:4]}
    assert list(rows) == ["exact", "float8, all", "float8, but not the head", "found for 0.005"]
    assert [rows[name][0] for name in list(rows)[:3]] == ["0", "6", "3"]
    assert rows["exact"][-1] == "+0.0000"
    assert float(rows["found for 0.005"][4]) <= 0.005


def test_no_rule_within_the_budget_is_faster_than_what_is_found(capsys):
    lines = rows_of(capsys, "--searches", "2", "--budgets", "0.005")
    assert [line.split()[:2] for line in lines[:2]] == [["0.005", "0"], ["0.005", "1"]]
    assert all(float(line.split()[2]) <= 1 for line in lines[:2])


def test_both_at_once_is_held_against_one_after_the_other(capsys):
    line, *_ = rows_of(capsys, "--joint", "--budgets", "0.005")
    links, memory, *_, ratio = line.split()
    assert (links, memory) == ("0.0625", "tight")
    assert float(ratio) <= 1.001


def test_digits_are_cut_into_patches():
    batch = format_models.digits_batch({"batch": 3}, jax.random.key(0))
    images, labels = format_models.digits.load()
    image = next(i for i in range(len(images)) if np.array_equal(images[i, :2, 2:4].ravel(), batch["image"][0, 1]))
    assert batch["image"].shape == (3, 16, 4)
    assert set(np.asarray(batch["label"])) <= set(labels.tolist())
    assert image >= 0


def test_estimates_are_held_against_trainings(capsys):
    format_estimates.main(
        ["--model", "gpt", "--sizes", "small", "--products", "float8", "--steps", "2", "--seeds", "1"]
    )
    lines = capsys.readouterr().out.splitlines()
    groups = [line.split("  ") for line in lines if " forward [" in line or " backward [" in line]
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in lines if line.split("  ")[0] in ESTIMATES}
    assert list(rows) == ESTIMATES
    assert {len(group) for group in groups} == {1 + len(ESTIMATES)}
    assert rows["trainings"][1] == "1.00"
    hypergradient, shuffled = (ESTIMATES.index(f"hypergradient{words}") for words in ("", ", shuffled"))
    assert sorted(group[1 + hypergradient] for group in groups) == sorted(group[1 + shuffled] for group in groups)
    assert all(float(step) <= 1 for row in rows.values() for step in row[3::2])


ESTIMATES = [
    "trainings",
    "paired looks",
    "hypergradient",
    "loss of one use",
    "hypergradient, no factor",
    "hypergradient, shuffled",
]
