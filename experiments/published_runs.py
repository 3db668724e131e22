"""Published training runs beside the seconds that are predicted for them; nothing is executed, and no GPU is needed.

    python -m experiments.published_runs [--prices measured "slowest device" preset] [--parts fitted "held out"]
        [--records FILE]
    python -m experiments.published_runs --search [--rows 0 5 57]

Each run is rebuilt as a JAX training step (`experiments/published/`) in its published layout, and priced with kernels
as they were measured (`cost.calibration`), the same with waits for the slowest device and by the program that XLA
makes of a run of JAX, with the presets as they are, or with attention priced as any other product, as it was before it
was measured. A third of each family of runs is held
out by a fixed seed; nothing was chosen by these. `--search` looks for a faster plan under the same prices, remat and
mesh, within the device's memory, or within the predicted memory of the published layout where that is more.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
from scipy.stats import kendalltau

import diffshard
from experiments.published.compiled import predict_compiled
from experiments.published.data import MissingDataError, read
from experiments.published.hardware import Prices, hardware_of
from experiments.published.prediction import KINDS, Prediction, described, plan_of, predict
from experiments.published.runs import Run, runs_of
from experiments.tables import print_table

PARTS = ("fitted", "held out")
SEARCHED = (0, 1, 2, 3, 4, 5, 11, 12, 17, 26, 31, 37, 57, 58, 243, 246, 294, 323, 335, 380)
"""Rows with a search by default: one of each layout, which are planned in a few seconds."""


class Records:
    """Predictions by run and prices, kept in a file of JSON lines where one is given."""

    def __init__(self, path: Path | None):
        self.path = path
        self._known: dict[tuple[int, str], Prediction] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                numbers = {field.name: record[field.name] for field in fields(Prediction)}
                self._known[record["row"], record["prices"]] = Prediction(**numbers)

    def get(self, run: Run, prices: str, make: Callable[[], Prediction]) -> Prediction:
        """Returns a prediction, made only if it is not there."""
        key = run.number, prices
        if key not in self._known:
            start = time.process_time()
            self._known[key] = make()
            seconds = self._known[key].seconds
            print(f"{run.name}: {seconds / run.seconds:.2f} in {time.process_time() - start:.0f} s", flush=True)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({**_facts(run), "prices": prices, **asdict(self._known[key])}) + "\n")
        return self._known[key]


def _facts(run: Run) -> dict[str, Any]:
    return {"row": run.number, "name": run.name, "measured_s": run.seconds, "is_held_out": run.is_held_out}


def predictions_of(runs: Iterable[Run], prices: Prices, records: Records) -> dict[Run, Prediction]:
    """Returns the predictions of some runs in their published layouts."""
    if prices == "slowest device":
        compiled = predictions_of(runs, "compiled", records)
        return {r: p if "TPU" in r.family else p.with_slowest_of(r.num_devices) for r, p in compiled.items()}
    found = {}
    for run in runs:
        own = "measured" if prices == "compiled" and run.xla_options is None else prices
        found[run] = records.get(run, own, lambda run=run, own=own: _predicted(run, own))
    return found


def _predicted(run: Run, prices: Prices) -> Prediction:
    return predict_compiled(run) if prices == "compiled" else predict(run, hardware_of(run, prices))


def ratios(predictions: dict[Run, Prediction]) -> np.ndarray:
    """Returns predicted over measured seconds, `[runs]`."""
    return np.array([prediction.seconds / run.seconds for run, prediction in predictions.items()])


def factor(predictions: dict[Run, Prediction]) -> float:
    """Returns the median of predicted over measured: what a framework loses, if it loses the same everywhere."""
    return float(np.median(ratios(predictions)))


def token_seconds(run: Run, seconds: float) -> float:
    """Returns seconds of a step for each token of a device."""
    return seconds / (run.batch * run.sizes.sequence / run.num_devices)


def ranking(predictions: dict[Run, Prediction]) -> tuple[int, float]:
    """Returns how many pairs of runs of one model there are, and Kendall's tau of their seconds for each token."""
    groups = defaultdict(list)
    for run, prediction in predictions.items():
        groups[run.model].append((token_seconds(run, prediction.seconds), token_seconds(run, run.seconds)))
    pairs, total = 0, 0.0
    for times in groups.values():
        if len(times) > 1:
            count = len(times) * (len(times) - 1) // 2
            pairs += count
            predicted, measured = zip(*times, strict=True)
            total += count * float(np.asarray(kendalltau(predicted, measured))[0])
    return pairs, total / pairs if pairs else float("nan")


