"""Functions and modules that tests call in the ways people do."""

import equinox as eqx
import jax

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, mesh_2x2


def search(fn, **options):
    return diffshard.search(fn, mesh_2x2(), hardware=SLOW, **options)


def keyword_step(params, x, /, scale, *, offset, power=2):
    return params - scale * jax.grad(lambda p: ((x @ p + offset) ** power).sum())(params)


class Classifier(eqx.Module):
    """A module with functions, flags and numbers as leaves."""

    layers: list
    dropout: eqx.nn.Dropout
    slope: float
    is_residual: bool

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.layers = [eqx.nn.Linear(8, 8, key=keys[0]), jax.nn.relu, eqx.nn.Linear(8, 8, key=keys[1])]
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.slope = 0.5
        self.is_residual = True

    def __call__(self, x, key):  # noqa: D102
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.dropout(hidden, key=key)
        return hidden + x * self.slope if self.is_residual else hidden
