"""What a file of records says: predicted against measured, as tables."""

import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import kendalltau

from cost.base import Hardware
from experiments.on_gpus.parts import FOUND, median_of
from experiments.on_gpus.records import (
    Environment,
    FailedPart,
    MeasuredHardware,
    MeasuredProduct,
    MeasuredRun,
    Record,
    runs_of,
)
from experiments.tables import print_table

_GIB = 2**30
_LOSSES_DIFFER = 0.02
"""Relative difference of losses beyond which plans cannot compute the same; bfloat16 sums differ by less than 1%."""


def print_report(records: list[Record]) -> None:
    """Prints all tables of a file."""
    for record in records:
        if isinstance(record, Environment):
            versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
            mesh = " x ".join(f"{axis} {size}" for axis, size in record.mesh.items())
            print(f"{record.num_devices} x {record.device_kind} ({mesh}), {record.made}, {versions}")
        elif isinstance(record, MeasuredHardware):
            _print_hardware(record)
    _print_products([record for record in records if isinstance(record, MeasuredProduct)])
    runs = runs_of(records)
    _print_runs(runs)
    _print_choices(runs)
    for record in records:
        if isinstance(record, FailedPart):
            print(f"{record.part} failed: {record.error}")
    for run in runs:
        if run.error:
            print(f"{run.model}, {run.plan}: {run.error}")


def _ratio(predicted_s: float | None, measured_s: float) -> str:
    return f"{predicted_s / measured_s:.2f}" if measured_s and predicted_s is not None else "-"


def _ratios(predicted_s: Mapping[str, float], measured_s: float) -> tuple[str, str]:
    """Returns predicted over measured by calibrated hardware, and by the preset."""
    return _ratio(predicted_s.get("calibrated"), measured_s), _ratio(predicted_s.get("preset"), measured_s)


def choices(runs: Sequence[MeasuredRun]) -> list[tuple[str, int, float, float, str]]:
    """Judges for each model with two or more measured plans how well predictions choose.

    Returns:
      The model, how many plans were measured, Kendall's tau between predicted and measured seconds (by calibrated
      hardware), the measured seconds of the plan that is predicted to be the fastest over those of the fastest, and
      whether losses agree.
    """
    rows = []
    for model in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == model and run.measured_s and "calibrated" in run.predicted_s]
        if len(own) < 2:
            continue
        predicted, measured = [run.predicted_s["calibrated"] for run in own], [median_of(run) for run in own]
        tau = float(kendalltau(predicted, measured).statistic)  # pyright: ignore[reportAttributeAccessIssue]
        regret = measured[predicted.index(min(predicted))] / min(measured)
        losses = [run.loss for run in own if run.loss is not None]
        spread = max(losses, default=0.0) - min(losses, default=0.0)
        agree = spread <= _LOSSES_DIFFER * abs(statistics.median(losses)) if losses else True
        rows.append((model, len(own), tau, regret, "yes" if agree else "NO"))
    return rows


def _print_hardware(record: MeasuredHardware) -> None:
    hardware = {"calibrated": record.calibrated} | ({"preset": record.preset} if record.preset else {})
    dtypes = ("bfloat16", "float32")
    axes = list(record.calibrated.links)
    columns = (
        "",
        *(f"{dtype} TFLOP/s" for dtype in dtypes),
        "memory GB/s",
        "memory GiB",
        *(f"{a}: µs, GB/s" for a in axes),
    )
    rows = [
        (
            f"{name}: {own.name}", *(f"{_flops_per_s(own, dtype) / 1e12:.4g}" for dtype in dtypes),
            f"{own.memory_share * own.memory_bytes_per_s / 1e9:.4g}", f"{own.memory_bytes / _GIB:.4g}",
            *(f"{1e6 * own.links[a].latency_s:.3g}, {_rate(own.links[a].s_per_byte)}" for a in axes),
        )
        for name, own in hardware.items()
    ]  # fmt: skip
    print_table("Hardware, as large kernels reach it", columns, rows)


def _flops_per_s(hardware: Hardware, dtype: str) -> float:
    rates = hardware.flops_per_s
    return hardware.matrix_share * (rates if isinstance(rates, float | int) else rates.get(dtype, float("nan")))


def _rate(s_per_byte: float) -> str:
    return f"{1e-9 / s_per_byte:.3g}" if s_per_byte else "-"


def _print_products(products: Sequence[MeasuredProduct]) -> None:
    rows = [
        (
            f"{p.rows} x {p.inner} x {p.columns}", p.dtype, f"{1e3 * p.measured_s:.3g}",
            f"{2e-12 * p.rows * p.inner * p.columns / p.measured_s:.3g}",
            *_ratios(p.predicted_s, p.measured_s),
        )
        for p in products
    ]  # fmt: skip
    columns = ("product", "type", "measured ms", "TFLOP/s", "calibrated / measured", "preset / measured")
    if rows:
        print_table("Products", columns, rows)


def _print_runs(runs: Sequence[MeasuredRun]) -> None:
    rows = []
    for run in runs:
        measured_s = median_of(run) if run.measured_s else 0.0
        peaks = (run.predicted_peak_bytes, run.compiled_peak_bytes, run.measured_peak_bytes)
        rows.append(
            (
                run.model, run.plan, run.batch,
                f"{1e3 * measured_s:.3g}" if measured_s else "failed",
                *_ratios(run.predicted_s, measured_s),
                _ratio(run.predicted_timeline_s, measured_s),
                *("-" if peak is None else f"{peak / _GIB:.3g}" for peak in peaks),
                "-" if run.loss is None else f"{run.loss:.4g}",
            )
        )  # fmt: skip
    columns = (
        "model", "plan", "batch", "measured ms", "calibrated / measured", "preset / measured", "timeline / measured",
        "predicted GiB", "compiled GiB", "measured GiB", "loss",
    )  # fmt: skip
    print_table("Steps, predicted over measured", columns, rows)


def _print_choices(runs: Sequence[MeasuredRun]) -> None:
    rows = []
    for model, count, tau, regret, agree in choices(runs):
        own = {run.plan: median_of(run) for run in runs if run.model == model and run.measured_s}
        others = [seconds for plan, seconds in own.items() if not plan.startswith(FOUND)]
        gain = f"{min(others) / own[FOUND]:.2f}" if FOUND in own and others else "-"
        rows.append((model, count, f"{tau:.2f}", f"{regret:.2f}", gain, agree))
    columns = (
        "model", "plans", "tau", "predicted fastest / fastest", "best by hand / found", "same loss",
    )  # fmt: skip
    if rows:
        print_table("Choices, in measured seconds", columns, rows)
