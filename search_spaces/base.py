"""The vocabulary of search spaces: what every space states, and what one adds whose strategies change the loss.

A space turns its input into a `Problem`, and a choice of the problem back into something that runs. A new space is one
file (or folder) with a class that follows `SearchSpace` and an `EXAMPLE`, a function without arguments that makes a
small instance; the conformance tests find it there and hold it to the rules below.

Letters for sizes: V nodes, S_v strategies of node v.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import Mesh

from cost.base import Hardware, Problem

Choice = Sequence[int]
"""One strategy's index for each node, `[V]`."""
RelaxedChoice = list[jax.Array]
"""V arrays `[S_v]` of weights on the simplex: a choice whose strategies are all taken in part."""
Selected = int | jax.Array
"""What runs at one node: a strategy's index, known when the program is compiled or traced, or weights `[S_v]` for the
weighted sum of all strategies' results."""
Selection = Sequence[Selected]
"""What runs at each node, `[V]`: a choice, a relaxed choice, or a mixture of both."""
Params = Any
"""A pytree of a model's parameters."""
Batch = Any
"""A pytree of arrays, the data of one training step."""
Residuals = Any
"""A pytree of what strategies have not sent yet and carry to the next training step."""


class Traffic(NamedTuple):
    """What a part of a choice sends in one step.

    Attributes:
      direction: of values ("forward"), of cotangents ("backward") or of parameter gradients ("gradient"); empty where
        the space does not tell them apart.
      kind: of the collectives, or "alternatives", which send nothing themselves.
      axes: the mesh axes over which they go.
      count: executions in one step; none in a branch that does not run.
      sent_bytes: by each device.
    """

    direction: str
    kind: str
    axes: tuple[str, ...]
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    sent_bytes: float


class Part(NamedTuple):
    """A part of what a choice costs; the seconds of all parts add up to the cost of the choice.

    Attributes:
      name: for people: an operation, an argument, a group of collectives, the busiest device.
      kind: what the time is spent on, as "compute" or the kind of a collective.
      node: the index of the node that pays; of a transfer the one that receives; None for what all nodes share, such as
        the largest load.
      seconds: in one step.
      traffic: what it sends, where the space knows.
    """

    name: str
    kind: str
    node: int | None
    seconds: float
    traffic: Traffic | None = None


RunnableT = TypeVar("RunnableT", covariant=True)


class SearchSpace(Protocol[RunnableT]):
    """Everything that can be chosen about one input, and what a choice means."""

    @property
    def problem(self) -> Problem:
        """A node for each choice that is to be made, costs in seconds; built once."""
        ...

    @property
    def node_names(self) -> tuple[str, ...]:
        """What is chosen for, `[V]` names for people."""
        ...

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """What one node chooses from, `[S_v]` names, no two alike."""
        ...

    def decode(self, choice: Choice) -> RunnableT:
        """What a choice means, as something that runs.

        Raises:
          ValueError: the choice has the wrong length or an index that its node does not have.
        """
        ...

    def explain(self, choice: Choice) -> tuple[Part, ...]:
        """What a choice costs, part by part.

        Raises:
          ValueError: as `decode`.
        """
        ...


@runtime_checkable
class LossySpace(SearchSpace[Any], Protocol):
    """A space whose strategies change a model's loss as well as its cost.

    Losses, gradients and predicted increases are pure functions that can be jitted; parameters and batches are whole
    arrays. Everything runs emulated on one device until `on_mesh` moves it onto real ones.

    Attributes:
      mesh_axes: devices along each mesh axis.
      hardware: what the seconds are for, or None.
      notes: what a reader should know, such as collectives whose bytes are not counted.
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
        """The choice that leaves the loss as it is, `[V]`.

        Raises:
          ValueError: a node has no exact strategy; names it.
        """
        ...

    def on_mesh(self, mesh: Mesh) -> "LossySpace":
        """The same space, running on the devices of a mesh.

        Raises:
          ValueError: the mesh's axes are not `mesh_axes`.
        """
        ...

    def init_residuals(self, params: Params) -> Residuals:
        """What strategies carry from step to step, before the first one."""
        ...

    def loss(
        self, params: Params, batch: Batch, selection: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """The loss of a selection, a scalar; differentiable in `params` and in weights."""
        ...

    def loss_and_gradients(
        self,
        params: Params,
        batch: Batch,
        selection: Selection,
        residuals: Residuals,
        key: jax.Array,
        step: jax.Array | int = 0,
    ) -> tuple[jax.Array, Params, Residuals]:
        """The loss of a selection, its gradients as they arrive, and the residuals for the next step."""
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
    ) -> RelaxedChoice:
        """By how much each strategy is predicted to increase the loss: V arrays `[S_v]`, 0 for exact strategies."""
        ...
