"""How true the seconds of collectives are: models fitted to profiles of V100 hosts, beside points that were held out.

    python -m experiments.collectives [--profiles PATH] [--write PATH]

A curve is one kind of collective on one ring: its times by size. Held out are every third size of each curve (of the
powers of two, those of which the exponent leaves 1 when divided by 3); and, for rules that know no ring by itself, one
ring after the other with all of its sizes. `--write` fits all points and writes the lines that the V100 preset reads.
"""

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from cost.base import CollectiveKind
from cost.collectives import collective_s, collective_sent_bytes
from cost.lines import fit_latency_and_slope, fit_lines, least_s
from cost.presets import preset
from experiments.tables import print_table

PROFILES = Path(__file__).parents[2] / "shared/data/v100_collective_profiles.csv.gz"
# Calls up to this long sent nothing, as their groups had less than one element each; read off the profiles.
_EMPTY_CALL_S = 25e-6
LEAST_ELEMENTS = 1024
"""Smaller collectives are left out of the tables' errors, not of the fits."""
_ITERATIONS = 40


class Ring(NamedTuple):
    """The places of a group's devices: `members` in each of `hosts` hosts, `stride` apart."""

    hosts: int
    members: int
    stride: int

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.members


class Curve(NamedTuple):
    """Measured times of one kind of collective on one ring.

    Attributes:
      ring, kind: what was measured.
      elements: `[points]`.
      num_bytes: `[points]` full bytes, as `cost.collectives` counts them.
      seconds: `[points]`.
    """

    ring: Ring
    kind: CollectiveKind
    elements: np.ndarray
    num_bytes: np.ndarray
    seconds: np.ndarray

    @property
    def sent_bytes(self) -> np.ndarray:
        """The bytes that one device sends, `[points]`."""
        return collective_sent_bytes(self.kind, self.num_bytes, self.ring.size)

    @property
    def is_held_out(self) -> np.ndarray:
        """Which points no model is fitted to, `[points]`; points of equal bytes are on the same side."""
        return np.round(np.log2(self.num_bytes)) % 3 == 1

    def where(self, chosen: np.ndarray) -> "Curve":
        """Returns the curve with some of its points, `[points]` booleans."""
        return self._replace(**{name: getattr(self, name)[chosen] for name in ("elements", "num_bytes", "seconds")})


Prediction = Callable[[Curve], np.ndarray]
"""Predicts seconds, `[points]`."""
Design = Callable[[Sequence[Curve]], Prediction]
"""Fits a model to curves."""


