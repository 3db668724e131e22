"""Sections of a plan that are small: their data, and the words of its text and page for them.

Advice says what would make the step faster or smaller. Computing is divided into products and memory traffic. A memory
profile says what is in memory when. Rematerialisation says what goes from the forward to the backward pass. Whole work
is arithmetic that several devices repeat, because it cannot be split. Number formats come with what was measured of
each, what was tried together, and what the loss may pay.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cost.real_numbers import Amount, AmountOrInf, AnyNumber, Count, Index, Share
from diffshard.plans.printing import format_count, format_percent, format_s

MOST_LINES = 5
"""Lines of advice of a plan: a reader acts on the first one or two, and then plans again."""
LEAST_SHARE = 0.01
"""The share of the step's seconds, or of the memory's peak, that a change has to save to be listed."""
LEAST_SHARE_AT_PEAK = 1e-3
"""Smaller arrays are not listed one by one: a thousand lines of a table already say more than anybody reads."""


class Advice(NamedTuple):
    """A change that makes a step faster or smaller.

    Attributes:
      words: what to change, what that gains and how this is known, in a sentence.
      seconds: of the predicted step that it saves.
      num_bytes: of a device's peak that it saves.
    """

    words: str
    seconds: Amount = 0.0
    num_bytes: Amount = 0.0


@dataclass(frozen=True)
class PredictedComputing:
    """The predicted computing of a device in one step, divided by what bounds it.

    Attributes:
      products_s: seconds of products of matrices, convolutions, and kernels of users such as attention.
      products_share: of the hardware's peak rate of arithmetic that these reach.
      traffic_s: seconds of all other operations.
      traffic_share: of the memory's peak bandwidth that these reach.
    """

    products_s: Amount
    products_share: Share
    traffic_s: Amount
    traffic_share: Share


class ComputingPart(NamedTuple):
    """A part of computing as plans show it: its name, its seconds, and these with the share of the peak in words."""

    name: str
    seconds: float
    amounts: str


def computing_parts(computing: PredictedComputing) -> tuple[ComputingPart, ComputingPart]:
    """Returns products and memory traffic, each with what it reaches of the hardware's peak."""
    parts = (
        ("products", computing.products_s, computing.products_share, "rate of arithmetic"),
        ("memory traffic", computing.traffic_s, computing.traffic_share, "bandwidth"),
    )
    first, second = (
        ComputingPart(
            name, seconds, format_s(seconds) + (f" at {format_percent(share)} of the peak {peak}" if share else "")
        )
        for name, seconds, share, peak in parts
    )
    return first, second


How = Literal["kept", "recomputed", "offloaded"]
"""What becomes of an array that goes from forward to backward."""


@dataclass(frozen=True)
class HeldTensor:
    """An array in a device's memory.

    Attributes:
      operation: index into `PlanData.operations` of the operation that makes it, or of the argument.
      is_copy: whether it is a gathered copy of an array that is stored as well.
    """

    operation: Index
    result: Index
    num_bytes: Amount
    is_copy: bool = False


@dataclass(frozen=True)
class MemoryProfile:
    """The predicted memory of a device in one step, in program order; the body of a loop is there once.

    Attributes:
      changes: (index into `PlanData.operations`, bytes in use from the start of that operation until the next entry),
        ascending; the first entry has the index -1 and what is in use before all operations.
      at_peak: what is in memory where the peak is first reached, the largest first, without arrays below
        `LEAST_SHARE_AT_PEAK` of it.
    """

    changes: tuple[tuple[int, Amount], ...]
    at_peak: tuple[HeldTensor, ...]


@dataclass(frozen=True)
class Residual:
    """Arrays that go from the forward pass to the backward pass of a step, all made by the same code.

    Attributes:
      name: the modules and the operation that make them; numbers of layers are left out.
      how: "kept" in memory; "recomputed": the operation runs a second time in the backward pass; or "offloaded": it
        waits in the host's memory.
      num_arrays: how many there are; the trips of a loop are counted.
      num_bytes: of all of them together, on each device: what keeping them takes.
      seconds: of one step that running the operation again, or waiting for copies, takes; 0 for what is kept.
    """

    name: str
    source: str
    how: How
    num_arrays: Index
    num_bytes: Amount
    seconds: Amount


