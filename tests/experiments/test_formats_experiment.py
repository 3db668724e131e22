"""The table of formats that are found against rules, on a tiny model with a tied head."""

import optax
from flax import linen as nn

from experiments import formats
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


def test_what_is_found_stands_beside_the_rules(monkeypatch, capsys):
    monkeypatch.setattr(formats, "LOOK_STEPS", 2)
    monkeypatch.setattr(formats.gpt, "make", make)
    formats.main(["--sizes", "small", "--steps", "2", "--seeds", "1", "--budgets", "0.005"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in lines[:4]}
    assert list(rows) == ["exact", "float8, all", "float8, but not the head", "found for 0.005"]
    assert [rows[name][0] for name in list(rows)[:3]] == ["0", "6", "3"]
    assert rows["exact"][3:] == ["+0.0000", "+0.0000"]
    assert float(rows["found for 0.005"][3]) <= 0.005
