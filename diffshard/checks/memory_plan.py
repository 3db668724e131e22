"""XLA's plan of memory for a compiled program: the bytes of one device by what they hold, and their peak."""

from typing import Any, NamedTuple


class MemoryPlan(NamedTuple):
    """Bytes of one device while a compiled program runs.

    Attributes:
      aliased: outputs that are written over donated arguments; they count in both.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """The peak; outputs that reuse donated arguments count once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_plan(compiled: Any) -> MemoryPlan | None:
    """Reads the plan of memory of a program, `jax.jit(...).lower(...).compile()`; None where the backend has none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryPlan(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )
