"""The file that `python -m experiments.on_gpus` writes: a line of JSON for each record, which has its kind.

Each line is written when its part has ended, so that whatever happens later does not lose it; of two records of the
same part the later one counts. `docs/tutorials/on-gpus.md` describes the fields for readers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost.base import Hardware
from diffshard.plans.json_values import MisfitError, from_json_values, to_json_values

FORMAT = 1
"""Version of the file; readers refuse newer ones."""


class RecordsError(ValueError):
    """A file of records cannot be read; the message says which line, and why."""


@dataclass(frozen=True)
class Environment:
    """The devices and versions that were measured, and the settings.

    Attributes:
      format: `FORMAT`.
      made: date and time, UTC.
      versions: of Python, jax, jaxlib and diffshard.
      platform, device_kind, num_devices: as JAX names them.
      mesh: devices along each axis.
      settings: as given on the command line, with the defaults.
    """

    format: int
    made: str
    versions: Mapping[str, str]
    platform: str
    device_kind: str
    num_devices: int
    mesh: Mapping[str, int]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredHardware:
    """The rates that `diffshard.hardware.calibrate` measured, and the preset of the same devices.

    Attributes:
      calibrated: rates, and a link for each axis of the mesh.
      preset: the same from datasheets; None where these devices have no preset.
    """

    calibrated: Hardware
    preset: Hardware | None


@dataclass(frozen=True)
class MeasuredProduct:
    """A product of matrices on each device at the same time.

    Attributes:
      rows, inner, columns, dtype: of the operands `[rows, inner]` and `[inner, columns]`.
      measured_s: median seconds of a call.
      predicted_s: by "calibrated" and, where there is one, "preset" hardware.
    """

    rows: int
    inner: int
    columns: int
    dtype: str
    measured_s: float
    predicted_s: Mapping[str, float]


@dataclass(frozen=True)
class MeasuredRun:
    """A training step with one plan.

    Attributes:
      model, plan: names; "found" is searched for the calibrated hardware, "found by preset" for the preset.
      batch: sequences or images in a step.
      predicted_s: seconds of a step, by "calibrated" and "preset"; one that does not fit the memory is left out.
      predicted_timeline_s: of a found plan's program as it is played on streams, by the hardware of its search.
      lower_bound_s: no plan is predicted to be faster, by the calibrated hardware; of found plans.
      predicted_peak_bytes: of a device.
      compiled_peak_bytes: by XLA; None where the backend does not say.
      measured_s: seconds of a step in each round, none where the run failed.
      measured_peak_bytes: the most that the allocator of any device held; None where it does not say.
      loss: after the first step, the same for all plans of a model up to rounding.
      plan_s, compile_s: wall-clock seconds.
      trace: the folder with the profiler's trace of three steps.
      summary: the head of the found plan's text.
      error: why it failed; empty where it did not.
    """

    model: str
    plan: str
    batch: int
    predicted_s: Mapping[str, float]
    predicted_timeline_s: float | None = None
    lower_bound_s: float | None = None
    predicted_peak_bytes: float | None = None
    compiled_peak_bytes: float | None = None
    measured_s: tuple[float, ...] = ()
    measured_peak_bytes: float | None = None
    loss: float | None = None
    plan_s: float | None = None
    compile_s: float | None = None
    trace: str | None = None
    summary: str = ""
    error: str = ""


@dataclass(frozen=True)
class FailedPart:
    """A part of the measurement that failed, other than a run: its name, and why."""

    part: str
    error: str


Record = Environment | MeasuredHardware | MeasuredProduct | MeasuredRun | FailedPart
_KINDS: Mapping[str, type[Record]] = {
    "environment": Environment,
    "hardware": MeasuredHardware,
    "product": MeasuredProduct,
    "run": MeasuredRun,
    "failed": FailedPart,
}
_KIND_OF = {record: kind for kind, record in _KINDS.items()}


def as_line(record: Record) -> str:
    """Returns a record as a line of JSON."""
    return json.dumps({"kind": _KIND_OF[type(record)], **to_json_values(record)}, allow_nan=False)


def from_line(line: str) -> Record:
    """Returns the record of a line.

    Raises:
      RecordsError: it is none.
    """
    try:
        values = json.loads(line)
        kind = values.pop("kind")
        if kind == "environment" and values["format"] > FORMAT:
            raise RecordsError(
                f"it has format {values['format']}; this version of diffshard reads {FORMAT}. Update it."
            )
        return from_json_values(_KINDS[kind], values)
    except (MisfitError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise error if isinstance(error, RecordsError) else RecordsError(f"it is no record: {error}") from error


def read(path: Path) -> list[Record]:
    """Returns the records of a file, in order.

    Raises:
      RecordsError: a line is no record, or of a newer version.
      OSError: the file cannot be read.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(from_line(line))
        except RecordsError as error:
            raise RecordsError(f"{path}, line {number}: {error}") from None
    return records


def runs_of(records: list[Record]) -> list[MeasuredRun]:
    """Returns the last record of each run."""
    last = {(run.model, run.plan): run for run in records if isinstance(run, MeasuredRun)}
    return list(last.values())
