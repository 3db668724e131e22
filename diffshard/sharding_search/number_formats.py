"""What a search may do to the numbers of a step, and how much that raises the loss: measured by looks ahead.

Rounding harms training mostly through the gradients, so what one rounded step does to the loss says little. A look
ahead runs the user's own step several times from the same state on the same batches, with a group of products in
float8 and without; the difference of the losses is what the group does. One factor leads from there to whole trainings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Hardware
from cost.real_numbers import is_positive, whole_number
from search_spaces.sharding.graph import Vertex
from search_spaces.sharding.number_formats import RATE, SwitchedProducts, is_backward, takes_float8
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

    >>> formats = diffshard.Formats(0.005, calls=[(state, batch) for batch in batches])
    >>> step = diffshard.search(train_step, mesh, formats=formats)

    Attributes:
      max_loss_increase: by how much the loss may rise, in its own unit, as predicted for a whole training.
      calls: for each step of a look ahead the positional arguments of the function, arrays on one device. What results
        replace, the state, is read from the first call only. More calls than `steps` are several looks, one after the
        other in a training without rounding.
      increases: what earlier looks found, by the names of groups, such as `Plan.formats.increases` of a narrower model
        of the same code. Then nothing is measured, and a group that is not named stays as it is.
      loss: the path of the loss among the results, such as "result[1]"; None takes the only floating-point scalar that
        does not replace an argument.
      steps: of one look ahead.
      factor: from the increase after that many steps to that of a whole training.
    """

    max_loss_increase: float
    calls: Sequence[tuple[Any, ...]] = field(default=(), repr=False)
    increases: Mapping[str, float] | None = None
    loss: str | None = None
    steps: int = 20
    factor: float = WHOLE_TRAINING_FACTOR


class ProductGroup(NamedTuple):
    """Products of equal layers that have equal places there.

    Attributes:
      name: modules and line without numbers of layers, pass, and the contracted dimensions of both operands.
      vertices: the products.
    """

    name: str
    vertices: tuple[Vertex, ...]


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
    steps = whole_number(formats.steps)
    if steps is None or steps < 2:
        raise ValueError(f"`Formats.steps` must be 2 or more, not {formats.steps!r}.")
    if formats.increases is None and len(formats.calls) < formats.steps:
        raise ValueError(
            f"`Formats.calls` has {len(formats.calls)} calls, but a look ahead takes `steps` = {formats.steps}: give "
            "the arguments of as many steps of the training, or `increases` that an earlier search measured."
        )
    rates = hardware.flops_per_s
    if not isinstance(rates, Mapping) or RATE not in rates:
        names = sorted(rates) if isinstance(rates, Mapping) else ["one rate for all"]
        raise ValueError(
            f"`hardware` {hardware.name!r} has no rate for {RATE}, which `formats` needs; it has {', '.join(names)}."
        )


def product_groups(space: ShardingSpace) -> list[ProductGroup]:
    """Returns the products of a space that gain time in float8 with some strategy, without what they do to the loss."""
    products = [vertex for vertex in space.graph.operations() if takes_float8(vertex)]
    costs = space.with_float8({vertex.index: 0.0 for vertex in products}).node_costs
    groups: dict[str, list[Vertex]] = {}
    gaining: set[str] = set()
    for vertex in products:
        name = _group_name(vertex)
        groups.setdefault(name, []).append(vertex)
        if np.any(costs.rounds(vertex, space.nodes[vertex.index].strategies)):
            gaining.add(name)
    return [ProductGroup(name, tuple(vertices)) for name, vertices in groups.items() if name in gaining]


def _group_name(vertex: Vertex) -> str:
    assert vertex.equation is not None
    (lhs, rhs), _ = vertex.equation.params["dimension_numbers"]
    parts = [part for part in _TRANSFORMATION.sub("", vertex.scope).split("/") if part not in _NO_MODULES]
    line = Path(vertex.source.split(" ")[0]).name
    direction = "backward" if is_backward(vertex) else "forward"
    dims = f"{list(lhs)}x{list(rhs)}".replace(" ", "")
    return " ".join(filter(None, (_LAYER_NUMBER.sub("*", "/".join(parts)), line, direction, dims)))


