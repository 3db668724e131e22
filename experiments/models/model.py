"""The common shape of all example models: a training step with its state and batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax


class State(NamedTuple):
    """The state of a training step: any pytrees.

    Attributes:
      params: the trained parameters.
      opt_state: optax's state for them.
      statistics: what the forward pass updates outside the gradient, such as batch norm's running means; else `()`.
    """

    params: Any
    opt_state: Any
    statistics: Any = ()


class Model(NamedTuple):
    """A training step and how to make its arguments.

    Attributes:
      name: for tables.
      step: `(state, batch) -> (state, loss)`, pure; the loss is a scalar mean over the batch.
      init: `key -> state`.
      make_batch: `key -> batch`, random data of the right shapes.
    """

    name: str
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    init: Callable[[jax.Array], Any]
    make_batch: Callable[[jax.Array], Any]


def abstract_arguments(model: Model) -> tuple[Any, Any]:
    """Returns state and batch as `jax.ShapeDtypeStruct`, for planning without touching device memory."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init, key), jax.eval_shape(model.make_batch, key)


def arguments(model: Model, seed: int = 0) -> tuple[Any, Any]:
    """Returns state and batch as arrays, made in one compiled program each."""
    state_key, batch_key = jax.random.split(jax.random.key(seed))
    # Run once: optimised machine code would take longer to make than it saves.
    make = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    return make(model.init)(state_key), make(model.make_batch)(batch_key)


def gradient_step(
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]], optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """Makes a training step from `loss(params, statistics, batch) -> (scalar, new statistics)`."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        differentiate = jax.value_and_grad(loss, has_aux=True)
        (value, statistics), gradients = differentiate(state.params, state.statistics, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, statistics), value

    return step