def family_table(predictions: dict[str, dict[Run, Prediction]], prices: str) -> None:
    """Prints what each family's predictions are off by, before and after a factor that the fitted runs give."""
    rows = []
    for family in dict.fromkeys(run.family for part in predictions.values() for run in part):
        own = {part: {r: p for r, p in found.items() if r.family == family} for part, found in predictions.items()}
        scale = factor(own["fitted"]) if own.get("fitted") else None
        for part, found in own.items():
            if not found:
                continue
            values, (pairs, tau) = ratios(found), ranking(found)
            after = "-" if scale is None else f"{np.median(np.abs(values / scale - 1)):.1%}"
            fits = sum(prediction.fits for prediction in found.values())
            rows.append(
                (
                    family, part, len(found), f"{factor(found):.2f}", f"{values.min():.2f} to {values.max():.2f}",
                    f"{np.median(np.abs(values - 1)):.1%}", after, f"{tau:.2f} of {pairs}" if pairs else "-",
                    f"{fits} of {len(found)}",
                )
            )  # fmt: skip
    columns = ("family", "part", "runs", "median", "range", "median error", "after one factor", "tau", "fit memory")
    print_table(f"Predicted over measured seconds of a step, prices: {prices}", columns, rows)


def deviation_table(fitted: dict[Run, Prediction]) -> None:
    """Prints how deviations of GPUs rank the fitted runs, whose predictions are without the slowest device."""
    rows = []
    for percent in range(9):
        waiting = {
            r: p.with_slowest_of(r.num_devices, percent / 100) for r, p in fitted.items() if "TPU" not in r.family
        }
        pairs, tau = ranking(waiting)
        wrong = [pair for pair in combinations(waiting.items(), 2) if _is_wrongly_ordered(*pair)]
        alike = [a for (a, _), (b, _) in wrong if a.sizes == b.sizes and a.num_devices != b.num_devices]
        rows.append((f"{percent}%", pairs, f"{tau:.2f}", len(wrong), len(alike)))
    columns = ("deviation", "pairs", "tau", "wrongly ordered", "of these the same sizes on other numbers of devices")
    print_table("Fitted runs on GPUs by the deviation of devices", columns, rows)


def _is_wrongly_ordered(first: tuple[Run, Prediction], second: tuple[Run, Prediction]) -> bool:
    (a, p), (b, q) = first, second
    if a.model != b.model:
        return False
    predicted = token_seconds(a, p.seconds) - token_seconds(b, q.seconds)
    return predicted * (token_seconds(a, a.seconds) - token_seconds(b, b.seconds)) < 0


def dominance_table(predictions: dict[str, dict[Run, Prediction]], prices: str) -> None:
    """Prints signed errors after the family's factor, by what takes the most time beside products."""
    fitted = defaultdict(dict)
    for run, prediction in predictions.get("fitted", {}).items():
        fitted[run.family][run] = prediction
    errors = defaultdict(list)
    for part, found in predictions.items():
        for run, prediction in found.items():
            if run.family in fitted:
                ratio = prediction.seconds / run.seconds / factor(fitted[run.family])
                errors[run.family, prediction.dominant, part].append(ratio - 1)
    rows = [
        (*key, len(values), f"{np.median(values):+.1%}", f"{min(values):+.0%} to {max(values):+.0%}")
        for key, values in sorted(errors.items())
    ]
    columns = ("family", "beside products", "part", "runs", "median error", "range")
    print_table(f"Signed errors after one factor for the family, prices: {prices}", columns, rows)


def run_table(predictions: dict[str, dict[Run, Prediction]], prices: str) -> None:
    """Prints each run."""
    rows = [
        (
            run.number, run.family, run.name, part, run.remat, f"{run.seconds:.4g}", f"{p.seconds:.4g}",
            f"{p.seconds / run.seconds:.2f}", *(f"{p.parts[kind] / p.seconds:.0%}" for kind in KINDS),
            f"{p.peak_bytes / 2**30:.0f}",
        )
        for part, found in predictions.items()
        for run, p in found.items()
    ]  # fmt: skip
    columns = ("row", "family", "run", "part", "remat", "measured s", "predicted s", "ratio", *KINDS, "peak GiB")
    print_table(f"Runs, prices: {prices}", columns, rows)