def read_profiles(path: Path) -> list[Curve]:
    """Returns the measured curves that have more than ten points, without those that were extrapolated."""
    series = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            size, stride, per_host = int(row["group_size"]), int(row["stride"]), int(row["gpus_per_host"])
            if row["op"] != "dot" and size > 1:
                members = max(1, min(size, per_host // stride))
                itemsize = {"f16": 2, "f32": 4}[row["dtype"]]
                key = (Ring(size // members, members, stride), row["op"], row["num_hosts"], row["num_groups"], itemsize)
                series[key].append((int(row["size"]), float(row["seconds"])))
    points = defaultdict(list)
    for (ring, kind, _, _, itemsize), times in series.items():
        samples = _without_extrapolated(sorted(times))
        points[ring, kind] += [(elements, elements * itemsize, seconds) for elements, seconds in samples]
    return [Curve(*key, *np.array(value, float).T) for key, value in sorted(points.items()) if len(value) > 10]


def _without_extrapolated(times: list[tuple[int, float]]) -> list[tuple[int, float]]:
    points = []
    for i, (size, seconds) in enumerate(times):
        doubled = i > 0 and abs(seconds / times[i - 1][1] - 2) < 1e-9
        if size and seconds > _EMPTY_CALL_S and not doubled:
            points.append((size, seconds))
    return points


def _by_curve(fit: Callable[[Curve], Prediction]) -> Design:
    """Returns a design that fits each curve by itself."""

    def design(curves: Sequence[Curve]) -> Prediction:
        predictions = {(curve.ring, curve.kind): fit(curve) for curve in curves}
        return lambda curve: predictions[curve.ring, curve.kind](curve)

    return design


def _least_squares(curve: Curve) -> Prediction:
    slope, latency_s = np.polyfit(curve.sent_bytes, curve.seconds, 1)
    return lambda other: latency_s + slope * other.sent_bytes


def _one_line(curve: Curve) -> Prediction:
    latency_s, slope = fit_latency_and_slope(curve.sent_bytes, curve.seconds)
    return lambda other: latency_s + slope * other.sent_bytes


def _lines(curve: Curve) -> Prediction:
    lines = fit_lines(curve.sent_bytes, curve.seconds)
    return lambda other: least_s(lines, other.sent_bytes)


def _table(curve: Curve) -> Prediction:
    """Interpolates the logarithms of median times, which are made monotone; beyond the last size time is linear."""
    sizes = np.unique(curve.sent_bytes)
    medians = [np.median(curve.seconds[curve.sent_bytes == size]) for size in sizes]
    x, y = np.log(sizes), np.log(np.maximum.accumulate(medians))

    def predict(other: Curve) -> np.ndarray:
        at = np.log(other.sent_bytes)
        return np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))

    return predict


def _line_for_all_kinds(curves: Sequence[Curve]) -> Prediction:
    """Fits one line to all kinds of a ring."""
    lines = {}
    for ring in {curve.ring for curve in curves}:
        own = [np.stack([curve.sent_bytes, curve.seconds]) for curve in curves if curve.ring == ring]
        lines[ring] = fit_latency_and_slope(*np.concatenate(own, axis=1))
    return lambda curve: lines[curve.ring][0] + lines[curve.ring][1] * curve.sent_bytes


def rule_between_hosts(curves: Sequence[Curve]) -> Prediction:
    """Fits a rule for each kind to all rings: seconds are a sum of hops and of bytes through links."""
    factors_of = {}
    for kind in {curve.kind for curve in curves}:
        own = [curve for curve in curves if curve.kind == kind]
        terms, seconds = np.concatenate([*map(_terms, own)]), np.concatenate([curve.seconds for curve in own])
        scale = np.maximum(np.linalg.norm(terms / seconds[:, None], axis=0), np.finfo(float).tiny)
        weight, factors = 1 / seconds, np.zeros(len(scale))
        for _ in range(_ITERATIONS):  # the least sum of absolute relative errors, as in `fit_latency_and_slope`
            factors = nnls(terms * weight[:, None] / scale, seconds * weight)[0] / scale
            error = np.abs(terms @ factors / seconds - 1)
            weight = 1 / (seconds * np.sqrt(np.maximum(error, 1e-3)))
        factors_of[kind] = factors
    return lambda curve: _terms(curve) @ factors_of[curve.kind]


def _terms(curve: Curve) -> np.ndarray:
    """Returns a launch, hops inside and between hosts, and bytes through a device's and through a host's link."""
    one, (hosts, members, _) = np.ones_like(curve.seconds), curve.ring
    sent = curve.sent_bytes
    return np.stack([one, (curve.ring.size - hosts) * one, (hosts - 1) * one, sent, sent / members], axis=1)


DESIGNS: Mapping[str, Design] = {
    "line, least squares": _by_curve(_least_squares),
    "line for all kinds, relative error": _line_for_all_kinds,
    "line by kind, relative error": _by_curve(_one_line),
    "fastest of 3 lines by kind": _by_curve(_lines),
    "table of all sizes by kind": _by_curve(_table),
}
CHOSEN = "fastest of 3 lines by kind"


class Errors(NamedTuple):
    """Relative errors, as absolute values, of points of at least `LEAST_ELEMENTS`; by curve, each `[points]`."""

    fitted_points: dict[tuple[Ring, CollectiveKind], np.ndarray]
    held_out_points: dict[tuple[Ring, CollectiveKind], np.ndarray]


def errors_of(design: Design, curves: Sequence[Curve]) -> Errors:
    """Fits a design to the points that are not held out, and compares it with both parts."""
    predict = design([curve.where(~curve.is_held_out) for curve in curves])
    parts = [{}, {}]
    for curve in curves:
        for part, chosen in zip(parts, (~curve.is_held_out, curve.is_held_out), strict=True):
            part[curve.ring, curve.kind] = _errors(predict, curve.where(chosen))
    return Errors(*parts)


def errors_of_rings(design: Design, curves: Sequence[Curve]) -> Errors:
    """Fits a design to all rings of several hosts; and to all but one, with which it is then compared."""
    between = [curve for curve in curves if curve.ring.hosts > 1]
    whole = design(between)
    errors = {}
    for shape in sorted(
        {curve.ring[:2] for curve in between}
    ):  # rings that differ in stride only are held out together
        predict = design([curve for curve in between if curve.ring[:2] != shape])
        errors |= {(c.ring, c.kind): _errors(predict, c) for c in between if c.ring[:2] == shape}
    return Errors({(curve.ring, curve.kind): _errors(whole, curve) for curve in between}, errors)


def preset_seconds(curve: Curve) -> np.ndarray:
    """Returns the seconds that the V100 preset has for a curve."""
    link = preset("v100", {"outer": curve.ring.size, "inner": curve.ring.stride}).links["outer"]
    return collective_s(curve.kind, curve.num_bytes, curve.ring.size, link)


def _errors(predict: Prediction, curve: Curve) -> np.ndarray:
    large = curve.where(curve.elements >= LEAST_ELEMENTS)
    return np.abs(predict(large) / large.seconds - 1)


def _in_words(errors: Sequence[np.ndarray]) -> str:
    """Returns median and 90% quantile in percent."""
    values = np.concatenate(errors)
    return f"{np.median(values):.1%} / {np.quantile(values, 0.9):.1%}"


def _of_kind(errors: Mapping[tuple[Ring, CollectiveKind], np.ndarray], kind: str) -> list[np.ndarray]:
    return [value for (_, own), value in errors.items() if kind in (own, "all")]


def links_document(curves: Sequence[Curve]) -> list[dict]:
    """Returns the lines of all points by ring, with four digits, as the JSON values that `cost.presets` reads."""
    links: dict[Ring, dict[str, list]] = defaultdict(dict)
    for curve in curves:
        lines = fit_lines(curve.sent_bytes, curve.seconds)
        links[curve.ring][curve.kind] = [[float(f"{value:.3e}") for value in line] for line in lines]
    return [
        {"devices_in_host": 8, "size": ring.size, "stride": ring.stride, "by_kind": by_kind}
        for ring, by_kind in sorted(links.items())
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables, and writes the preset's links where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--write", type=Path, help="a file for the fitted lines, such as cost/v100_links.json")
    options = parser.parse_args(arguments)
    if not options.profiles.exists():
        parser.error(f"`--profiles` {options.profiles} is missing; give the path of v100_collective_profiles.csv.gz.")
    curves = read_profiles(options.profiles)
    if options.write:
        rows = [json.dumps(link) for link in links_document(curves)]
        options.write.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    kinds = ("all", *sorted({curve.kind for curve in curves}))
    errors_by_model = {name: errors_of(design, curves) for name, design in DESIGNS.items()}
    columns = ["model", "points", *kinds]
    rows = [
        [
            name,
            part,
            *(_in_words(_of_kind(getattr(errors, part.replace(" ", "_") + "_points"), kind)) for kind in kinds),
        ]
        for name, errors in errors_by_model.items()
        for part in ("fitted", "held out")
    ]
    print_table("Relative error, median / 90% quantile: every third size held out", columns, rows)
    rings = errors_of_rings(rule_between_hosts, curves)
    rows = [
        [
            "rule by kind",
            part,
            *(_in_words(_of_kind(getattr(rings, part.replace(" ", "_") + "_points"), kind)) for kind in kinds),
        ]
        for part in ("fitted", "held out")
    ]
    print_table("The same, rings of several hosts: one whole ring held out at a time", columns, rows)
    rows = []
    for curve in curves:
        key = curve.ring, curve.kind
        line, lines = (
            errors_by_model["line by kind, relative error"].held_out_points[key],
            errors_by_model[CHOSEN].held_out_points[key],
        )
        own = _errors(preset_seconds, curve)
        rows.append([*curve.ring, curve.kind, len(lines), *(_in_words([part]) for part in (line, lines, own))])
    columns = ["hosts", "members", "stride", "kind", "held out", "line by kind", CHOSEN, "preset, all points"]
    print_table("Held-out points by curve", columns, rows)


if __name__ == "__main__":
    main()
