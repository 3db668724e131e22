"""The formats that people choose without measuring: what a found plan has to beat."""

import math
from collections.abc import Sequence

from diffshard.sharding_search.number_formats import CodeGroup, ProductGroup
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.float8 import is_backward

_LEAST_LAYERS = 3
"""Equal products from which on the first and the last of them count as those of the first and last layers."""


def simple_rules(groups: Sequence[ProductGroup], sums: Sequence[CodeGroup] = ()) -> dict[str, frozenset[FormatKey]]:
    """Returns by name of a rule what it puts into fewer bits: the indices of products in float8, and sums.

    The head is the place of the last product of the forward pass. The first and last layers are the places of the first
    and last product, and of many equal products the first and the last.

    Args:
      groups: all products of a step.
      sums: all sums of a step, of which a rule sends those of gradients in one format.
    """
    vertices = [(vertex, group.place) for group in groups for vertex in group.vertices]
    backward = min((v.position for v, _ in vertices if is_backward(v)), default=math.inf)
    forward = sorted((v.position, place) for v, place in vertices if v.position < backward)
    ends = {forward[0][1], forward[-1][1]} if forward else set()
    head = {forward[-1][1]} if forward else set()

    def products(places: set[str], inner_only: bool = False) -> frozenset[int]:
        kept = [group for group in groups if group.place not in places]
        cut = [1 if inner_only and len(group.vertices) >= _LEAST_LAYERS else 0 for group in kept]
        pairs = zip(kept, cut, strict=True)
        return frozenset(v.index for group, n in pairs for v in group.vertices[n : len(group.vertices) - n])

    return {
        "all products": products(set()),
        "all but the head": products(head),
        "all but first and last layers": products(ends, inner_only=True),
        **{group.name: frozenset(group.keys) for group in sums if group.name.startswith("sums of gradients")},
    }