def loss_increases(
    formats: Formats,
    space: ShardingSpace,
    groups: Sequence[ProductGroup],
    calls: Sequence[Sequence[Any]],
    loss: int,
) -> list[float]:
    """Measures what each group of products in float8 adds to the loss of a whole training.

    The losses of the second half of each look ahead are compared, and the increases of all looks averaged. A group
    whose losses are lower on average counts as harmless: there rounding is noise.

    Args:
      formats: the looks.
      space: of the step.
      groups: of its products.
      calls: flat arguments of each step.
      loss: which flat result is the loss.

    Raises:
      ValueError: a loss is not finite.
    """
    group_of = {vertex.index: number for number, group in enumerate(groups) for vertex in group.vertices}
    run = jax.jit(SwitchedProducts(space.graph, space.layout([0] * len(space.nodes)), group_of))
    replaced = [(result, argument) for result, argument in enumerate(space.graph.feedback) if argument is not None]

    def look(state: Mapping[int, Any], window: Sequence[Sequence[Any]], switches: np.ndarray) -> tuple[dict, float]:
        state, losses = dict(state), []
        for arguments in window:
            results = run(jnp.asarray(switches), *(state.get(i, array) for i, array in enumerate(arguments)))
            state = {argument: results[result] for result, argument in replaced}
            losses.append(results[loss])
        late = np.array(losses[len(losses) // 2 :], np.float64)
        if not np.all(np.isfinite(late)):
            where = ", ".join(g.name for g, is_on in zip(groups, switches, strict=True) if is_on) or "no product"
            raise ValueError(
                f"A look ahead of {len(losses)} steps has a loss that is not finite, with {where} in float8. Give "
                "`Formats.calls` from a later point of the training, or a smaller step."
            )
        return state, float(late.mean())

    off = np.zeros(len(groups), bool)
    state: dict[int, Any] = {}
    increases = np.zeros((len(calls) // formats.steps, len(groups)))
    for number in range(len(increases)):
        window = calls[number * formats.steps : (number + 1) * formats.steps]
        next_state, exact = look(state, window, off)
        for group in range(len(groups)):
            increases[number, group] = look(state, window, np.arange(len(groups)) == group)[1] - exact
        state = next_state
    return [max(0.0, formats.factor * float(increase)) for increase in increases.mean(axis=0)]


def loss_result(formats: Formats, space: ShardingSpace, out_paths: Sequence[str]) -> int:
    """Returns which flat result is the loss.

    Raises:
      ValueError: it is not among the results or no floating-point scalar, or several could be it.
    """
    types: list[Any] = [getattr(output, "aval", output) for output in space.graph.outputs]
    feedback = space.graph.feedback
    could_be = [
        i
        for i, t in enumerate(types)
        if t.shape == () and jnp.issubdtype(t.dtype, jnp.floating) and feedback[i] is None
    ]
    names = ", ".join(out_paths[i] for i in could_be) or "none of the results"
    if formats.loss is None:
        if len(could_be) != 1:
            raise ValueError(f"`Formats.loss` must name the loss among the results: {names} could be it.")
        return _checked_loss(could_be[0], types, out_paths)
    if formats.loss not in out_paths or out_paths.index(formats.loss) not in could_be:
        raise ValueError(
            f"`Formats.loss` is {formats.loss!r}, which is no floating-point scalar among the results; "
            f"{names} could be it."
        )
    return _checked_loss(out_paths.index(formats.loss), types, out_paths)


def _checked_loss(result: int, types: Sequence[Any], out_paths: Sequence[str]) -> int:
    """Returns a result that is fine enough to be told from itself with other formats."""
    if types[result].dtype.itemsize < 4:
        raise ValueError(
            f"The loss `{out_paths[result]}` is {types[result].dtype}, which is too coarse for what a format changes. "
            "Compute it in float32: `loss.astype(jnp.float32)` after the mean is too late."
        )
    return result
