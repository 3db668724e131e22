"""What a reader of a plan should know of the operations that run whole, or are split less than their rules allow."""

from collections.abc import Iterator, Sequence
from math import prod

from search_spaces.sharding.base import Axes, Rule
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.given import is_constrained
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.opaque.operations import UNEVEN, name_of, opaque_of, refusal
from search_spaces.sharding.spec import axes_in
from search_spaces.sharding.strategies import strategies_of_rule
from search_spaces.sharding.whole_operations import runs_whole

LEAST_NOTED_ELEMENTS = 1024
"""An operation that runs whole is noted from this size of its largest array on; below, it costs less than a launch."""
LEAST_WHOLE_ELEMENTS = 1 << 16
"""An operation of which nothing can be split is noted from this size on."""


def notes_of(
    graph: Graph,
    rules: Sequence[Rule | None],
    axis_names: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    as_program: bool = False,
) -> tuple[str, ...]:
    """Returns the notes of a trace, then one for each kind of operation that runs whole or refuses some parts.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
      axis_names: of the mesh.
      axis_sizes: devices along each axis.
      as_program: whether operations are split only in ways that have a form on one device's part.
    """
    without_rule = [
        vertex
        for vertex in graph.operations()
        if rules[vertex.index] is None
        and not is_constrained(vertex)
        and any(isinstance(x, Value) and x.shape for x in (*vertex.operands, *vertex.results))
    ]
    notes = [
        f"{name} has no sharding rule and runs whole on every device ({sources}). It is priced by the bytes of its "
        "operands and results, and by its arithmetic as far as that is known; `diffshard.kernel` can say more."
        for name, sources in sources_of(without_rule)
    ]
    if as_program:
        notes += [
            f"{name} runs whole on every device ({sources}), and is priced so: what its rule splits has no form on one "
            'device\'s part. `executor="constraints"` can split it.'
            for name, sources in sources_of(_without_form(graph, rules, axis_sizes))
        ]
    notes += [
        f"{name} runs whole on every device ({sources}): its sharding rule splits no dimension of these arrays."
        for name, sources in sources_of(_never_split(graph, rules, axis_sizes))
    ]
    refused: dict[str, list[str]] = {}
    for vertex, reason in _refused_splits(graph, rules, axis_names, axis_sizes):
        text = f"{name_of(vertex)} does not run on {reason}"
        refused.setdefault(text, []).append(vertex.user_source)
    notes += [f"{text} ({len(sources)}x, {min(sources)})." for text, sources in refused.items()]
    return (*graph.notes, *notes)


def _without_form(graph: Graph, rules: Sequence[Rule | None], axis_sizes: tuple[int, ...]) -> list[Vertex]:
    """Returns the operations that their rules split, but only in ways that have no form on one device's part."""
    axes = Axes(axis_sizes, tuple(range(len(axis_sizes))))
    found: list[Vertex] = []
    for vertex, rule in _ruled_operations(graph, rules, LEAST_NOTED_ELEMENTS):
        splits = [s for s in strategies_of_rule(rule, axes) if s.parts > 1]
        if splits and all(runs_whole(vertex, s, axis_sizes) for s in splits):
            found.append(vertex)
    return found


def _never_split(graph: Graph, rules: Sequence[Rule | None], axis_sizes: tuple[int, ...]) -> list[Vertex]:
    """Returns the large operations whose rules split nothing, such as a sort of one dimension."""
    axes = Axes(axis_sizes, tuple(range(len(axis_sizes))))
    return [
        vertex
        for vertex, rule in _ruled_operations(graph, rules, LEAST_WHOLE_ELEMENTS)
        if not any(strategy.parts > 1 for strategy in strategies_of_rule(rule, axes))
    ]


def _ruled_operations(graph: Graph, rules: Sequence[Rule | None], least: int) -> Iterator[tuple[Vertex, Rule]]:
    """Returns the operations with a rule of Shardy's whose largest array has at least so many elements in all trips."""
    for vertex in graph.operations():
        rule = rules[vertex.index]
        if rule is None or opaque_of(vertex) is not None or is_constrained(vertex):
            continue
        if _num_elements(vertex) * vertex.weight >= least:
            yield vertex, rule


def _num_elements(vertex: Vertex) -> int:
    """Returns the size of the largest array that an operation reads or writes."""
    arrays = (x for x in (*vertex.operands, *vertex.results) if isinstance(x, Value))
    return max((prod(x.shape) for x in arrays), default=0)


def _refused_splits(
    graph: Graph, rules: Sequence[Rule | None], axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> list[tuple[Vertex, str]]:
    """Returns the opaque operations that do not run on parts of some mesh axis although their rule allows it, and why.

    Each mesh axis is tried by itself.
    """
    refused: list[tuple[Vertex, str]] = []
    axes = Axes(axis_sizes, tuple(range(len(axis_sizes))))
    for vertex in graph.operations():
        rule = rules[vertex.index]
        if rule is None or opaque_of(vertex) is None:
            continue
        for strategy in strategies_of_rule(rule, axes):
            split = {a for spec in (*strategy.operands, *strategy.unreduced) for a in axes_in(spec)}
            reason = refusal(vertex, strategy, axis_sizes) if len(split) == 1 else None
            if reason not in (None, UNEVEN):
                refused.append((vertex, f"some parts over mesh axis {axis_names[min(split)]!r}: {reason}"))
                break
    return refused
