"""The shapes that a mesh of given devices can have, each physically distinct one once.

A shape is an ordered factorisation of the number of devices: the last axis's neighbours are neighbours in the host, and
the stride of an axis decides which levels of the hosts it leads over. Two shapes whose axes have the same sizes and
links are the same mesh in another order, as 2 x 4 and 4 x 2 devices inside one host.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cost.base import Link

MOST_AXES = 3
"""Axes of a shape, at most: with a fourth one listing strategies alone can take a minute."""
LEVELS = ("hosts", "local", "mixed")
"""What axes are called by the levels of the hosts that they lead over; see `distinct_shapes`."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def factorisations(number: int, most_factors: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorisations of a number into at most `most_factors` factors above 1.

    >>> list(factorisations(8, 2))
    [(8,), (2, 4), (4, 2)]
    """
    if most_factors < 1:
        return
    yield (number,)
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, most_factors - 1))


def distinct_shapes(
    num_devices: int, links_of_shape: Callable[[dict[str, int]], Mapping[str, Link]], most_axes: int = MOST_AXES
) -> list[dict[str, int]]:
    """Returns the physically distinct shapes with named axes, those with few axes first.

    An axis is called "hosts" where each of its devices is in another host, "local" where all of them are in one host,
    and "mixed" where it leads over both; several of a name have a letter each.

    Args:
      num_devices: devices of the mesh.
      links_of_shape: returns the link of each axis of a shape.
      most_axes: axes of a shape, at most.
    """
    shapes: dict[frozenset, dict[str, int]] = {}
    for sizes in sorted(factorisations(num_devices, most_axes), key=len):
        axes = {f"axis{i}": size for i, size in enumerate(sizes)}
        links = links_of_shape(axes)
        key = frozenset(Counter((size, links[axis]) for axis, size in axes.items()).items())
        if key not in shapes:
            shapes[key] = dict(zip(_names([(size, links[axis]) for axis, size in axes.items()]), sizes, strict=True))
    return list(shapes.values())


def _names(axes: list[tuple[int, Link]]) -> list[str]:
    levels = ["local" if link.num_hosts == 1 else "hosts" if link.num_hosts == size else "mixed" for size, link in axes]
    return [
        level if levels.count(level) == 1 else f"{level}_{_LETTERS[levels[:i].count(level)]}"
        for i, level in enumerate(levels)
    ]
