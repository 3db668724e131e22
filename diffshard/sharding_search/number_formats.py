"""What a search may do to the numbers of a step: the user's limit, and the groups of products that are decided."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cost.base import Hardware
from cost.real_numbers import AmountOrInf, Count, Index, PositiveAmount, checked_number, whole_number
from diffshard.plans.printing import format_count
from search_spaces.sharding.base import Coded, FormatKey
from search_spaces.sharding.codes import CODES, SUMS, directions, has_feedback, is_narrower, sums_in
from search_spaces.sharding.format_gains import most_gains_s
from search_spaces.sharding.graph import Graph, Vertex
from search_spaces.sharding.product_formats import FORMATS, is_backward, takes
from search_spaces.sharding.space import ShardingSpace

WHOLE_TRAINING_FACTOR = 10.0
"""How much more a format raises the loss of a whole training than of 20 steps: about that was measured with a byte GPT
of two layers over 400 steps, for float8 as for float4."""
GRADIENTS = "sums of gradients"
"""The place of their group."""
KEPT = "arrays kept for the backward pass"
"""The place of these."""
_SUMS = {"gradient": GRADIENTS, "forward": "forward sums", "backward": "backward sums"}
"""What groups of sums are called, by their direction."""
_LAYER_NUMBER = re.compile(r"\d+")
_MODULE = re.compile(r"[\w.-]+")
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
      increases_by: what tells the increase of each group: "looks" run with it and without it, which is a run for each
        group and look; "gradients" differentiate a look's loss through its updates in the weights of formats, all
        groups of a format in two runs. These take about four times as long, keep the state of each step, and compile
        longer.
      factor: from the increase after `steps` steps to that of a whole training.
      rounds: how often at most the increases are measured again, at the formats that the last ones led to.
      validation_runs: short trainings that judge what is found, and simple rules with it: for each training its calls,
        as `calls`. Other batches than those of `calls`, and several seeds, make them a test. An increase is then that
        of the mean loss of the last fifth of each.
      measured_fn: the function that `calls` and `validation_runs` are of, where the searched one is too large for one
        device: a narrower model of the same code, whose products have the same names. None takes the searched one.
      products: the formats that products of matrices may be in, besides their own; convolutions, whose operands XLA
        widens again, stay as they are. There are "float8" (with a scale for each tensor),
        "float8_delayed" (the same, by the largest magnitudes of the last steps), "float8_rows" and "int8" (a scale for
        each row of what is contracted), "float4" (e2m1, a scale for 32 numbers). The hardware must have the rate of
        each. Where a plan has products with delayed scales the step takes and returns a `Carried` in the place of the
        state.
      sums: the formats of codes in which partial sums, as those of gradients, may be sent between devices: "bfloat16",
        "float8", "int8" and "int4". Of those with as many bits as the sums themselves nothing is sent. Each may end
        with " with error feedback", for sums of gradients: what rounding loses is added in the next step. Where a plan
        has such sums the step takes and returns a `Carried` in the place of the state.
      kept: the formats of codes, as for `sums`, as which arrays may be kept from the forward to the backward pass, also
        those that a scan stacks for it. That takes time and saves memory, so that it is chosen where the memory limit
        asks for it.
      exchanges: the formats of codes, as for `kept`, as which activations and their gradients may be exchanged between
        devices, as tokens are that go to experts: in all-to-alls and permutes, which change by which dimension an array
        is split.

    Raises:
      TypeError, ValueError: a field breaks its rule; the error names it and its value.
    """

    max_loss_increase: float
    calls: Sequence[tuple[Any, ...]] = field(default=(), repr=False)
    increases: Mapping[str, float] | None = None
    loss: str | None = None
    steps: int = 20
    looks: int | None = None
    increases_by: Literal["looks", "gradients"] = "looks"
    factor: float = WHOLE_TRAINING_FACTOR
    rounds: int = 2
    validation_runs: Sequence[Sequence[tuple[Any, ...]]] = field(default=(), repr=False)
    measured_fn: Callable[..., Any] | None = None
    products: Sequence[str] = ("float8",)
    sums: Sequence[str] = ()
    kept: Sequence[str] = ()
    exchanges: Sequence[str] = ()

    def __post_init__(self):
        for name in ("max_loss_increase", "factor"):
            checked_number(f"Formats.{name}", getattr(self, name), PositiveAmount)
        if (whole_number(self.steps) or 0) < 2:
            raise ValueError(f"`Formats.steps` must be a whole number, 2 or more, not {self.steps!r}.")
        if self.looks is not None:
            checked_number("Formats.looks", self.looks, Count)
        checked_number("Formats.rounds", self.rounds, Index)
        check_loss("Formats.loss", self.loss)
        if self.increases_by not in ("looks", "gradients"):
            raise ValueError(f'`Formats.increases_by` must be "looks" or "gradients", not {self.increases_by!r}.')
        _check_measurements(self)
        if self.measured_fn is not None and not callable(self.measured_fn):
            raise TypeError(f"`Formats.measured_fn` must be a function, not {type(self.measured_fn).__name__}.")
        for name, known in (("products", FORMATS), ("sums", SUMS), ("kept", CODES), ("exchanges", CODES)):
            _check_names(name, getattr(self, name), known)
        if not (self.products or self.sums or self.kept or self.exchanges):
            raise ValueError(
                "`Formats` has neither `products` nor `sums` nor `kept` nor `exchanges`: give the formats of one of "
                "them."
            )

    @property
    def look_starts(self) -> list[int]:
        """The numbers of the calls with which looks begin."""
        last = len(self.calls) - self.steps
        if self.looks is None:
            return list(range(0, last + 1, self.steps))
        return [round(i * last / max(1, self.looks - 1)) for i in range(self.looks)]


