"""Optimisers of embedding tables: what they keep for the rows, and how a step changes these.

Pricing, memory, the first state and updates all read one description. The state of a row is one vector of float32: what
the optimiser keeps for the row, then what it keeps for each of its columns. A piece of some columns keeps those of its
own columns, so that the state lies where the numbers are.

Letters for sizes: n rows, C columns of a piece, K = numbers of state for each of its rows.

Source: row-wise Adagrad is FBGEMM's `EXACT_ROWWISE_ADAGRAD`, Adam for rows that were read PyTorch's `SparseAdam`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

STATE_NUMBER_BYTES = 4
"""State is float32, whatever the table's type."""
ADAM_BETAS = 0.9, 0.999
"""What is left after a step of Adam's means of gradients and of their squares."""


class Step(NamedTuple):
    """The numbers of a step that are the same for all rows.

    Attributes:
      rate: the learning rate, float32.
      number: of the step, from 1 on, float32; only optimisers that count steps read it.
      epsilon: against division by zero.
    """

    rate: jax.Array
    number: jax.Array
    epsilon: float | jax.Array


Update = Callable[[jax.Array, jax.Array, jax.Array, Step], tuple[jax.Array, jax.Array]]
"""From the state of rows `[n, K]`, their gradients `[n, C]`, the mean of the squared gradient over all columns of the
whole table `[n]`, and the step to what is subtracted from the rows, `[n, C]`, and their new state `[n, K]`."""


class TableOptimizer(NamedTuple):
    """An optimiser of embedding tables.

    Attributes:
      numbers_per_row: of state for each row.
      numbers_per_element: of state for each number of the table.
      update: of rows; a gradient of zeros must leave a row as it is.
      counts_steps: whether `update` reads the number of the step.
    """

    numbers_per_row: int
    numbers_per_element: int
    update: Update
    counts_steps: bool = False

    def state_columns(self, columns: int) -> int:
        """Returns how many numbers of state a row has, K, by its number of columns."""
        return self.numbers_per_row + self.numbers_per_element * columns

    def state_bytes(self, columns: Any) -> Any:
        """Returns the bytes of state of a row, by its number of columns; both are numbers or arrays."""
        return STATE_NUMBER_BYTES * self.state_columns(columns)


def _rowwise_adagrad(
    state: jax.Array, gradients: jax.Array, squares: jax.Array, step: Step
) -> tuple[jax.Array, jax.Array]:
    """Subtracts rate · g / (√s + epsilon), with s += mean(g²)."""
    state = state + squares[:, None]
    return step.rate / (jnp.sqrt(state) + step.epsilon) * gradients, state


def _adagrad(state: jax.Array, gradients: jax.Array, squares: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
    """Subtracts rate · g / (√s + epsilon), with s += g²."""
    del squares
    state = state + jnp.square(gradients)
    return step.rate * gradients / (jnp.sqrt(state) + step.epsilon), state


def _adam(state: jax.Array, gradients: jax.Array, squares: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
    """Subtracts rate · √(1 - b₂ᵗ) / (1 - b₁ᵗ) · m / (√v + epsilon); rows whose gradient is 0 keep m and v."""
    means, square_means = jnp.split(state, 2, axis=1)
    first, second = ADAM_BETAS
    means = first * means + (1 - first) * gradients
    square_means = second * square_means + (1 - second) * jnp.square(gradients)
    first_share, second_share = (
        -jnp.expm1(step.number * math.log(beta)) for beta in ADAM_BETAS
    )  # 1 - bᵗ, also of few t
    rate = step.rate * jnp.sqrt(second_share) / first_share
    has_gradient = squares[:, None] > 0
    changes = jnp.where(has_gradient, rate * means / (jnp.sqrt(square_means) + step.epsilon), 0.0)
    return changes, jnp.where(has_gradient, jnp.concatenate([means, square_means], axis=1), state)


def _sgd(state: jax.Array, gradients: jax.Array, squares: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
    """Subtracts rate · g."""
    del squares
    return step.rate * gradients, state


ROWWISE_ADAGRAD = "rowwise_adagrad"
OPTIMIZERS = {
    ROWWISE_ADAGRAD: TableOptimizer(1, 0, _rowwise_adagrad),
    "adagrad": TableOptimizer(0, 1, _adagrad),
    "adam": TableOptimizer(0, 2, _adam, counts_steps=True),
    "sgd": TableOptimizer(0, 0, _sgd),
}
"""The optimisers by name."""
