"""Learned seconds of kernels beside laws: boosted trees on sizes, fitted to and tried on the same kernels.

    python -m experiments.learned_kernels [--kinds products attention collectives]

What is predicted is the ratio to the roofline of the datasheet, so that learned ways, too, know what most of the work
is. Each way is fitted to the same rows, which by the split are not those that errors are of:

- "a third": rows are drawn at random, as the published errors of the laws are, so that a neighbour of almost each
  held-out row is known;
- "shapes": all rows of a third of the weights' shapes, or of attention's heads, are held out;
- "larger": the sixth of the rows with the most work is held out;
- "another GPU": the rows of other GPUs are fitted. Each of their laws is divided by its own roofline and multiplied by
  the GPU's; the prediction is the geometric mean.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from cost.lines import Line, fit_lines, least_s
from cost.presets import preset
from experiments import boosted_trees
from experiments.measured_kernels import (
    DEVICES,
    KINDS,
    LEAST_BYTES,
    LEAST_S,
    Kernels,
    attention_seconds,
    errors_in_words,
    fit_attention,
    fit_products,
    kernels_of,
    product_seconds,
)
from experiments.published.data import HELD_OUT_SHARE, MissingDataError, held_out, read
from experiments.tables import print_table

_MULTIPROCESSORS = {"a100": 108, "h100": 132, "h200": 132, "b200": 148}
_TILES = ((128, 128), (128, 256))  # of a product's result; usual ones
_LARGER_SHARE = 1 / 6
_SPLITS = ("a third", "shapes", "larger", "another GPU")
_SIZES = {
    "products": ("batch", "m", "n", "k"),
    "attention": ("batch", "seq", "heads", "kv_heads", "head_dim"),
    "collectives": ("bytes", "num_devices"),
}
_ROWS = {"products": "gemm", "attention": "attention_forward", "collectives": "collective"}
_LAWS = {"products": (fit_products, product_seconds), "attention": (fit_attention, attention_seconds)}
_SHAPES = {"products": ("n", "k"), "attention": ("heads", "kv_heads")}
Way = Callable[["Data", np.ndarray, np.ndarray], np.ndarray]
"""From all rows, the rows that are fitted and the rows wanted to the seconds of the latter."""


class Data(NamedTuple):
    """Measured kernels of one kind on several GPUs.

    Attributes:
      device: the GPU of each row, an index into `DEVICES`, `[N]`.
      kernels: sizes and seconds; nothing is marked as held out.
      roofline_s: of each row, `[N]`.
      features: of each row, `[N, F]`; the first is the logarithm of the roofline.
      group: rows that a split by shapes keeps together, `[N]`; -1 where there are no shapes.
      counts: which rows errors are of, `[N]`: kernels that are longer than a launch.
      operations: kind and number of devices of collectives, N pairs, or none.
    """

    device: np.ndarray
    kernels: Kernels
    roofline_s: np.ndarray
    features: np.ndarray
    group: np.ndarray
    counts: np.ndarray
    operations: tuple[tuple[CollectiveKind, int], ...] = ()


def data_of(rows: Sequence[Mapping[str, Any]], kind: str) -> Data:
    """Returns the rows of aiconfigurator of one kind of kernels, of all GPUs that laws are fitted for."""
    names = list(DEVICES)
    own = [
        (next(i for i, name in enumerate(names) if DEVICES[name] in row["device"]), row)
        for row in rows
        if row["kind"] == _ROWS[kind] and "aiconfigurator" in row["source"]
        if any(full in row["device"] for full in DEVICES.values())
    ]
    own = [(i, row) for i, row in own if "GB200" not in row["device"]]
    device = np.array([i for i, _ in own])
    kernels = kernels_of([row for _, row in own], _SIZES[kind])
    kernels = kernels._replace(is_held_out=np.zeros(len(own), bool))
    operations: tuple[tuple[CollectiveKind, int], ...] = ()
    if kind == "collectives":
        operations = tuple((KINDS[row["op"]], row["num_devices"]) for _, row in own)
        roofline_s, sizes = _collective_sizes(operations, kernels, device)
        kernels = kernels._replace(sizes={"sent": np.exp(sizes[:, 0])})
        counts = kernels.sizes["sent"] >= LEAST_BYTES
    else:
        roofline_s, sizes = (_product_sizes if kind == "products" else _attention_sizes)(kernels, device)
        counts = kernels.seconds > LEAST_S[kind]
    group = np.full(len(own), -1)
    if kind in _SHAPES:
        shapes = np.stack([kernels.sizes[name] for name in _SHAPES[kind]], axis=1)
        group = np.unique(shapes, axis=0, return_inverse=True)[1]
    features = np.concatenate([np.log(roofline_s)[:, None], sizes], axis=1)
    return Data(device, kernels, roofline_s, features, group, counts, operations)


def _rates(device: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns operations in a second, bytes in a second and multiprocessors of each row's GPU."""
    hardware = [preset(name, {}) for name in DEVICES]
    flops = np.array([cast(Mapping[str, float], one.flops_per_s)["bfloat16"] for one in hardware])
    num_bytes = np.array([one.memory_bytes_per_s for one in hardware])
    return flops[device], num_bytes[device], np.array([_MULTIPROCESSORS[name] for name in DEVICES])[device]


