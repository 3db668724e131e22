"""Published training runs beside the seconds that are predicted for them; nothing is executed, and no GPU is needed.

    python -m experiments.published_runs [--prices measured preset datasheet] [--parts fitted "held out"] [--records F]
    python -m experiments.published_runs --search [--rows 0 5 57]

Each run is rebuilt as a JAX training step (`experiments/published/`) in its published layout, and priced with kernels
as they were measured (`cost.measured_presets`), with the presets as they are, or with attention priced as any other
product, as it was before it was measured. A third of each family of runs is held
out by a fixed seed; nothing was chosen by these. `--search` looks for a faster plan under the same prices, remat and
mesh, within the device's memory, or within the predicted memory of the published layout where that is more.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from scipy.stats import kendalltau

import diffshard
from experiments.published.data import MissingDataError, read
from experiments.published.prediction import KINDS, Prediction, described, plan_of, predict
from experiments.published.runs import Prices, Run, hardware_of, runs_of
from experiments.tables import print_table

PARTS = ("fitted", "held out")
SEARCHED = (0, 4, 5, 11, 12, 41, 57, 243, 246, 294, 323, 335, 380)
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
    found = {}
    for run in runs:
        hardware = hardware_of(run, prices)
        found[run] = records.get(run, prices, lambda run=run, hardware=hardware: predict(run, hardware))
    return found


def ratios(predictions: dict[Run, Prediction]) -> np.ndarray:
    """Returns predicted over measured seconds, `[runs]`."""
    return np.array([prediction.seconds / run.seconds for run, prediction in predictions.items()])


def factor(predictions: dict[Run, Prediction]) -> float:
    """Returns the median of predicted over measured: what a framework loses, if it loses the same everywhere."""
    return float(np.median(ratios(predictions)))


def ranking(predictions: dict[Run, Prediction]) -> tuple[int, float]:
    """Returns how many pairs of runs of one model there are, and Kendall's tau of their seconds for each token."""
    groups = defaultdict(list)
    for run, prediction in predictions.items():
        tokens = run.batch * run.sizes.sequence / run.num_devices
        groups[run.model].append((prediction.seconds / tokens, run.seconds / tokens))
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
    """Prints published layouts beside the plans that the search finds for the same run."""
    rows = []
    for run in runs:
        hardware = hardware_of(run)
        published, start = plan_of(run, hardware), time.process_time()
        limit_bytes = max(hardware.memory_bytes, published.peak_bytes)
        found = plan_of(run, hardware, is_free=True, memory_limit_bytes=limit_bytes, time_limit_s=30.0)
        best = min(found, published, key=lambda plan: plan.step_s)
        own, other = described(published, run, hardware).parts, described(best, run, hardware).parts
        parts = (f"{own[kind]:.3g} to {other[kind]:.3g}" for kind in ("products", "memory", "links"))
        rows.append(
            (
                run.number, run.name, f"{published.step_s:.4g}", f"{best.step_s:.4g}",
                f"{1 - best.step_s / published.step_s:.1%}", *parts,
                f"{published.peak_bytes / 2**30:.0f} to {best.peak_bytes / 2**30:.0f}", sent_by(published),
                sent_by(best), f"{time.process_time() - start:.0f}",
            )
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    columns = (
        "row", "run", "published s", "found s", "less", "products s", "memory s", "links s", "peak GiB",
        "published sends", "found sends", "processor s",
    )  # fmt: skip
    print_table("Published layouts and found plans, prices: measured", columns, rows)


def sent_by(plan: diffshard.Plan) -> str:
    """Says which collectives a plan has, those of 1% of its bytes or more, in GiB."""
    sizes = sorted(plan.collective_bytes.items(), key=lambda item: -item[1])
    least = 0.01 * sum(size for _, size in sizes)
    return ", ".join(f"{kind} {axis} {size / 2**30:.0f}" for (kind, axis), size in sizes if size >= least)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prices", nargs="+", choices=get_args(Prices), default=["measured", "preset"])
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
        run_table(predictions, prices)
        family_table(predictions, prices)
        dominance_table(predictions, prices)
    reasons = defaultdict(int)
    for row in left_out:
        reasons[row.why] += 1
    print_table("Rows that are not rebuilt", ("what is missing", "rows"), sorted(reasons.items()))


if __name__ == "__main__":
    main()
