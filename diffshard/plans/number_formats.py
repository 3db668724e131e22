"""What a plan says of number formats: what was measured of each, what was tried together, and what the loss may pay."""

import math
import statistics
from dataclasses import dataclass

from cost.real_numbers import Amount, AmountOrInf, AnyNumber, Count, Index


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
