"""What an executor gives an interpreter of graphs: its arrays, the flow of its work, and how it keeps codes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend import core

from search_spaces.partition_specs import IndexedSpec
from search_spaces.replay import scan_again
from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.kept_codes import LateReads

Path = Callable[[IndexedSpec, IndexedSpec], Sequence[ReshardStep]]
"""`path(source, target)`: the steps from one spec to another, such as `resharding.Paths` has them. Where the layout has
products in float8, it is `resharding.Paths`."""
ReadOperand = Callable[..., Any]
"""`read(operand, spec)`: the array of an operand, brought to a spec. With its position as a third argument it is what
`Encode` made of it, where that is moved."""
Encode = Callable[[Any, Vertex, int, IndexedSpec], Any]
"""`encode(array, vertex, position, spec)`: what is moved of an operand of a product in float8: codes with a scale."""


class Arrays(Protocol):
    """The functions of an executor on arrays."""

    def reshard(
        self, array: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], exchanged_in: str = ""
    ) -> Any:
        """Brings an array of a value from a spec along some steps, as codes in a format unless that is ""."""
        ...

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Fixes the spec of an array that comes out of a loop or is stored, where the executor has to say so."""
        ...

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        """Runs an operation; its results have the specs of the strategy's `unreduced`."""
        ...

    def reduce(self, vertex: Vertex, results: Sequence[Any], residual: Any = None) -> Sequence[Any]:
        """Finishes what an operation left: the results have the specs of the strategy's `results`.

        If there is a residual of the operation's sums, the next one follows the results.
        """
        ...

    def context_of(self, equation: core.JaxprEqn) -> AbstractContextManager[None]:
        """Restores what an equation was traced with, as far as it holds for these arrays."""
        ...


def _from_host(array: Any, value: Value, after: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    del value
    array, *after = jax.lax.optimization_barrier((array, *after))
    return jax.device_put(array, jax.memory.Space.Device), after


def _to_host(array: Any, value: Value) -> Any:
    del value
    return jax.device_put(array, jax.memory.Space.Host)


def _as_it_lies(array: Any, major: int = 0) -> Any:
    del major
    return array


class Flow(NamedTuple):
    """The control flow of an interpreter: barriers, loops and branches, with the signatures of those in `jax.lax`.

    `from_host(array, value, others)` copies an array of the state to the device when the others are there, and returns
    it and these; `to_host(array, value)` copies what replaces one to the host's memory.

    A player of the program's timeline has its own; see `program_steps.py`. `lay_out(array, dimension)` says how an
    array lies in memory: the dimension, by default the first, is the slowest, and the others are in order.
    """

    barrier: Callable[[list[Any]], Sequence[Any]] = jax.lax.optimization_barrier
    scan: Callable[..., tuple[Any, Any]] = scan_again
    while_loop: Callable[..., Any] = jax.lax.while_loop
    switch: Callable[..., Any] = jax.lax.switch
    lay_out: Callable[..., Any] = _as_it_lies
    from_host: Callable[[Any, Value, Sequence[Any]], tuple[Any, Sequence[Any]]] = _from_host
    to_host: Callable[[Any, Value], Any] = _to_host


class Keeping(NamedTuple):
    """How an executor keeps values as codes for the backward pass.

    Attributes:
      encode: `encode(array, value)`: the array for the forward pass, and its codes.
    """

    encode: Callable[[Any, Value], tuple[Any, Any]]
    decode: Callable[[Any, Value], Any]
    late: LateReads
