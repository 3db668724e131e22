"""A space whose every number is known: a linear model whose strategies add a given error to its output."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cost.base import Hardware, Problem
from diffshard.bilevel_search.base import TrainingProgress
from search_spaces.base import (
    Batch,
    Choice,
    LossAndGradients,
    LossySpace,
    Params,
    Part,
    PerStrategy,
    RelaxedChoice,
    Residuals,
    Selection,
    TrainingStep,
)
from search_spaces.numbered import NumberedSpace

BATCH, WIDTH = 8, 3
ERRORS, SECONDS = [[0.0, 0.3, 0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]]
"""The error and the seconds of each strategy, for two nodes with three and two strategies."""


class Perturbed:
    """The model X w with Σ_v error_v[s_v] · sign_v added, trained by half the mean square to targets.

    Signs ±1 differ over the batch for each node, with mean 0 and no correlation between nodes, so that a choice adds
    exactly Σ_v error² / 2 to a loss whose residual is 0. The first strategy of each node is exact.

    Attributes:
      traces: how many times a loss was traced.
    """

    mesh_axes: Mapping[str, int] = {}
    hardware: Hardware | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, errors: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]], **fields: Any):
        """Makes nodes without edges unless `fields` of `Problem` say otherwise."""
        cost = [np.array(row, float) for row in seconds]
        self.problem = Problem(**{"node_cost": cost, "edge_nodes": np.zeros((0, 2), int), "edge_cost": [], **fields})
        self._numbered = NumberedSpace(self.problem)
        self.node_names = self._numbered.node_names
        self.errors = [np.array(row, float) for row in errors]
        self.traces = 0

    @property
    def arguments(self) -> tuple[Any, Any]:
        """In the precision that is enabled where they are asked for."""
        return jax.eval_shape(lambda: (start(), batch_of(0)))

    def exact_choice(self) -> Choice:
        """The first strategies."""
        return (0,) * len(self.errors)

    def on_mesh(self, mesh: Mesh) -> LossySpace:
        """The same: there is nothing to split."""
        del mesh
        return self

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """At most three names."""
        return ("exact", "rough", "rougher")[: len(self.errors[node])]

    def decode(self, choice: Sequence[int]) -> TrainingStep:
        """The loss and gradients of a choice."""
        decoded = self._numbered.decode(choice)

        def run(
            params: Params, batch: Batch, residuals: Residuals, key: jax.Array, step: jax.Array | int = 0
        ) -> LossAndGradients:
            return self.loss_and_gradients(params, batch, decoded, residuals, key, step)

        return run

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """A part for each node."""
        return self._numbered.explain(choice)

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """Nothing: the loss is not written for devices."""

    def init_residuals(self, params: Params) -> Residuals:
        """None."""
        del params
        return ()

    def loss(
        self, params: Params, batch: Batch, selection: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """Half the mean square."""
        del key, step
        self.traces += 1
        inputs, targets = batch
        output = inputs @ params["w"]
        for v, (selected, errors) in enumerate(zip(selection, self.errors, strict=True)):
            weights = selected if jnp.ndim(selected) else jnp.eye(len(errors))[selected]
            output = output + (weights @ jnp.asarray(errors)) * signs(v)
        return 0.5 * jnp.mean((output - targets) ** 2)

    def loss_and_gradients(
        self,
        params: Params,
        batch: Batch,
        selection: Selection,
        residuals: Residuals,
        key: jax.Array,
        step: jax.Array | int = 0,
    ) -> LossAndGradients:
        """The loss with its gradients by autodiff."""
        loss, gradients = jax.value_and_grad(self.loss)(params, batch, selection, key, step)
        return LossAndGradients(loss, gradients, residuals)

    def loss_increases(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        *,
        validation: Batch | None = None,
        step_sizes: Params = 1.0,
        step: jax.Array | int = 0,
    ) -> PerStrategy:
        """The exact increases where the loss has no residual."""
        del params, key, validation, step_sizes, step
        return [jnp.asarray(0.5 * errors**2) + 0.0 * batch[1].mean() for errors in self.errors]


EXAMPLE = partial(Perturbed, ERRORS, SECONDS)
"""Makes two nodes with three and two strategies."""


class NothingExact(Perturbed):
    """The same without an exact choice."""

    def exact_choice(self) -> Choice:
        """Raises: there is none."""
        raise ValueError("node 0 has no exact strategy")


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


def mixed_increase(
    space: LossySpace, params: Params, batch: Batch, relaxed: RelaxedChoice, key: jax.Array, progress: TrainingProgress
) -> jax.Array:
    """An estimator of a user: the loss of the mixture of all strategies less that of the exact choice."""
    exact = [jax.nn.one_hot(s, row.size) for s, row in zip(space.exact_choice(), relaxed, strict=True)]
    exact_loss = jax.lax.stop_gradient(space.loss(params, batch, exact, key, progress.step))
    return space.loss(params, batch, relaxed, key, progress.step) - exact_loss


def start() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(WIDTH)}
