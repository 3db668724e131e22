"""The table of formats that are found against rules, on a tiny model with a tied head."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from experiments import format_estimates, format_front, format_models, formats
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
    monkeypatch.setattr(formats, "SETTINGS", [(1 / 16, None), (1, 0.55)])
    monkeypatch.setitem(formats.MODELS, "gpt", formats.MODELS["gpt"]._replace(make=make))


def rows_of(capsys, *arguments):
    formats.main(["--sizes", "small", *arguments])
    lines = [line for line in capsys.readouterr().out.splitlines() if "  " in line and line[0] not in "│┃ "]
    return [line.split("  ") for line in lines if line == line.rstrip()]  # titles of tables have spaces at their ends


def test_what_is_found_stands_beside_the_rules(capsys):
    rows = rows_of(capsys, "--steps", "2", "--seeds", "1", "--searches", "1", "--budgets", "0.005", "0.02")
    rounds = [row for row in rows if row[2].startswith("round")]
    found = [row for row in rows if row[0] in ("0.005", "0.02") and row not in rounds]
    rules = {row[0]: row[1:] for row in rows if row not in [*rounds, *found]}
    assert {row[0] for row in rounds} == {"0.005", "0.02"}
    assert {"nothing", "all products", "all but the head", "sums of gradients in int8"} <= rules.keys()
    assert [rules[name][1] for name in ("nothing", "all products", "all but the head")] == ["0", "6", "3"]
    assert rules["nothing"][2] == "+0.0000"
    assert [row[:2] for row in found] == [["0.005", "0"], ["0.02", "0"]]
    assert all(float(ratio) <= 1 for _, _, _, ratio, *_ in found)
    assert all(float(measured) <= float(budget) for budget, _, _, _, _, measured, *_ in found)


def test_with_increases_of_trainings_what_is_found_is_held_against_rules_within_the_budget(capsys):
    format_front.main(["--sizes", "small", "--mesh", "2x4", "--steps", "2", "--seeds", "1", "--budgets", "1"])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    ((ratio, bound),) = ([float(cell) for cell in line[3:5]] for line in lines if line[0] == "1")
    assert 0 < bound <= ratio <= 1.001  # where each rule is within the budget, no rule is faster than what is found


def test_both_at_once_is_held_against_one_after_the_other(capsys):
    free, limited = rows_of(capsys, "--joint", "--budgets", "0.005", "--time-limit", "3")
    assert free[:2] == ["0.0625", "all"]
    assert float(free[4]) <= 1.001
    assert free[-1] == "0"
    assert limited[:2] == ["1", "55%"]
    assert limited[-1] == "no plan"


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
    assert {len(group) for group in groups} == {1 + len(ESTIMATES) + 1}
    assert rows["trainings"][2] == "1.00"
    hypergradient, shuffled = (ESTIMATES.index(f"hypergradient{words}") for words in ("", ", shuffled"))
    assert sorted(group[1 + hypergradient] for group in groups) == sorted(group[1 + shuffled] for group in groups)
    assert all(float(step) <= 1 for row in rows.values() for step in row[4::2])


ESTIMATES = [
    "trainings",
    "paired looks",
    "hypergradient",
    "loss of one use",
    "hypergradient, no factor",
    "hypergradient, shuffled",
]
