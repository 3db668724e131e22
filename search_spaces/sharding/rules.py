"""The sharding rules of a whole graph."""

from search_spaces.sharding.base import Rule
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.shardy import operation_rules


def rules_of(graph: Graph) -> list[Rule | None]:
    """Returns for each vertex its rule; None for arguments, loops' borders, and operations that have none."""
    operations = list(graph.operations())
    rules: list[Rule | None] = [None] * len(graph.vertices)
    equations = [v.equation for v in operations if v.equation is not None]
    for vertex, rule in zip(operations, operation_rules(equations), strict=True):
        rules[vertex.index] = rule
    return rules