@dataclass(frozen=True)
class Rematerialisation:
    """The choice of a search with `remat="search"`.

    Attributes:
      recomputed: numbers of the steps of the traced function that run again in the backward pass; without any the
        function runs as it was traced.
      residuals: what goes from forward to backward and how, the largest first.
      seconds: of one step that everything that runs again, and waiting for copies, takes, as predicted before the last
        search.
      kept_bytes: of what is kept from forward to backward on each device.
      offloaded: of each array that waits in the host's memory its number, that of the step by which it has left the
        device, and that of the step from which on it comes back; both are 0 in loops.
    """

    recomputed: tuple[Index, ...]
    residuals: tuple[Residual, ...]
    seconds: Amount
    kept_bytes: Amount
    offloaded: tuple[tuple[Index, Index, Index], ...] = ()
    host_bytes: Amount = 0.0


MOST_SHARE = 0.1
"""The share of a step's predicted computing above which repeated work is told by a warning."""


class WholeWorkWarning(UserWarning):
    """A plan in which devices repeat more than a tenth of the arithmetic, because it cannot be split among them."""


@dataclass(frozen=True)
class WholeWork:
    """Operations that several devices run alike for one reason.

    Attributes:
      operations: what they are: the name and the user's line of some of them.
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
        """Advice by which the operations can be split."""
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


@dataclass(frozen=True)
class FormatGroup:
    """Equal products of equal layers in one format, whose effect on the loss was measured together.

    Attributes:
      name: modules, line, pass and contracted dimensions, without numbers of layers; then the format unless float8.
      count: products.
      num_rounded: of them in the format.
      loss_increase: predicted for a whole training with all of them in the format; inf where a loss was not finite.
      gain_s: seconds of a step that those in the format gain.
      format: its name.
      kind: "product", "sum" for partial sums that are sent as codes, "kept" for arrays that are kept as codes,
        "exchange" for activations that are exchanged as codes.
    """

    name: str
    count: Count
    num_rounded: Index
    loss_increase: AmountOrInf
    gain_s: AnyNumber
    format: str = "float8"
    kind: str = "product"


@dataclass(frozen=True)
class FormatTrial:
    """Formats whose effect on the loss was measured together.

    Attributes:
      name: of a simple rule, or of the round of the search that found them.
      step_s: predicted seconds of the fastest step found with them.
      num_rounded: products in formats.
      predicted_increase: of the loss, by the increases of groups that were known before it was measured.
      measured_increase: of the loss; inf where it was not finite.
      measured_error: the standard error of that over runs or looks; None of a single one.
    """

    name: str
    step_s: Amount
    num_rounded: Index
    predicted_increase: AmountOrInf
    measured_increase: AnyNumber
    measured_error: Amount | None = None


@dataclass(frozen=True)
class DelayedScale:
    """The scale of an operand that is rounded by what it was in earlier steps.

    Attributes:
      name: the module and line of the first product that reads it, and which operand of it that is.
      num_rows: its rows in the maxima that the step carries, one for each trip of the loops around the product.
    """

    name: str
    num_rows: Count


@dataclass(frozen=True)
class PlannedFormats:
    """Number formats within a limit on the predicted loss.

    Attributes:
      max_loss_increase: the limit.
      loss_increase: predicted for the plan: the sum over its groups, of each the part in its format.
      groups: those that gain time in float8 on some sharding, the ones that gain most first.
      measured_increase: of the formats together; None where nothing was measured.
      measured_by: what that was measured by; "" for nothing.
      trials: what was measured together, in this order.
      increases_by: what told the increase of each group, as in `Formats`; "" where they were given.
    """

    max_loss_increase: Amount
    loss_increase: Amount
    groups: tuple[FormatGroup, ...]
    measured_increase: AnyNumber | None = None
    measured_by: str = ""
    trials: tuple[FormatTrial, ...] = ()
    increases_by: str = ""

    @property
    def measured_error(self) -> float | None:
        """The standard error of a measured increase, the median over all trials; None where none is known.

        Of two runs alone an error is hardly known, but noise is that of the training, much the same for most trials.
        """
        errors = [trial.measured_error for trial in self.trials if trial.measured_error]
        return statistics.median(errors) if errors else None

    @property
    def more_runs(self) -> float:
        """How many times as many runs would tell an increase of the limit from none, by two standard errors."""
        error = 2 * (self.measured_error or 0.0)
        return (error / self.max_loss_increase) ** 2 if self.max_loss_increase else math.inf if error else 0.0

    @property
    def increases(self) -> dict[str, float]:
        """The increase of the loss by each group, as `Formats.increases` takes it."""
        return {group.name: group.loss_increase for group in self.groups}
