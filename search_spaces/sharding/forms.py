"""Which vertices compute the same, so that what depends only on that is built once for all equal layers."""

from collections.abc import Hashable, Sequence

from search_spaces.sharding.base import Rule
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex


def forms_of(graph: Graph, rules: Sequence[Rule | None]) -> list[int]:
    """Returns a number for each vertex, equal where kind, equation, types and weights are equal, whatever is read.

    Equal equations are told by their rules, which `shardy.operation_rules` makes once for each; an operation without a
    rule has a form of its own.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_form(v, rules[v.index]), len(numbers)) for v in graph.vertices]


def _form(vertex: Vertex, rule: Rule | None) -> Hashable:
    has_own_form = vertex.kind == "operation" and rule is None
    return (
        vertex.kind, vertex.primitive, vertex.index if has_own_form else id(rule), vertex.weight,
        tuple(vertex.operand_weight), tuple(map(_type, vertex.operands)), tuple(map(_type, vertex.results)),
    )  # fmt: skip


def _type(array: Operand) -> Hashable:
    """Returns what the form of a vertex says about an array; literals are told from values, not by their numbers."""
    if isinstance(array, Value):
        return array.shape, array.dtype
    return "literal", getattr(array.aval, "shape", ()), getattr(array.aval, "dtype", None)
