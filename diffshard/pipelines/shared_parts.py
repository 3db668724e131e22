"""In how many equal parts an array goes from the mesh of a stage to the mesh of another one."""

from collections.abc import Sequence
from math import prod


def shared_parts(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Returns into how many parts an array is split that goes from one mesh to another, and along which dimension.

    The parts are even, and as many as some first axes of both meshes have together.

    Args:
      shape: of the array.
      one: devices along each axis of a mesh.
      other: of the other mesh.
    """
    possible = _first_products(one) & _first_products(other)
    parts, dim = max(((n, -d) for d, size in enumerate(shape) for n in possible if size % n == 0), default=(1, 0))
    return parts, -dim


def _first_products(sizes: Sequence[int]) -> set[int]:
    return {prod(sizes[:count]) for count in range(len(sizes) + 1)}
