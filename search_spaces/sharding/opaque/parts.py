"""Which parts of an opaque operation's arrays one device has."""

from typing import NamedTuple

from search_spaces.partition_specs import IndexedSpec


class Parts(NamedTuple):
    """How the arrays of an opaque operation are split over a mesh."""

    operands: tuple[IndexedSpec, ...]
    results: tuple[IndexedSpec, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether any array is split."""
        return any(axes for spec in (*self.operands, *self.results) for axes in spec)
