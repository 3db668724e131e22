"""The vocabulary of search spaces: what every space states, and what one adds whose strategies change the loss.

A space turns its input into a `Problem`, and a choice of the problem back into something that runs. A new space is one
file (or folder) with a class that follows `SearchSpace` and an `EXAMPLE`, a function without arguments that makes a
small instance; the conformance tests find it there and hold it to the rules below.

Letters for sizes: V nodes, S_v strategies of node v.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cost.base import Hardware, Problem
from cost.real_numbers import Amount

Choice = tuple[int, ...]
"""One strategy's index for each node, `[V]`. Functions that take a choice take any sequence of integers."""
PerStrategy = list[jax.Array]
"""V arrays `[S_v]`: a number for each strategy of each node, such as logits, slopes or increases of the loss."""
RelaxedChoice = PerStrategy
"""V arrays `[S_v]` of weights on the simplex: a choice in which every strategy has a share."""
NodeSelection = int | jax.Array
"""What runs at one node: a strategy's index, known when the program is compiled or traced, or weights `[S_v]` for the
weighted sum of all strategies' results."""
Selection = Sequence[NodeSelection]
"""What runs at each node, `[V]`: for each either an index or weights."""
Params = Any
"""A pytree of a model's parameters."""
Batch = Any
"""A pytree of arrays, the data of one training step."""
Residuals = Any
"""A pytree of arrays that strategies have not sent yet and add to the next training step."""


class Traffic(NamedTuple):
    """The data that a part of a choice sends in one step.

    Attributes:
      direction: "forward" for values, "backward" for cotangents, "gradient" for gradients of parameters; empty where
        the space does not distinguish them.
      kind: the kind of the collectives, or "alternatives", which send nothing themselves.
      axes: the mesh axes over which they communicate.
      count: executions in one step; 0 in a branch that does not run.
      sent_bytes: bytes that each device sends.
    """

    direction: str
    kind: str
    axes: tuple[str, ...]
    count: Amount  # pyright: ignore[reportIncompatibleMethodOverride]
    sent_bytes: Amount


class Part(NamedTuple):
    """One entry in the explanation of a choice's cost; the seconds of all parts add up to the cost of the choice.

    Attributes:
      name: a name for people: an operation, an argument, a group of collectives, the busiest device.
      kind: what the time is spent on, such as "compute" or the kind of a collective.
      node: the index of the node that pays. A transfer is paid by the node that receives. None for a cost that all
        nodes share, such as the largest load.
      seconds: seconds in one step.
      traffic: the data that it sends; None where the space does not know.
    """

    name: str
    kind: str
    node: int | None
    seconds: float
    traffic: Traffic | None = None


class LossAndGradients(NamedTuple):
    """The results of one training step before its optimiser.

    Attributes:
      loss: a scalar.
      gradients: as the parameters.
      residuals: for the next step.
    """

    loss: jax.Array
    gradients: Params
    residuals: Residuals


class TrainingStep(Protocol):
    """A training step with one choice: what `LossySpace.decode` returns."""

    def __call__(
        self, params: Params, batch: Batch, residuals: Residuals, key: jax.Array, step: jax.Array | int = 0
    ) -> LossAndGradients:
        """Returns the loss at the parameters, its gradients, and the residuals for the next step.

        Args:
          params: whole arrays.
          batch: whole arrays.
          residuals: as `LossySpace.init_residuals` or the step before returned them.
          key: a random key, for strategies that round stochastically.
          step: the number of the training step, for schedules.
        """
        ...


RunnableT = TypeVar("RunnableT", covariant=True)


