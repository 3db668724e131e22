"""Laws for the seconds of products, attention and collectives, fitted to measured kernels, and their errors on others.

    python -m experiments.measured_kernels [--write cost/measured_rates.json]

A third of the rows of each device and kind is held out by a fixed seed; nothing is fitted to it, and what is written
was fitted to the other two thirds. Products come from aiconfigurator, whose weights are not random, so that its kernels
draw less power and are 5 to 12% too fast: the written rate is `REAL_SHARE` of what was fitted. Rows of Vidur, with real
weights, and of the table in XLA are not used at all. Attention was measured forward only.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from cost.base import CollectiveKind
from cost.collectives import collective_s, collective_sent_bytes
from cost.lines import Line, fit_lines, least_s
from cost.measured_rates import AttentionRate, ProductRate
from cost.presets import preset
from experiments.published.data import MissingDataError, held_out, read
from experiments.tables import print_table

DEVICES = {"a100": "A100-SXM4", "h100": "H100 80GB HBM3", "h200": "NVIDIA H200", "b200": "NVIDIA B200"}
"""Presets' names, and how aiconfigurator calls the devices."""
REAL_SHARE = 0.92
"""What products with real numbers reach of the rate with numbers that are not random: they are 5 to 12% slower."""
BACKWARD_SHARE = 0.63 / 0.73
"""What attention's backward pass reaches of the rate of the forward pass, on A100s. Source: Dao, FlashAttention-2
(arXiv:2307.08691), abstract: 73 and 63% of the peak."""
KINDS: dict[str, CollectiveKind] = {
    "alltoall": "all_to_all",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
}
LEAST_S = {"products": 1e-4, "attention": 1e-4}
LEAST_BYTES = 2**20
_LEAST_FITTED_S = 2e-5  # kernels below it are launches


class Kernels(NamedTuple):
    """Measured kernels of one kind.

    Attributes:
      sizes: by name `[rows]`.
      seconds: `[rows]`.
      is_held_out: `[rows]`.
    """

    sizes: Mapping[str, np.ndarray]
    seconds: np.ndarray
    is_held_out: np.ndarray


def kernels_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Kernels:
    """Returns rows of one device and kind as arrays; a size that a row does not have is 1."""
    sizes = {name: np.array([float(row.get(name, 1)) for row in rows]) for name in names}
    seconds = np.array([(row.get("time_us") or row["time_us_derived"]) * 1e-6 for row in rows])
    return Kernels(sizes, seconds, held_out([row["kind"] for row in rows]))


def product_seconds(rate: ProductRate, kernels: Kernels) -> np.ndarray:
    """Returns a law's seconds of products of 16-bit numbers, `[rows]`."""
    batch, m, n, k = (kernels.sizes[name] for name in ("batch", "m", "n", "k"))
    num_bytes = 2 * batch * (m * k + k * n + m * n)
    return rate.launch_s + rate.seconds(batch, m, n, k, num_bytes)