def _idle(tiles: np.ndarray, multiprocessors: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the time of whole rounds of tiles over that of the tiles by themselves."""
    rounds = tiles / multiprocessors
    return np.log(np.ceil(rounds) / rounds)


def _product_sizes(kernels: Kernels, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flops_per_s, bytes_per_s, multiprocessors = _rates(device)
    batch, m, n, k = (kernels.sizes[name] for name in _SIZES["products"])
    moved_s = 2 * batch * (m * k + k * n + m * n) / bytes_per_s
    roofline_s = np.maximum(2 * batch * m * n * k / flops_per_s, moved_s)
    idle = [_idle(batch * np.ceil(m / rows) * np.ceil(n / columns), multiprocessors) for rows, columns in _TILES]
    return roofline_s, np.stack([*np.log([m, n, k, moved_s]), *idle], axis=1)


def _attention_sizes(kernels: Kernels, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flops_per_s, bytes_per_s, multiprocessors = _rates(device)
    batch, length, heads, groups, width = (kernels.sizes[name] for name in _SIZES["attention"])
    moved_s = 4 * batch * length * width * (heads + groups) / bytes_per_s
    roofline_s = np.maximum(2 * batch * heads * length**2 * width / flops_per_s, moved_s)
    idle = _idle(batch * heads * np.ceil(length / 128), multiprocessors)
    return roofline_s, np.stack([*np.log([batch, length, heads, groups, moved_s]), idle], axis=1)


def _collective_sizes(
    operations: Sequence[tuple[CollectiveKind, int]], kernels: Kernels, device: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    names, kinds = list(DEVICES), list(KINDS.values())
    full = kernels.sizes["bytes"] * [size if kind == "all_to_all" else 1 for kind, size in operations]
    sent = np.array(
        [float(collective_sent_bytes(kind, b, size)) for b, (kind, size) in zip(full, operations, strict=True)]
    )
    links = [preset(name, {"all": 8}).links["all"].s_per_byte for name in names]
    is_kind = [[kind == other for other in kinds] for kind, _ in operations]
    sizes = np.log([size for _, size in operations])
    return sent * np.array(links)[device], np.stack([np.log(sent), sizes, *np.transpose(is_kind)], axis=1)


def law(kind: str) -> Way:
    """Returns the law of a kind of kernels as a way to predict; what was fitted to the same rows is kept."""
    known: dict[bytes, Any] = {}

    def of_one(data: Data, fitted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        if kind == "collectives":
            return _lines(data, fitted, wanted)
        fit, seconds = _LAWS[kind]
        if fitted.tobytes() not in known:
            known[fitted.tobytes()] = fit(_rows(data.kernels, fitted))
        return seconds(known[fitted.tobytes()], _rows(data.kernels, wanted))

    def predict(data: Data, fitted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        (device,) = np.unique(data.device[wanted])
        if device in data.device[fitted]:
            return of_one(data, fitted & (data.device == device), wanted)
        ratios = []
        for other in np.unique(data.device[fitted]):
            # The sizes are those that are wanted; the law is that of the other GPU, and so is its roofline.
            seconds = of_one(data, fitted & (data.device == other), wanted)
            ratios.append(np.log(seconds / _roofline_on(data, kind, wanted, int(other))))
        return data.roofline_s[wanted] * np.exp(np.mean(ratios, axis=0))

    return predict


def _rows(kernels: Kernels, chosen: np.ndarray) -> Kernels:
    sizes = {name: size[chosen] for name, size in kernels.sizes.items()}
    return Kernels(sizes, kernels.seconds[chosen], kernels.is_held_out[chosen])


def _roofline_on(data: Data, kind: str, wanted: np.ndarray, device: int) -> np.ndarray:
    there = np.full(wanted.sum(), device)
    if kind == "collectives":
        link = preset(list(DEVICES)[device], {"all": 8}).links["all"].s_per_byte
        return data.kernels.sizes["sent"][wanted] * link
    return (_product_sizes if kind == "products" else _attention_sizes)(_rows(data.kernels, wanted), there)[0]


def _lines(data: Data, fitted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Predicts collectives by the lines of their kind and number of devices."""
    sent, predicted = data.kernels.sizes["sent"], np.full(len(fitted), np.nan)
    for operation in set(data.operations):
        own = np.array([other == operation for other in data.operations])
        lines: Sequence[Line] = fit_lines(sent[own & fitted], data.kernels.seconds[own & fitted])
        predicted[own & wanted] = least_s(lines, sent[own & wanted])
    return predicted[wanted]


def trees(data: Data, fitted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Predicts by boosted trees."""
    targets = np.log(data.kernels.seconds / data.roofline_s)
    found = boosted_trees.fit(data.features[fitted], targets[fitted], np.random.default_rng(0))
    return data.roofline_s[wanted] * np.exp(found.predict(data.features[wanted]))


def trees_on(other: Way) -> Way:
    """Returns a way in which trees correct the ratio to what another way, fitted to the same rows, predicts."""

    def predict(data: Data, fitted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        base = data.roofline_s.copy()
        for device in np.unique(data.device[fitted]):
            own = fitted & (data.device == device)
            base[own] = other(data, fitted, own)
        base[wanted] = other(data, fitted, wanted)
        return trees(data._replace(roofline_s=base), fitted, wanted)

    return predict


def split(data: Data, name: str, device: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rows are fitted and which of a GPU's rows are predicted, both `[N]`."""
    of_device = data.device == device
    if name == "another GPU":
        return ~of_device, of_device & data.counts
    is_held_out = np.zeros(len(of_device), bool)
    if name == "a third":
        is_held_out[of_device] = held_out(["all"] * int(of_device.sum()))
    elif name == "shapes":
        groups = np.random.default_rng(0).permutation(np.unique(data.group))
        is_held_out = np.isin(data.group, groups[: round(HELD_OUT_SHARE * len(groups))])
    else:
        least = np.quantile(data.roofline_s[of_device], 1 - _LARGER_SHARE)
        is_held_out = data.roofline_s >= least
    return of_device & ~is_held_out, of_device & is_held_out & data.counts


def ways_of(kind: str) -> dict[str, Way]:
    """Returns all ways to predict kernels of one kind, the law first."""
    its_law = law(kind)
    return {"law": its_law, "trees": trees, "trees on the law": trees_on(its_law)}


def errors(data: Data, kind: str, ways: Mapping[str, Way], name: str) -> list[tuple[str, ...]]:
    """Returns rows of errors of all ways under one split, for each GPU."""
    found = []
    for device in np.unique(data.device):
        fitted, wanted = split(data, name, int(device))
        measured, all_rows = data.kernels.seconds[wanted], np.ones(int(wanted.sum()), bool)
        predicted = [way(data, fitted, wanted) for way in ways.values()]
        texts = [errors_in_words(seconds, measured, all_rows).split(" of ")[0] for seconds in predicted]
        found.append((kind, name, list(DEVICES)[device], str(len(measured)), *texts))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=tuple(_ROWS), default=list(_ROWS))
    parser.add_argument("--splits", nargs="+", choices=_SPLITS, default=list(_SPLITS))
    options = parser.parse_args(arguments)
    try:
        rows = read("kernels")
    except MissingDataError as error:
        print(error)
        return
    table = []
    for kind in options.kinds:
        data, ways = data_of(rows, kind), ways_of(kind)
        splits = [name for name in options.splits if name != "shapes" or kind in _SHAPES]
        table += [row for name in splits for row in errors(data, kind, ways, name)]
    columns = ("kernels", "held out", "GPU", "rows", "law", "trees", "trees on the law")
    print_table("Relative errors on kernels that were held out, median / 90%", columns, table)


if __name__ == "__main__":
    main()
