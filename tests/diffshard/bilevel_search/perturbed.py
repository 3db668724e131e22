"""A space whose every number is known: a linear model whose strategies add a given error to its output."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem

BATCH, WIDTH = 8, 3


class Perturbed:
    """The model X w with Σ_v error_v[s_v] · sign_v added, trained by half the mean square to targets.

    Signs ±1 differ over the batch for each node, with mean 0 and no correlation between nodes, so that a choice adds
    exactly Σ_v error² / 2 to a loss whose residual is 0. The first strategy of each node is exact.

    Attributes:
      traces: how many times a loss was traced.
    """

    def __init__(self, errors: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]], **fields: Any):
        self.errors, self.node_seconds, self.fields = [np.array(e, float) for e in errors], seconds, fields
        self.traces = 0

    @property
    def problem(self) -> Problem:
        """Nodes without edges unless `fields` say otherwise."""
        cost = [np.array(row, float) for row in self.node_seconds]
        return Problem(**{"node_cost": cost, "edge_nodes": np.zeros((0, 2), int), "edge_cost": [], **self.fields})

    def exact_choice(self) -> list[int]:
        """The first ones."""
        return [0] * len(self.errors)

    def strategy_names(self, node: int) -> list[str]:
        """As `Space`."""
        return ["exact", "rough", "rougher"][: len(self.errors[node])]

    def seconds(self, choice: Sequence[int]) -> float:
        """Of the node costs alone."""
        return float(sum(row[s] for row, s in zip(self.node_seconds, choice, strict=True)))

    def mixed_loss(self, params, batch, weights, key, step: Any = 0):
        """As `Space`."""
        del key, step
        self.traces += 1
        inputs, targets = batch
        output = inputs @ params["w"]
        for v, (row, errors) in enumerate(zip(weights, self.errors, strict=True)):
            output = output + (row @ jnp.asarray(errors)) * signs(v)
        return 0.5 * jnp.mean((output - targets) ** 2)

    def loss(self, params, batch, choice, key, step):
        """As `Space`."""
        weights = [c if jnp.ndim(c) else jnp.eye(len(e))[c] for c, e in zip(choice, self.errors, strict=True)]
        return self.mixed_loss(params, batch, weights, key, step)

    def loss_and_gradients(self, params, batch, choice, state, key, step):
        """As `Space`."""
        loss, gradients = jax.value_and_grad(self.loss)(params, batch, choice, key, step)
        return loss, gradients, state

    def loss_increases(self, params, batch, key, *, step_sizes, step):
        """As `Space`: exact, wherever the residual is."""
        del params, key, step_sizes, step
        return [jnp.asarray(0.5 * errors**2) + 0.0 * batch[1].mean() for errors in self.errors]

    def state(self, params):
        """Nothing."""
        return ()


def signs(v: int) -> jax.Array:
    """`[BATCH]`: a row of the Hadamard matrix of order 8."""
    matrix = np.array([[1.0]])
    for _ in range(3):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return jnp.asarray(matrix[v + 4])


def batch_of(seed: int) -> tuple[jax.Array, jax.Array]:
    """Inputs orthogonal to the signs, and targets that w = (1, 2, 3) meets but for noise in some directions."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(BATCH, WIDTH))
    return jnp.asarray(inputs), jnp.asarray(inputs @ np.arange(1.0, WIDTH + 1) + 0.1 * rng.normal(size=BATCH))


def start() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(WIDTH)}
