"""A search in a space whose every number is known, and its steps on batches of that space."""

import jax
import jax.numpy as jnp
import optax

import diffshard
from diffshard.bilevel_search.base import BilevelMetrics, BilevelState
from diffshard.bilevel_search.search import BilevelSearch
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, start

KEY = jax.random.key(0)
EXACT_COST = 5.0
"""Seconds of the exact choice of `Perturbed(ERRORS, SECONDS)`."""


def small_search(space=None, **options) -> BilevelSearch:
    """A search of `Perturbed(ERRORS, SECONDS)` or of another space; `cost_weight` takes the place of the bound."""
    options = {"weights_optimizer": optax.sgd(0.1), "max_loss_increase": 0.05, "choice_every": 1, **options}
    if "cost_weight" in options:
        del options["max_loss_increase"]
    return diffshard.bilevel(None, space=Perturbed(ERRORS, SECONDS) if space is None else space, **options)


def run(search: BilevelSearch, steps: int) -> tuple[BilevelState, list[BilevelMetrics]]:
    """The state after some steps from the start, and what each step measured."""
    state, seen = search.init(KEY, start(), batch_of(0)), []
    for step in range(steps):
        state, metrics = search.update(state, batch_of(2 * step), batch_of(2 * step + 1))
        seen.append(metrics)
    return state, seen


def plain_loss(params, batch):
    """The loss of the linear model without strategies."""
    inputs, targets = batch
    return 0.5 * jnp.mean((inputs @ params["w"] - targets) ** 2)