def search_table(runs: Iterable[Run]) -> None:
    """Prints published layouts beside the plans that the search finds for the same runs, without stages."""
    rows = []
    for run in runs:
        start = time.process_time()
        published, sends = _published(run)
        limit_bytes = max(hardware_of(run).memory_bytes, published.peak_bytes)
        plans = [("as published", published, sends)]
        for other in meshes_of(run):
            hardware = hardware_of(other)
            try:
                found = plan_of(other, hardware, is_free=True, memory_limit_bytes=limit_bytes, time_limit_s=30.0)
            except diffshard.InfeasibleError:
                print(f"{run.number}: no plan on {_in_words(other)} fits {limit_bytes / 2**30:.0f} GiB", flush=True)
                continue
            prediction = described(found, other, hardware)
            print(f"{run.number}: {prediction.seconds:.4g} s on {_in_words(other)}", flush=True)
            plans.append((_in_words(other), prediction, sent_by(found)))
        mesh, best, best_sends = min(plans, key=lambda plan: plan[1].seconds)
        parts = (f"{published.parts[kind]:.3g} to {best.parts[kind]:.3g}" for kind in ("products", "memory", "links"))
        rows.append(
            (
                run.number, run.name, f"{run.seconds:.4g}", f"{published.seconds:.4g}", f"{best.seconds:.4g}",
                f"{1 - best.seconds / published.seconds:.1%}", mesh, *parts,
                f"{published.peak_bytes / 2**30:.0f} to {best.peak_bytes / 2**30:.0f}", sends, best_sends,
                f"{time.process_time() - start:.0f}",
            )
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    columns = (
        "row", "run", "measured s", "published s", "found s", "less", "mesh", "products s", "memory s", "links s",
        "peak GiB", "published sends", "found sends", "processor s",
    )  # fmt: skip
    print_table("Published layouts and found plans, prices: measured", columns, rows)


def _published(run: Run) -> tuple[Prediction, str]:
    """Predicts the published layout, and says what it sends, which is not known of a pipeline."""
    hardware = hardware_of(run)
    if run.stages > 1:
        return predict(run, hardware), "a pipeline"
    plan = plan_of(run, hardware)
    return described(plan, run, hardware), sent_by(plan)


def meshes_of(run: Run) -> list[Run]:
    """Returns a run on its mesh, and on all of its devices in one axis where that splits the batch evenly.

    Instead of a pipeline there are more replicas, each with one sequence in a part of the batch.
    """
    if run.stages > 1:
        replicas = run.mesh_axes["data"] * run.stages
        parts = max(1, run.batch // replicas)
        own = replace(run, stages=1, mesh_axes={**run.mesh_axes, "data": replicas}, accumulation=parts)
    else:
        own = run
    if run.split.tensor is None or run.batch % run.num_devices:
        return [own]
    return [own, replace(own, mesh_axes={"data": run.num_devices}, accumulation=1)]


def _in_words(run: Run) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in run.mesh_axes.items())


def sent_by(plan: diffshard.Plan) -> str:
    """Says which collectives a plan has, those of 1% of its bytes or more, in GiB."""
    sizes = sorted(plan.collective_bytes.items(), key=lambda item: -item[1])
    least = 0.01 * sum(size for _, size in sizes)
    return ", ".join(f"{kind} {axis} {size / 2**30:.0f}" for (kind, axis), size in sizes if size >= least)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prices", nargs="+", choices=get_args(Prices), default=["measured", "slowest device", "preset"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--records", type=Path, help="a file for predictions: those already there are taken up")
    parser.add_argument("--least-sequence", type=int, default=0, help="leaves out runs with shorter sequences")
    parser.add_argument("--families", nargs="+", default=[""], help="beginnings of families' names; all by default")
    parser.add_argument("--search", action="store_true", help="plans of the search beside published layouts")
    parser.add_argument("--rows", nargs="+", type=int, default=SEARCHED, help="of the file, for `--search`")
    options = parser.parse_args(arguments)
    try:
        runs, left_out = runs_of(read("training_runs"))
    except MissingDataError as error:
        print(error)
        return
    if options.search:
        search_table(run for run in runs if run.number in options.rows)
        return
    runs = [run for run in runs if run.family.startswith(tuple(options.families))]
    runs = [run for run in runs if run.sizes.sequence >= options.least_sequence]
    records = Records(options.records)
    for prices in options.prices:
        predictions = {
            part: predictions_of([r for r in runs if r.is_held_out == (part == "held out")], prices, records)
            for part in options.parts
        }
        if prices == "slowest device" and "fitted" in predictions:
            deviation_table(predictions_of(predictions["fitted"], "compiled", records))
        run_table(predictions, prices)
        family_table(predictions, prices)
        dominance_table(predictions, prices)
    reasons = defaultdict(int)
    for row in left_out:
        reasons[row.why] += 1
    print_table("Rows that are not rebuilt", ("what is missing", "rows"), sorted(reasons.items()))


if __name__ == "__main__":
    main()