class SearchSpace(Protocol[RunnableT]):
    """A search space: all that can be chosen about one input, and the meaning and cost of each choice."""

    @property
    def problem(self) -> Problem:
        """The problem, with a node for each decision and costs in seconds; it is built once."""
        ...

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the nodes, `[V]`, for people."""
        ...

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the names of one node's strategies, `[S_v]`, all different."""
        ...

    def decode(self, choice: Sequence[int]) -> RunnableT:
        """Turns a choice into something that runs.

        Raises:
          ValueError: the choice has the wrong length or an index that its node does not have.
        """
        ...

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Splits the cost of a choice into parts.

        Raises:
          ValueError: the choice has the wrong length or an index that its node does not have.
        """
        ...


class LossySpace(SearchSpace[TrainingStep], Protocol):
    """A space whose strategies change a model's loss as well as its cost.

    Losses, gradients and predicted increases are pure functions that can be jitted; parameters and batches are whole
    arrays. One device simulates the mesh until `on_mesh` moves the space onto real devices.

    Attributes:
      mesh_axes: the number of devices along each mesh axis.
      hardware: the hardware that the seconds are predicted for, or None.
      notes: sentences for the reader of a plan, such as which collectives' bytes are not counted.
      arguments: `(params, batch)` that the space was built for, as `jax.ShapeDtypeStruct`s.
    """

    @property
    def mesh_axes(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def hardware(self) -> Hardware | None: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def arguments(self) -> tuple[Any, Any]: ...  # noqa: D102

    def exact_choice(self) -> Choice:
        """Returns the choice that leaves the loss unchanged, `[V]`.

        Raises:
          ValueError: a node has no exact strategy; the error names the node.
        """
        ...

    def on_mesh(self, mesh: Mesh) -> "LossySpace":
        """Returns the same space, running on a mesh's devices.

        Raises:
          ValueError: the mesh's axes are not `mesh_axes`.
        """
        ...

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """Checks, before anything trains, that the exact choice computes the loss that is meant.

        A space whose loss is written for each device compares it with one device's; others may have nothing to check.

        Args:
          params: whole arrays.
          batch: whole arrays.
          key: a random key.

        Raises:
          ValueError: the loss is another one.
        """
        ...

    def init_residuals(self, params: Params) -> Residuals:
        """Returns the residuals before the first step."""
        ...

    def loss(
        self, params: Params, batch: Batch, selection: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """Returns the loss with a selection, a scalar; it is differentiable in `params` and in weights."""
        ...

    def loss_and_gradients(
        self,
        params: Params,
        batch: Batch,
        selection: Selection,
        residuals: Residuals,
        key: jax.Array,
        step: jax.Array | int = 0,
    ) -> LossAndGradients:
        """Returns the loss with a selection, its gradients after they were sent, and the next step's residuals."""
        ...

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
        """Predicts by how much each strategy increases the loss.

        Args:
          params: whole arrays.
          batch: of the training step.
          key: a random key.
          validation: the batch whose loss is predicted; None takes `batch`.
          step_sizes: how far a unit of each parameter's gradient moves it: one number, or arrays that broadcast to the
            parameters.
          step: the number of the training step.

        Returns:
          V arrays `[S_v]`, in units of the loss; 0 for exact strategies.
        """
        ...


_NOT_A_STEP = (
    "Of a training step `(state, batch) -> (state, loss)` give the function that it differentiates, and as `params` "
    "the parameters alone, without the state of the optimiser: a search takes its steps with `weights_optimizer`."
)


def traced_loss(trace: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `trace(*arguments)`, which traces a loss; an error in it has a note on what a loss must be."""
    try:
        return trace(*arguments)
    except Exception as error:
        error.add_note(f"This was raised in `loss_fn(params, batch)`. {_NOT_A_STEP}")
        raise


def check_is_loss(result: Any) -> None:
    """Checks that a function with results of some shapes is a loss."""
    if _is_floating(result) and result.shape == ():
        return
    leaves = jax.tree.leaves(result)
    is_array = isinstance(result, jax.ShapeDtypeStruct)
    what = f"{result.dtype}{list(result.shape)}" if is_array else f"a {type(result).__name__} of {len(leaves)} arrays"
    has_loss = not is_array and any(_is_floating(leaf) and leaf.shape == () for leaf in leaves)
    advice = _NOT_A_STEP if has_loss else "Reduce it, as by `jnp.mean`."
    raise ValueError(f"`loss_fn` must return one floating-point scalar, the loss, but it returns {what}. {advice}")


def check_are_parameters(names_and_dtypes: dict[str, Any]) -> None:
    """Checks that arrays can be trained."""
    for name, dtype in names_and_dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`params` {name!r} is {dtype}; parameters must be floating-point, put it in `batch`. {_NOT_A_STEP}"
            )


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
