"""What every model of the zoo is: a training step in its library's own style, and arguments for it."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx


class TrainingStep(NamedTuple):
    """A training step and what it is called with.

    Attributes:
      function: returns `(*new state, loss)`, or the loss alone if it changes flax's nnx modules in place.
      state: the arguments that the step replaces, the first ones.
      batch: all other arguments.
      jit: how the step is compiled on one device; `nnx.jit` for one that changes modules in place.
      rounding: the largest relative error of one operation in the coarsest type that the model computes in.
    """

    function: Callable[..., Any]
    state: tuple[Any, ...]
    batch: tuple[Any, ...] = ()
    jit: Callable[..., Any] = jax.jit
    rounding: float = 2.0**-24

    @property
    def in_place(self) -> bool:
        """Whether the state is nnx modules, which the step changes in place."""
        return self.jit is nnx.jit


class ZooModel(NamedTuple):
    """An entry of the zoo.

    Attributes:
      module: the module in this folder whose `make()` returns a new `TrainingStep`.
      packages: what has to be installed for it, as pip names it.
      what: the model and what is particular about its training.
      held_out: whether it was looked at only after diffshard had been changed for the others.
    """

    module: str
    packages: tuple[str, ...]
    what: str
    held_out: bool = False

    def make(self) -> TrainingStep:
        """Returns a new training step with its arguments.

        Raises:
          ImportError: one of the packages is not installed.
        """
        return importlib.import_module(f"experiments.zoo.{self.module}").make()
