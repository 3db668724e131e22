"""Arithmetic that several devices repeat because it cannot be split among them, as a plan says it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cost.number_ranges import Amount, Count, Index
from diffshard.plans.formats import format_count, format_percent, format_s

MOST_SHARE = 0.1
"""Of a step's predicted computing: a plan in which more is repeated is told by a warning."""


class WholeWorkWarning(UserWarning):
    """A plan in which devices repeat more than a tenth of the arithmetic, because it cannot be split among them."""


@dataclass(frozen=True)
class WholeWork:
    """Operations that several devices run alike for one reason.

    Attributes:
      operations: what they are: the name and the user's line of some of them.
      indices: into `PlanData.operations`.
      seconds: of the predicted computing of a step that splitting them would save; its other effects are not known.
      has_rule: whether the operations have a sharding rule.
      size: of the dimension that does not divide; None where they cannot be split at all.
      padded_size: the next larger size that divides; None likewise.
      axes: the mesh axes that do not divide it.
      arguments: the paths of the arguments that have the dimension; empty where none has it.
      dimension: its position in the first of these.
    """

    operations: str
    indices: tuple[Index, ...]
    seconds: Amount
    has_rule: bool
    size: Count | None = None
    padded_size: Count | None = None
    axes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    dimension: Index | None = None

    @property
    def reason(self) -> str:
        """Why the operations run whole, and what would help."""
        if self.size is None:
            if not self.has_rule:
                return f"{self.operations} has no sharding rule; `diffshard.kernel` can give one"
            return f"nothing of {self.operations} can be split"
        axes = " and ".join(repr(axis) for axis in self.axes)
        does_not = "axis does not" if len(self.axes) == 1 else "axes do not"
        return (
            f"{self._dimension} is {self.size:,}, which the mesh {does_not} divide ({axes}); padded to "
            f"{self.padded_size:,} it can be split"
        )

    @property
    def remedy(self) -> str:
        """What to do so that the operations can be split."""
        if self.size is not None:
            return f"pad {self._dimension} from {self.size:,} to {self.padded_size:,}"
        if not self.has_rule:
            return f"give {self.operations} a sharding rule by `diffshard.kernel`, as it runs whole on every device"
        return f"compute {self.operations} in another way, as nothing of it can be split"

    @property
    def _dimension(self) -> str:
        others = len(self.arguments) - 1
        more = f" and of {format_count(others, 'more argument')}" if others > 0 else ""
        where = f"{self.arguments[0]}{more}" if self.arguments else self.operations
        which = "a dimension" if self.dimension is None else f"dimension {self.dimension}"
        return f"{which} of {where}"


def whole_lines(whole_work: Sequence[WholeWork], compute_s: float) -> list[str]:
    """Returns sentences: which share of the computing is repeated, then one for each reason; none without any."""
    if not whole_work:
        return []
    seconds = sum(work.seconds for work in whole_work)
    total = f"{format_percent(seconds / compute_s)} of computing is repeated on several devices, as it cannot be split"
    return [total, *(f"{format_s(work.seconds)}: {work.reason}" for work in whole_work)]


def warning_of(function_name: str, whole_work: Sequence[WholeWork], compute_s: float) -> str | None:
    """Returns the warning for a plan in which too much is repeated; None if it is not."""
    if sum(work.seconds for work in whole_work) <= MOST_SHARE * compute_s:
        return None
    total, first, *others = whole_lines(whole_work, compute_s)
    more = f" The plan lists {format_count(len(others), 'more reason')}." if others else ""
    return f"In the plan of {function_name} {total}. The largest part, {first}.{more}"
