"""What a search may do to the numbers of a step: the user's limit, and the groups of products that are decided."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cost.base import Hardware
from cost.real_numbers import is_positive, real_number, whole_number
from search_spaces.sharding.base import Coded
from search_spaces.sharding.codes import FORMATS, directions, sum_formats
from search_spaces.sharding.float8 import FLOAT8, RATE, is_backward, takes_float8
from search_spaces.sharding.float8_gains import most_gains_s
from search_spaces.sharding.graph import Graph, Vertex
from search_spaces.sharding.space import ShardingSpace

WHOLE_TRAINING_FACTOR = 10.0
"""How much more a format raises the loss of a whole training than of 20 steps: about that was measured with a byte GPT
of two layers over 400 steps, for float8 as for float4."""
KINDS = ("products", "sums")
"""What can be in fewer bits, as `Formats.kinds` names it: products, and the sums that finish partial results."""
_SUMS = {"gradient": "sums of gradients", "forward": "forward sums", "backward": "backward sums"}
_LAYER_NUMBER = re.compile(r"\d+")
_TRANSFORMATION = re.compile(r"\w+\(|\)")
_NO_MODULES = {"", "rematted_computation", "checkpoint", "while", "body", "closed_call"}  # what JAX puts into scopes


@dataclass(frozen=True)
class Formats:
    """How far number formats may raise the loss of a training, and what that is measured by.

    >>> formats = diffshard.Formats(0.005, calls=[(state, batch) for batch in batches])
    >>> step = diffshard.search(train_step, mesh, formats=formats)

    Attributes:
      max_loss_increase: by how much the loss may rise, in its own unit, in a whole training.
      calls: for each step of a training the positional arguments of the function, arrays on one device. What results
        replace, the state, is read from the first call only.
      increases: what earlier looks found, by the names of groups, such as `Plan.formats.increases` of a narrower model
        of the same code. They stand for the looks of the first round, and a group that is not named stays as it is.
      loss: the path of the loss among the results, such as "result[1]"; None takes the only floating-point scalar that
        does not replace an argument.
      steps: of one look ahead.
      looks: at how many points of the training that `calls` are; the first is its beginning, and the others are spread
        evenly. None takes one look after the other.
      factor: from the increase after `steps` steps to that of a whole training.
      rounds: how often at most the increases are measured again, at the formats that the last ones led to.
      validation_runs: short trainings that judge what is found, and simple rules with it: for each training its calls,
        as `calls`. Other batches than those of `calls`, and several seeds, make them a test. An increase is then that
        of the mean loss of the last fifth of each.
      kinds: what may be in fewer bits: "products" in float8; "sums" of partial results, as of gradients, which are sent
        between devices in bfloat16, float8 or int8.
      measured_fn: the function that `calls` and `validation_runs` are of, where the searched one is too large for one
        device: a narrower model of the same code, whose products have the same names. None takes the searched one.
    """

    max_loss_increase: float
    calls: Sequence[tuple[Any, ...]] = field(default=(), repr=False)
    increases: Mapping[str, float] | None = None
    loss: str | None = None
    steps: int = 20
    looks: int | None = None
    factor: float = WHOLE_TRAINING_FACTOR
    rounds: int = 2
    validation_runs: Sequence[Sequence[tuple[Any, ...]]] = field(default=(), repr=False)
    measured_fn: Callable[..., Any] | None = None
    kinds: Sequence[str] = KINDS

    @property
    def look_starts(self) -> list[int]:
        """The numbers of the calls with which looks begin."""
        last = len(self.calls) - self.steps
        if self.looks is None:
            return list(range(0, last + 1, self.steps))
        return [round(i * last / max(1, self.looks - 1)) for i in range(self.looks)]


@dataclass(frozen=True)
class CodeGroup:
    """Sums, or kept arrays, that are in codes of one format or not.

    Attributes:
      name: what they are, with their format.
      place: what they are: of the groups of one place each member is in one.
      keys: the members, in program order.
    """

    name: str
    place: str
    keys: tuple[Coded, ...]

    @property
    def format(self) -> str:
        """The format, as plans name it."""
        return self.keys[0].format


class ProductGroup(NamedTuple):
    """Products of equal layers that have equal places there.

    Attributes:
      name: its place, the pass, and the contracted dimensions of both operands.
      place: modules and line without numbers of layers.
      vertices: the products, in program order.
    """

    name: str
    place: str
    vertices: tuple[Vertex, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """The indices of the products' vertices."""
        return tuple(vertex.index for vertex in self.vertices)

    @property
    def format(self) -> str:
        """The format, as plans name it."""
        return FLOAT8


Group = ProductGroup | CodeGroup


