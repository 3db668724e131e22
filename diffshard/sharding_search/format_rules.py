"""The formats that people choose without measuring: what a found plan has to beat."""

import math
from collections.abc import Sequence

from diffshard.sharding_search.number_formats import GRADIENTS, KEPT, ProductGroup
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.product_formats import FORMATS, is_backward

_LEAST_LAYERS = 3
"""Equal products from which on the first and the last of them count as those of the first and last layers."""


def exchange_rules(groups: Sequence[ProductGroup]) -> dict[str, frozenset[FormatKey]]:
    """Returns by name of a rule all exchanges of a pass in one format, of what some groups have."""
    rules: dict[str, frozenset[FormatKey]] = {}
    for group in groups:
        for vertex in group.vertices if group.kind == "exchange" else ():
            name = f"exchanges of the {'backward' if is_backward(vertex) else 'forward'} pass in {group.format}"
            rules[name] = rules.get(name, frozenset()) | {group.member(vertex)}
    return rules


def simple_rules(groups: Sequence[ProductGroup]) -> dict[str, frozenset[FormatKey]]:
    """Returns by name of a rule the products that it puts into formats.

    The head is the place of the last product of the forward pass. The first and last layers are the places of the first
    and last product, and of many equal products the first and the last. With several formats each has these rules, and
    more mix the one of most bits and the one of fewest: in the latter may be all products that can be, all but the
    head, all but the first and last layers, those of the forward pass, or those of the backward pass. Other rules send
    the sums of all gradients in one format, keep all arrays for the backward pass in one, or exchange all activations
    or all their gradients in one.

    Args:
      groups: all products, sums, kept arrays and exchanges of a step, in each format that they may be in.
    """
    rules = {group.name: group.members for group in groups if group.place in (GRADIENTS, KEPT)}
    rules |= exchange_rules(groups)
    groups = [group for group in groups if group.kind == "product"]
    vertices = [(vertex, group.place) for group in groups for vertex in group.vertices]
    backward = min((v.position for v, _ in vertices if is_backward(v)), default=math.inf)
    forward = sorted((v.position, place) for v, place in vertices if v.position < backward)
    ends = {forward[0][1], forward[-1][1]} if forward else set()
    head = {forward[-1][1]} if forward else set()
    formats = sorted(dict.fromkeys(group.format for group in groups), key=lambda name: -FORMATS[name].num_bytes)

    def products(name: str, places: set[str], inner_only: bool = False) -> frozenset[FormatKey]:
        kept = [group for group in groups if group.format == name and group.place not in places]
        cut = [1 if inner_only and len(group.vertices) >= _LEAST_LAYERS else 0 for group in kept]
        pairs = zip(kept, cut, strict=True)
        return frozenset((v.index, name) for group, n in pairs for v in group.vertices[n : len(group.vertices) - n])

    for name in formats:
        words = "" if name == "float8" else f" in {name}"
        rules |= {
            f"all products{words}": products(name, set()),
            f"all but the head{words}": products(name, head),
            f"all but first and last layers{words}": products(name, ends, inner_only=True),
        }
    if len(formats) > 1:
        widest, narrowest = products(formats[0], set()), formats[-1]
        inside = products(narrowest, set())
        in_backward = frozenset(g.member(v) for g in groups for v in g.vertices if is_backward(v))
        rules |= {
            f"{words} in {narrowest}, others in {formats[0]}": widest | own
            for words, own in {
                "all that can be": inside,
                "all but the head": products(narrowest, head),
                "all but first and last layers": products(narrowest, ends, inner_only=True),
                "the forward pass": inside - in_backward,
                "the backward pass": inside & in_backward,
            }.items()
        }
    return rules