def check_loss(name: str, loss: Any) -> None:
    """Checks that what names the loss among the results may be a path; raises `TypeError` if not."""
    if loss is not None and not isinstance(loss, str):
        raise TypeError(f'`{name}` must be the path of a result, such as "result[1]", or None, not {loss!r}.')


class ProductGroup(NamedTuple):
    """Products with equal places in equal layers, in one format; exchanges of equal modules; sums; or kept arrays.

    Attributes:
      name: its place, the pass, and the contracted dimensions of both operands; then the format, unless it is float8.
        Of sums their direction and the format; of exchanges the modules, the pass and the format.
      place: modules and line without numbers of layers; of exchanges modules, or else the function; of sums their
        direction; `KEPT`.
    """

    name: str
    place: str
    vertices: tuple[Vertex, ...]
    format: str
    kind: Literal["product", "sum", "kept", "exchange"] = "product"

    @property
    def members(self) -> frozenset[FormatKey]:
        """The operations in the format."""
        return frozenset(map(self.member, self.vertices))

    def member(self, vertex: Vertex) -> FormatKey:
        """Returns an operation in the format of the group."""
        return (vertex.index, self.format) if self.kind == "product" else Coded(vertex.index, self.format, self.kind)

    def without(self, keys: Iterable[FormatKey]) -> frozenset[FormatKey]:
        """Returns the keys that are not of these operations, in whatever format."""
        own = {vertex.index for vertex in self.vertices}
        return frozenset(key for key in keys if key[0] not in own or kind_of(key) != self.kind)


def carried_formats(formats: Any) -> list[str]:
    """Returns those of some `Formats`, if there are any, for which a step carries more than its state, as texts."""
    sums, products = (getattr(formats, field, ()) for field in ("sums", "products"))
    is_delayed = {name for name, to in FORMATS.items() if to.is_delayed}
    carried = [f"`Formats.sums` has {name!r}" for name in sums if has_feedback(name)]
    return [*carried, *(f"`Formats.products` has {name!r}" for name in products if name in is_delayed)]


def kind_of(key: FormatKey) -> str:
    """Returns the kind of the group that something in fewer bits is of."""
    return key.kind if isinstance(key, Coded) else "product"