def check_formats(formats: Any, hardware: Hardware) -> None:
    """Checks formats against the hardware; None is none.

    Raises:
      TypeError, ValueError: one of them breaks a rule; the error names it and its value.
    """
    if formats is None:
        return
    if not isinstance(formats, Formats):
        raise TypeError(f"`formats` must be a diffshard.Formats or None, not {type(formats).__name__}.")
    for name in ("max_loss_increase", "factor"):
        if not is_positive(getattr(formats, name)) or np.isinf(getattr(formats, name)):
            raise ValueError(f"`Formats.{name}` must be a positive number, not {getattr(formats, name)!r}.")
    for name, least in (("steps", 2), ("rounds", 0), ("looks", 1)):
        value = getattr(formats, name)
        number = whole_number(value)
        if (value is not None or name != "looks") and (number is None or number < least):
            raise ValueError(f"`Formats.{name}` must be {least} or more, not {value!r}.")
    if isinstance(formats.kinds, str) or not set(formats.kinds) <= set(KINDS) or not formats.kinds:
        raise ValueError(f"`Formats.kinds` must be some of {', '.join(KINDS)}, not {formats.kinds!r}.")
    _check_measurements(formats)
    if formats.measured_fn is not None and not callable(formats.measured_fn):
        raise TypeError(f"`Formats.measured_fn` must be a function, not {type(formats.measured_fn).__name__}.")
    rates = hardware.flops_per_s
    if not isinstance(rates, Mapping) or RATE not in rates:
        names = sorted(rates) if isinstance(rates, Mapping) else ["one rate for all"]
        raise ValueError(
            f"`hardware` {hardware.name!r} has no rate for {RATE}, which `formats` needs; it has {', '.join(names)}."
        )


def _check_measurements(formats: Formats) -> None:
    """Checks the calls and the increases of formats."""
    for name in ("calls", "validation_runs"):
        value = getattr(formats, name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"`Formats.{name}` must be a list or tuple, not {type(value).__name__}.")
    if formats.increases is not None and not isinstance(formats.increases, Mapping):
        raise TypeError(
            f"`Formats.increases` must be a dictionary from names of groups to numbers, not {formats.increases!r}."
        )
    for name, increase in (formats.increases or {}).items():
        if real_number(increase) is None or np.isnan(increase):
            raise ValueError(f"`Formats.increases[{name!r}]` must be a number, not {increase!r}.")
    takes_looks = formats.increases is None or len(formats.calls) > 0
    if takes_looks and len(formats.calls) < formats.steps * (formats.looks or 1):
        raise ValueError(
            f"`Formats.calls` has {len(formats.calls)} calls, but {formats.looks or 1} looks ahead take `steps` = "
            f"{formats.steps} each: give the arguments of as many steps of the training, or `increases` that an "
            "earlier search measured."
        )
    for number, run in enumerate(formats.validation_runs):
        if len(run) < 2:
            raise ValueError(f"`Formats.validation_runs[{number}]` must have 2 calls or more, not {len(run)}.")


def product_groups(space: ShardingSpace) -> list[ProductGroup]:
    """Returns the products of a space that gain time in float8 with some strategy, without what they do to the loss."""
    return [group for group in gaining_groups(space, ("products",)) if isinstance(group, ProductGroup)]


def gaining_groups(space: ShardingSpace, kinds: Collection[str]) -> list[Group]:
    """Returns what gains time in fewer bits with some strategy, without what that does to the loss."""
    groups = all_groups(space.graph, kinds)
    most_s = most_gains_s(space.with_formats({key: 0.0 for group in groups for key in group.keys}))
    return [group for group in groups if any(most_s[key] > 0 for key in group.keys)]


def all_groups(graph: Graph, kinds: Collection[str]) -> list[Group]:
    """Returns all that could be in fewer bits, of some of `KINDS`."""
    of_kind = {"products": groups_of, "sums": sum_groups}
    return [group for kind in KINDS if kind in kinds for group in of_kind[kind](graph)]


def sum_groups(graph: Graph) -> list[CodeGroup]:
    """Returns the sums that could be sent in fewer bits: those of gradients, forward and backward, by format."""
    of, keys = directions(graph), {}
    for vertex in graph.operations():
        for name in sum_formats(vertex):
            keys.setdefault((of[vertex.index], name), []).append(Coded("sum", vertex.index, name))
    return [
        CodeGroup(f"{_SUMS[direction]} in {name}", _SUMS[direction], tuple(keys[direction, name]))
        for direction in _SUMS
        for name in FORMATS
        if (direction, name) in keys
    ]


def groups_of(graph: Graph) -> list[ProductGroup]:
    """Returns all products that could be in float8, in the order of the program."""
    groups: dict[tuple[str, str], list[Vertex]] = {}
    for vertex in graph.operations():
        if takes_float8(vertex):
            groups.setdefault(_name_and_place(vertex), []).append(vertex)
    return [ProductGroup(*names, tuple(vertices)) for names, vertices in groups.items()]


def _name_and_place(vertex: Vertex) -> tuple[str, str]:
    assert vertex.equation is not None
    (lhs, rhs), _ = vertex.equation.params["dimension_numbers"]
    parts = [part for part in _TRANSFORMATION.sub("", vertex.scope).split("/") if part not in _NO_MODULES]
    line = Path(vertex.source.split(" ")[0]).name
    direction = "backward" if is_backward(vertex) else "forward"
    dims = f"{list(lhs)}x{list(rhs)}".replace(" ", "")
    place = " ".join(filter(None, (_LAYER_NUMBER.sub("*", "/".join(parts)), line)))
    return f"{place} {direction} {dims}".strip(), place
