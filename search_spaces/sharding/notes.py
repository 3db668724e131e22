"""What a reader of a plan should know of the operations that run whole, or are split less than their rules allow."""

from collections.abc import Sequence

from search_spaces.sharding.base import Axes, Rule
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.given import is_constrained
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.opaque.operations import UNEVEN, name_of, opaque_of, refusal
from search_spaces.sharding.spec import axes_in
from search_spaces.sharding.strategies import strategies_of_rule
from search_spaces.sources import user_source


def notes_of(
    graph: Graph, rules: Sequence[Rule | None], axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the notes of a trace, then one for each kind of operation that runs whole or refuses some parts.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
      axis_names: of the mesh.
      axis_sizes: devices along each axis.
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
    refused: dict[str, list[str]] = {}
    for vertex, reason in _refused_splits(graph, rules, axis_names, axis_sizes):
        assert vertex.equation is not None
        text = f"{name_of(vertex)} does not run on {reason}"
        refused.setdefault(text, []).append(user_source(vertex.equation))
    notes += [f"{text} ({len(sources)}x, {min(sources)})." for text, sources in refused.items()]
    return (*graph.notes, *notes)


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
