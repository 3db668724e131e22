"""Factors shared by the dimensions of several arrays: a union-find whose elements can be split into major and minor."""

import enum
import math
from collections.abc import Iterable, Sequence


class Mark(enum.IntFlag):
    """What sharding a factor means; marks of merged factors add up, parts of a split factor inherit them."""

    NONE = 0
    REDUCTION = enum.auto()
    NEED_REPLICATION = enum.auto()
    PERMUTATION = enum.auto()
    BLOCKED_PROPAGATION = enum.auto()


class Factors:
    """Sets of factors that must be sharded alike.

    A dimension is a sequence of factors, major to minor. Equating two dimensions that are written with different
    factors ([64] with [4, 16]) splits the larger factor wherever it occurs. Where no common refinement exists ([6, 4]
    with [4, 6]) the factors left over are marked `NEED_REPLICATION`.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._size: list[int] = []
        self._mark: list[Mark] = []

    def new(self, size: int, mark: Mark = Mark.NONE) -> int:
        """A factor that is equal to no other yet."""
        self._parent.append(len(self._parent))
        self._parts.append(None)
        self._size.append(size)
        self._mark.append(mark)
        return len(self._parent) - 1

    def size(self, leaf: int) -> int:
        """The size of a factor given by `leaves`."""
        return self._size[leaf]

    def mark_of(self, leaf: int) -> Mark:
        """The marks of a factor given by `leaves`."""
        return self._mark[leaf]

    def leaves(self, factors: Iterable[int]) -> list[int]:
        """The unsplit representatives of a sequence of factors, major to minor."""
        found: list[int] = []
        for factor in factors:
            root = self._find(factor)
            parts = self._parts[root]
            if parts is None:
                found.append(root)
            else:
                found.extend(self.leaves(parts))
        return found

    def mark(self, factors: Iterable[int], mark: Mark) -> None:
        """Adds marks to all factors of a sequence."""
        for leaf in self.leaves(factors):
            self._mark[leaf] |= mark

    def equate(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Makes two sequences of factors describe the same dimension.

        Single factors of different sizes are equated too: an operation that slices, pads or concatenates has one factor
        for dimensions of several sizes. The larger size is kept.
        """
        a, b = self.leaves(left), self.leaves(right)
        if len(a) == len(b) == 1:
            self._union(a[0], b[0])
            return
        a = [leaf for leaf in a if self._size[leaf] != 1]
        b = [leaf for leaf in b if self._size[leaf] != 1]
        if math.prod(self._size[leaf] for leaf in a) != math.prod(self._size[leaf] for leaf in b):
            self.mark([*a, *b], Mark.NEED_REPLICATION)
            return
        while a and b:
            x, y = self._pop_minor(a), self._pop_minor(b)
            size_x, size_y = self._size[x], self._size[y]
            if size_x == size_y:
                self._union(x, y)
            elif size_x % size_y == 0:
                major, minor = self._split(x, size_y)
                self._union(minor, y)
                a.append(major)
            elif size_y % size_x == 0:
                major, minor = self._split(y, size_x)
                self._union(x, minor)
                b.append(major)
            else:
                self.mark([*a, *b, x, y], Mark.NEED_REPLICATION)
                return

    def _find(self, factor: int) -> int:
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor

    def _pop_minor(self, factors: list[int]) -> int:
        # Equating an earlier part may have split this factor in the meantime.
        *rest, minor = self.leaves([factors.pop()])
        factors.extend(rest)
        return minor

    def _union(self, x: int, y: int) -> None:
        if x == y:
            return
        self._parent[y] = x
        self._size[x] = max(self._size[x], self._size[y])
        self._mark[x] |= self._mark[y]

    def _split(self, leaf: int, minor_size: int) -> tuple[int, int]:
        major = self.new(self._size[leaf] // minor_size, self._mark[leaf])
        minor = self.new(minor_size, self._mark[leaf])
        self._parts[leaf] = (major, minor)
        return major, minor
