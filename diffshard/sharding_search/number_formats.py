"""What a search may do to the numbers of a step: the user's limit, and the groups of products that are decided."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cost.base import Hardware
from cost.real_numbers import is_positive, real_number, whole_number
from search_spaces.sharding.float8 import RATE, is_backward, takes_float8
from search_spaces.sharding.float8_gains import most_gains_s
from search_spaces.sharding.graph import Graph, Vertex
from search_spaces.sharding.space import ShardingSpace

WHOLE_TRAINING_FACTOR = 10.0
"""How much more a format raises the loss of a whole training than of 20 steps: about that was measured with a byte GPT
of two layers over 400 steps, for float8 as for float4."""
_LAYER_NUMBER = re.compile(r"\d+")
_TRANSFORMATION = re.compile(r"\w+\(|\)")
_NO_MODULES = {"", "rematted_computation", "checkpoint", "while", "body", "closed_call"}  # what JAX puts into scopes


@dataclass(frozen=True)
class Formats:
    """How far number formats may raise the loss of a training, and what that is measured by.

    >>> formats = diffshard.formats.Formats(0.005, calls=[(state, batch) for batch in batches])
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

    @property
    def look_starts(self) -> list[int]:
        """The numbers of the calls with which looks begin."""
        last = len(self.calls) - self.steps
        if self.looks is None:
            return list(range(0, last + 1, self.steps))
        return [round(i * last / max(1, self.looks - 1)) for i in range(self.looks)]


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


def check_formats(formats: Any, hardware: Hardware) -> None:
    """Checks formats against the hardware; None is none.

    Raises:
      TypeError, ValueError: one of them breaks a rule; the error names it and its value.
    """
    if formats is None:
        return
    if not isinstance(formats, Formats):
        raise TypeError(f"`formats` must be a diffshard.formats.Formats or None, not {type(formats).__name__}.")
    for name in ("max_loss_increase", "factor"):
        if not is_positive(getattr(formats, name)) or np.isinf(getattr(formats, name)):
            raise ValueError(f"`Formats.{name}` must be a positive number, not {getattr(formats, name)!r}.")
    for name, least in (("steps", 2), ("rounds", 0), ("looks", 1)):
        value = getattr(formats, name)
        number = whole_number(value)
        if (value is not None or name != "looks") and (number is None or number < least):
            raise ValueError(f"`Formats.{name}` must be {least} or more, not {value!r}.")
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
    groups = groups_of(space.graph)
    most_s = most_gains_s(space.with_float8({v.index: 0.0 for group in groups for v in group.vertices}))
    return [group for group in groups if any(most_s[vertex.index] > 0 for vertex in group.vertices)]


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
