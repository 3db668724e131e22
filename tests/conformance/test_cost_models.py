"""Every cost model keeps the rules of `cost.base.CostModel`; a new one is found by its `EXAMPLE`."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import cost
from cost.base import CostModel, Hardware, Link
from cost.lines import Line
from cost.presets import PRESET_NAMES, preset
from tests.conformance.discovery import examples

MODULES = examples(cost)
MODELS = [
    pytest.param(model, id=f"{module.__name__.removeprefix('cost.')}-{i}")
    for module in MODULES
    for i, model in enumerate(module.EXAMPLE())
]
PLAIN_LINK = Link(
    1e-5, 1e-9, {"all_to_all": (Line(1e-5, 3e-9), Line(1e-3, 1e-9)), "reduce_scatter": (Line(1e-5, 2e-9),)}
)
HARDWARE = [
    Hardware("plain", {"float32": 2e12, "bfloat16": 4e12}, 1e11, 1e10, {"data": PLAIN_LINK}),
    *(preset(name, {"data": 4}) for name in PRESET_NAMES),
]
SIZES = np.concatenate([[0.0], np.geomspace(1.0, 1e12, 25)])


def _faster(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    """Hardware that is better in one respect each, and what that is."""
    assert not isinstance(hardware.flops_per_s, float | int)
    for dtype, rate in hardware.flops_per_s.items():
        yield dtype, dataclasses.replace(hardware, flops_per_s={**hardware.flops_per_s, dtype: 2 * rate})
    yield "memory", dataclasses.replace(hardware, memory_bytes_per_s=2 * hardware.memory_bytes_per_s)
    link = hardware.link("data")
    for name, better in _better_links(link):
        yield name, dataclasses.replace(hardware, links={"data": better})


def _better_links(link: Link) -> Iterator[tuple[str, Link]]:
    yield "latency_s", dataclasses.replace(link, latency_s=link.latency_s / 2)
    yield "s_per_byte", dataclasses.replace(link, s_per_byte=link.s_per_byte / 2)
    for kind, lines in link.by_kind.items():
        for i, line in enumerate(lines):
            for field, value in line._asdict().items():
                better = (*lines[:i], line._replace(**{field: value / 2}), *lines[i + 1 :])
                yield f"{field} of {kind}", dataclasses.replace(link, by_kind={**link.by_kind, kind: better})


def violations(model: CostModel, hardware: Hardware) -> list[str]:
    """The rules that a cost model breaks on some hardware, in words."""
    seconds = model(SIZES, hardware)
    grid = model(SIZES[1:].reshape(5, 5), hardware)
    rules = {
        "gives float64 of the shape of the sizes": seconds.dtype == np.float64 and seconds.shape == SIZES.shape,
        "takes arrays of any shape": np.array_equal(grid.ravel(), seconds[1:]),
        "takes one number": float(model(float(SIZES[7]), hardware)) == seconds[7],
        "is finite": np.isfinite(seconds).all(),
        "is never negative": (seconds >= 0).all(),
        "takes no time for nothing": seconds[0] == 0,
        "takes time for something": (seconds[1:] > 0).all(),
        "never takes less for more": (np.diff(seconds) >= 0).all(),
        **{
            f"never takes longer with a better {name}": (model(SIZES, better) <= seconds).all()
            for name, better in _faster(hardware)
        },
    }
    return [rule for rule, holds in rules.items() if not holds]


def test_collectives_and_compute_are_found():
    assert {module.__name__ for module in MODULES} >= {"cost.collectives", "cost.compute"}


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("model", MODELS)
def test_cost_models_keep_the_rules(model: CostModel, hardware: Hardware):
    assert violations(model, hardware) == []


@pytest.mark.parametrize("model", MODELS)
def test_some_part_of_the_hardware_matters(model: CostModel):
    seconds = [model(SIZES, better) for _, better in _faster(HARDWARE[0])]
    assert any((a != b).any() for a, b in itertools.pairwise(seconds))


@pytest.mark.parametrize(
    ("model", "broken"),
    [
        (lambda size, hardware: np.asarray(size) * np.inf, "is finite"),
        (lambda size, hardware: np.asarray(size) - 1.0, "is never negative"),
        (lambda size, hardware: np.asarray(size) + 1.0, "takes no time for nothing"),
        (lambda size, hardware: 0.0 * np.asarray(size), "takes time for something"),
        (lambda size, hardware: np.minimum(np.asarray(size), 1 / np.maximum(size, 1e-9)), "never takes less for more"),
        (lambda size, hardware: np.asarray(size) * hardware.memory_bytes_per_s, "longer with a better memory"),
        (lambda size, hardware: np.asarray(size) / hardware.link("data").latency_s, "longer with a better latency_s"),
        (lambda size, hardware: np.asarray(size, np.float32), "float64"),
        (lambda size, hardware: np.cumsum(np.ravel(size)).reshape(np.shape(size)), "takes one number"),
    ],
)
def test_the_rules_catch_a_model_that_breaks_them(model: CostModel, broken: str):
    with np.errstate(invalid="ignore"):
        assert any(broken in rule for rule in violations(model, HARDWARE[0]))