def check_formats(formats: Any, hardware: Hardware) -> None:
    """Checks formats for a search, and against the hardware; None is none."""
    if formats is None:
        return
    if not isinstance(formats, Formats):
        raise TypeError(f"`formats` must be a diffshard.formats.Formats or None, not {type(formats).__name__}.")
    _check_rates(formats.products, hardware)
    _check_looks(formats)


def _check_rates(products: Sequence[str], hardware: Hardware) -> None:
    """Checks that the hardware multiplies in formats of products."""
    rates = hardware.flops_per_s if isinstance(hardware.flops_per_s, Mapping) else {}
    if lacking := [name for name in products if FORMATS[name].rate not in rates]:
        able = ", ".join(name for name, to in FORMATS.items() if to.rate in rates) or "none of the formats"
        has = ", ".join(sorted(rates)) or "one rate for all"
        raise ValueError(
            f"`hardware` {hardware.name!r} has no rate for {FORMATS[lacking[0]].rate}, which products in "
            f"{lacking[0]} need: it has {has}, so that `Formats.products` may have {able}."
        )


def _check_names(field: str, names: Any, known: Collection[str]) -> None:
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise TypeError(f"`Formats.{field}` must be a list or tuple of formats, not {names!r}.")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"`Formats.{field}` has {unknown[0]!r}, which is no format; there are {', '.join(known)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"`Formats.{field}` must have each format once, not {list(names)}.")


def _check_measurements(formats: Formats) -> None:
    """Checks the types of calls and increases."""
    for name in ("calls", "validation_runs"):
        value = getattr(formats, name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"`Formats.{name}` must be a list or tuple, not {type(value).__name__}.")
    if formats.increases is not None and not isinstance(formats.increases, Mapping):
        raise TypeError(
            f"`Formats.increases` must be a dictionary from names of groups to numbers, not {formats.increases!r}."
        )
    for name, increase in (formats.increases or {}).items():
        checked_number(f"Formats.increases[{name!r}]", increase, AmountOrInf)
    for number, run in enumerate(formats.validation_runs):
        if not isinstance(run, Sequence) or len(run) < 2:
            raise ValueError(f"`Formats.validation_runs[{number}]` must be a list of 2 calls or more, not {run!r:.80}.")


def _check_looks(formats: Formats) -> None:
    """Checks that there are calls for looks, where a search has to take some."""
    takes_looks = formats.increases is None or len(formats.calls) > 0
    looks = format_count(formats.looks or 1, "look")
    if takes_looks and len(formats.calls) < (needed := formats.steps * (formats.looks or 1)):
        raise ValueError(
            f"`Formats.calls` has {format_count(len(formats.calls), 'call')}, fewer than the {needed} of {looks} ahead "
            f"with `steps` = {formats.steps}: give the arguments of as many steps of the training, or `increases` that "
            "an earlier search measured."
        )


def rows_of(groups: Sequence[ProductGroup]) -> np.ndarray:
    """Returns `[groups]` the numbers of their rows: equal for those of one kind that share an operation."""
    rows, row_of = np.arange(len(groups)), {}
    for number, group in enumerate(groups):
        for vertex in group.vertices:
            other = row_of.setdefault((group.kind, vertex.index), number)
            rows[rows == rows[number]] = rows[other]
    return rows


def product_groups(space: ShardingSpace, formats: Sequence[str] = ("float8",)) -> list[ProductGroup]:
    """Returns the products of a space that gain time in formats with some strategy, whatever they do to the loss."""
    return _gaining(space, groups_of(space.graph, formats))


def offered_groups(space: ShardingSpace, formats: Formats) -> list[ProductGroup]:
    """Returns the groups that gain time in fewer bits with some strategy, whatever the loss, and all kept arrays."""
    return _gaining(space, all_groups(space, formats))


def _gaining(space: ShardingSpace, groups: Sequence[ProductGroup]) -> list[ProductGroup]:
    most_s = most_gains_s(space.with_formats({member: 0.0 for group in groups for member in sorted(group.members)}))
    return [group for group in groups if group.kind == "kept" or any(most_s[member] > 0 for member in group.members)]