def attention_seconds(rate: AttentionRate, kernels: Kernels) -> np.ndarray:
    """Returns a law's seconds of causal attention on 16-bit numbers, `[rows]`."""
    batch, length, heads, groups, width = (
        kernels.sizes[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim")
    )
    flops = 2 * batch * heads * length**2 * width
    num_bytes = 2 * batch * length * width * 2 * (heads + groups)
    return rate.seconds(flops, num_bytes, batch * heads * length)


def fit_products(kernels: Kernels) -> ProductRate:
    """Fits the law of products to the rows that are not held out, by the least mean error of logarithms."""

    def law(x: np.ndarray) -> ProductRate:
        return ProductRate(x[0] * 1e12, x[1], x[2], x[3] * 1e-6, x[4] * 1e12)

    return _fitted(law, product_seconds, kernels, [[rate, 50, 100, 3, 2] for rate in (250, 800, 1600)])


def fit_attention(kernels: Kernels) -> AttentionRate:
    """Fits the law of attention's forward pass likewise."""

    def law(x: np.ndarray) -> AttentionRate:
        return AttentionRate(x[0] * 1e12, x[1] * 1e12, x[2], x[3] * 1e-6, BACKWARD_SHARE)

    return _fitted(law, attention_seconds, kernels, [[rate, 1, 60, 5] for rate in (180, 600)])


def _fitted(law: Any, seconds_of: Any, kernels: Kernels, starts: list[list[float]]) -> Any:
    used = ~kernels.is_held_out & (kernels.seconds > _LEAST_FITTED_S)

    def error(logarithms: np.ndarray) -> float:
        return float(np.abs(np.log(seconds_of(law(np.exp(logarithms)), kernels) / kernels.seconds))[used].mean())

    options = {"maxiter": 8000, "maxfev": 8000, "adaptive": True}
    found = [minimize(error, np.log(start), method="Nelder-Mead", options=options) for start in starts]
    best = np.exp(min(found, key=lambda result: result.fun).x)
    return law(np.where(best < 1e-3, 0.0, [float(f"{x:.3g}") for x in best]))


def collective_curves(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Kernels]:
    """Returns the collectives of one device inside a host, by kind and number of devices; sizes are sent bytes."""
    curves = {}
    for key in dict.fromkeys((row["op"], row["num_devices"]) for row in rows):
        own = [row for row in rows if (row["op"], row["num_devices"]) == key]
        kernels = kernels_of(own, ["bytes"])
        kind = KINDS[key[0]]
        full = kernels.sizes["bytes"] * (key[1] if kind == "all_to_all" else 1)
        curves[kind, key[1]] = kernels._replace(sizes={"sent": collective_sent_bytes(kind, full, key[1])})
    return curves


def fit_collectives(curves: Mapping[tuple[str, int], Kernels]) -> dict[tuple[str, int], tuple[Line, ...]]:
    """Fits lines to each curve's points that are not held out."""
    fitted = {}
    for key, kernels in curves.items():
        used = ~kernels.is_held_out
        lines = fit_lines(kernels.sizes["sent"][used], kernels.seconds[used])
        fitted[key] = tuple(Line(*(float(f"{value:.3e}") for value in line)) for line in lines)
    return fitted


def errors_in_words(predicted_s: np.ndarray, measured_s: np.ndarray, chosen: np.ndarray) -> str:
    """Returns the median and 90% quantile of the relative errors of the chosen rows, and how many there are."""
    errors = np.abs(predicted_s / measured_s - 1)[chosen]
    return f"{np.median(errors):.1%} / {np.quantile(errors, 0.9):.1%} of {chosen.sum()}" if chosen.any() else "no row"


def _real(rate: ProductRate) -> ProductRate:
    return rate.__class__(**{**rate.__dict__, "flops_per_s": round(rate.flops_per_s * REAL_SHARE, -10)})


def laws_of(rows: Sequence[Mapping[str, Any]], device: str) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Fits all laws of a device; returns the JSON values that `cost` reads, and rows of errors."""
    of_device = [r for r in rows if DEVICES[device] in r["device"] and "aiconfigurator" in r["source"]]
    document: dict[str, Any] = {}
    table: list[tuple[str, ...]] = []

    def add(what: str, source: str, predicted: np.ndarray, k: Kernels, chosen: np.ndarray) -> None:
        parts = [errors_in_words(predicted, k.seconds, chosen & part) for part in (~k.is_held_out, k.is_held_out)]
        table.append((device, what, source, *parts))

    products = kernels_of([r for r in of_device if r["kind"] == "gemm"], ["batch", "m", "n", "k"])
    rate = fit_products(products)
    long = products.seconds > LEAST_S["products"]
    add("products above 0.1 ms", "aiconfigurator", product_seconds(rate, products), products, long)
    document["products"] = {name: _real(rate).__dict__ for name in ("bfloat16", "float16")}
    for source in ("vidur", "openxla"):
        others = [r for r in rows if device.upper() in r["device"] and source in r["source"] and r["kind"] == "gemm"]
        others = kernels_of([r for r in others if "bf16" in r["dtype"]], ["batch", "m", "n", "k"])
        others = others._replace(is_held_out=np.ones(len(others.seconds), bool))
        if len(others.seconds):
            predicted = product_seconds(_real(rate), others)
            add(f"products above 0.1 ms, {REAL_SHARE} of the rate", source, predicted, others, others.seconds > 1e-4)
    names = ["batch", "seq", "heads", "kv_heads", "head_dim"]
    attention = kernels_of([r for r in of_device if r["kind"] == "attention_forward"], names)
    if len(attention.seconds):
        law = fit_attention(attention)
        document["attention"] = law.__dict__
        long = attention.seconds > LEAST_S["attention"]
        add("attention above 0.1 ms", "aiconfigurator", attention_seconds(law, attention), attention, long)
    curves = collective_curves([r for r in of_device if r["kind"] == "collective"])
    fitted = fit_collectives(curves)
    merged = [
        np.concatenate(x)
        for x in zip(*((c.sizes["sent"], c.seconds, c.is_held_out) for c in curves.values()), strict=True)
    ]
    predicted = np.concatenate([least_s(fitted[key], c.sizes["sent"]) for key, c in curves.items()])
    all_curves = Kernels({}, merged[1], merged[2].astype(bool))
    add("collectives that send 1 MiB or more", "aiconfigurator", predicted, all_curves, merged[0] >= LEAST_BYTES)
    by_size: dict[str, dict[str, Any]] = {}
    for (kind, size), lines in fitted.items():
        by_size.setdefault(str(size), {})[kind] = [list(line) for line in lines]
    document["links"] = by_size
    return document, table


def table_over_hosts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns rows of the seconds of all-reduces over several hosts by the presets' rules, relative to measured ones.

    Nothing is fitted to these rows. Each source is a row, with the median of messages of 1 to 16 MiB, of up to 256 MiB,
    and of larger ones.
    """
    ratios: dict[tuple[str, ...], list[list[float]]] = {}
    for row in rows:
        name = next((name for name in DEVICES if name in row["device"].lower()), None)
        if row["kind"] != "collective" or row["op"] != "all_reduce" or row.get("nodes", 1) < 2 or name is None:
            continue
        size, hosts, num_bytes = row["num_devices"], row["nodes"], row["bytes"]
        sent = float(collective_sent_bytes("all_reduce", num_bytes, size))
        measured_s = row["time_us"] * 1e-6 if row.get("time_us") else sent / (row["busbw_GBps"] * 1e9)
        link = preset(name, {"all": size}, hosts={"all": hosts}, devices_per_host=8).links["all"]
        key = name, row["source"].split("@")[0].split("(")[-1], f"{size} on {hosts} hosts"
        place = int(np.searchsorted([2**20, 2**24, 2**28], num_bytes, side="right")) - 1
        if place >= 0:
            own = ratios.setdefault(key, [[], [], []])
            own[place].append(float(collective_s("all_reduce", num_bytes, size, link)) / measured_s)
    return [
        (*key, *(f"{np.median(part):.2f} of {len(part)}" if part else "-" for part in parts))
        for key, parts in sorted(ratios.items())
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of errors, and writes the laws where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a file for the laws, such as cost/measured_rates.json")
    options = parser.parse_args(arguments)
    try:
        rows = read("kernels")
    except MissingDataError as error:
        print(error)
        return
    document, table = {}, []
    for device in DEVICES:
        document[device], errors = laws_of(rows, device)
        table += errors
    if options.write:
        lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in document.items()]
        options.write.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    columns = ("device", "kernels", "source", "fitted: median / 90%", "held out")
    print_table("Relative errors of the laws for kernels", columns, table)
    columns = ("device", "source", "devices", "1 to 16 MiB", "16 to 256 MiB", "larger")
    title = "All-reduces over several hosts: the preset's rule over measured seconds"
    print_table(title, columns, table_over_hosts(rows))


if __name__ == "__main__":
    main()