def all_groups(space: ShardingSpace, formats: Formats) -> list[ProductGroup]:
    """Returns all that could be in fewer bits: products, then sums, then kept arrays, then exchanges."""
    graph = space.graph
    residuals = [graph.vertices[r.value.vertex] for r in space.residuals.of_value.values()] if formats.kept else ()
    return [
        *groups_of(graph, formats.products),
        *_sum_groups(graph, formats.sums),
        *_kept_groups(residuals, formats.kept),
        *_exchange_groups(space, formats.exchanges),
    ]


def groups_of(graph: Graph, formats: Sequence[str] = ("float8",)) -> list[ProductGroup]:
    """Returns all products that could be in formats: of each format those in the order of the program."""
    groups: dict[tuple[str, str, str], list[Vertex]] = {}
    for name in formats:
        for vertex in graph.operations():
            if takes(vertex, name):
                groups.setdefault((*_name_and_place(vertex), name), []).append(vertex)
    return [
        ProductGroup(f"{place_and_dims} {name}" if name != "float8" else place_and_dims, place, tuple(vertices), name)
        for (place_and_dims, place, name), vertices in groups.items()
    ]


def _sum_groups(graph: Graph, formats: Sequence[str]) -> list[ProductGroup]:
    """Returns the partial sums that could be sent in formats, those of gradients, forward and backward apart."""
    direction_of = directions(graph) if formats else ()
    groups: dict[tuple[str, str], list[Vertex]] = {}
    for direction, name in product(_SUMS, formats):
        may_feed_back = direction == "gradient" or not has_feedback(name)  # else residuals would be of other numbers
        for vertex in graph.operations():
            if direction_of[vertex.index] == direction and sums_in(vertex, name) and may_feed_back:
                groups.setdefault((_SUMS[direction], name), []).append(vertex)
    return [ProductGroup(f"{place} in {name}", place, tuple(v), name, "sum") for (place, name), v in groups.items()]


def _kept_groups(makers: Sequence[Vertex], formats: Sequence[str]) -> list[ProductGroup]:
    """Returns the arrays that could be kept as codes, by format; `makers` are the operations that make them."""
    groups = []
    for name in formats:
        vertices = tuple(vertex for vertex in makers if is_narrower(name, vertex.results[0].dtype))
        if vertices:
            groups.append(ProductGroup(f"{KEPT} in {name}", KEPT, vertices, name, "kept"))
    return groups


def _exchange_groups(space: ShardingSpace, formats: Sequence[str]) -> list[ProductGroup]:
    """Returns the activations that could be exchanged in formats, those of each module or function, by pass."""
    groups: dict[tuple[str, str, str], list[Vertex]] = {}
    for name in formats:
        for vertex in space.exchangeable:
            if is_narrower(name, vertex.results[0].dtype):
                parts = [part for part in _parts(vertex) if _MODULE.fullmatch(part)]  # not the text of an einsum
                function = vertex.source.rpartition("(")[2].removesuffix(")").rpartition(".")[2]
                place = _LAYER_NUMBER.sub("*", "/".join(parts)) or function
                groups.setdefault((place, _direction(vertex), name), []).append(vertex)
    return [
        ProductGroup(f"{place} {direction} exchanged in {name}".strip(), place, tuple(vertices), name, "exchange")
        for (place, direction, name), vertices in groups.items()
    ]


def _name_and_place(vertex: Vertex) -> tuple[str, str]:
    assert vertex.equation is not None
    (lhs, rhs), _ = vertex.equation.params["dimension_numbers"]
    dims = f"{list(lhs)}x{list(rhs)}".replace(" ", "")
    place = " ".join(filter(None, (_LAYER_NUMBER.sub("*", "/".join(_parts(vertex))), _line(vertex))))
    return f"{place} {_direction(vertex)} {dims}".strip(), place


def _parts(vertex: Vertex) -> list[str]:
    return [part for part in _TRANSFORMATION.sub("", vertex.scope).split("/") if part not in _NO_MODULES]


def _line(vertex: Vertex) -> str:
    return Path(vertex.source.split(" ")[0]).name


def _direction(vertex: Vertex) -> str:
    return "backward" if is_backward(vertex) else "forward"
