"""The drawing of memory has the plan's peak, and names what holds it."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.plans.layers import LayerPass, layer_passes
from diffshard.plans.memory import MAX_ROWS, held_groups, memory_elements
from diffshard.plans.page import format_page
from diffshard.plans.summary import type_bytes
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import operation, small_plan

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def found():
    """A plan of a step with a scanned, rematerialised body and a donated state."""

    def loss(weights, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    def step(weights, x):
        return weights - 0.1 * jax.grad(loss)(weights, x)

    args = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    return diffshard.search(step, MESH, hardware="h100", donate_argnums=0).plan(*args)


def drawn_values(page, top):
    """The y values of the curve of a page, in units of `top`."""
    (path,) = re.findall(r'<path d="([^"]*)" style="stroke:var\(--first\)"', page)
    return [top * (1 - float(y) / 200) for y in re.findall(r"(?:V|^M\S+ )([\d.]+)", path)]


def test_the_drawn_peak_is_the_plans(found):
    assert found.memory is not None
    assert max(num_bytes for _, num_bytes in found.memory.changes) == found.peak_bytes
    values = drawn_values(memory_elements(found), 1.15 * found.peak_bytes)
    assert max(values) == pytest.approx(found.peak_bytes, rel=1e-3)
    assert min(values) < 0.9 * found.peak_bytes


def test_what_is_named_at_the_peak_adds_up_to_it(found):
    total = sum(group.num_bytes for group in held_groups(found))
    assert 0.99 * found.peak_bytes < total <= found.peak_bytes * (1 + 1e-9)
    assert {g.origin for g in held_groups(found)} >= {"argument", "backward"}
    weights = [g for g in held_groups(found) if (g.name, g.origin) == ("weights", "argument")]
    assert [(g.array, g.num_bytes * g.parts) for g in weights] == [("float32[4,256,256]", 4 * 256 * 256 * 4)]


def test_rows_of_the_table_add_up_to_the_peak(found):
    cells = re.findall(r'data-of="of the peak">([\d.]+)%', memory_elements(found))
    assert 1 < len(cells) <= MAX_ROWS + 1
    assert sum(map(float, cells)) == pytest.approx(100, abs=0.1 * len(cells))


def test_a_small_profile_is_drawn_as_worked_out_by_hand():
    page = format_page(small_plan())
    text = " ".join(checked_page(page).texts)
    # The limit of 4096 bytes is near enough to be the upper edge: 1024 of it is a quarter.
    drawn = drawn_values(memory_elements(small_plan()), 1.15 * 4096)
    assert drawn == pytest.approx([768, 1024, 768], abs=0.5 * 1.15 * 4096 / 200)
    assert "peak 1.00 KiB" in text
    assert "limit 4.00 KiB" in text
    assert "at the peak in Net/layer_1, forward" in text
    assert [(g.name, g.times, g.origin, g.parts, g.num_bytes) for g in held_groups(small_plan())] == [
        ("state/layer_*/w", 2, "argument", 4, 512.0),
        ("Net/layer_1/dense/dot_general", 1, "forward", 8, 256.0),
        ("batch", 1, "argument", 2, 256.0),
    ]


def test_without_a_limit_there_is_no_line():
    page = memory_elements(small_plan(memory_limit_bytes=math.inf))
    assert "limit" not in page


def test_passes_follow_each_other_and_short_ones_join_those_before():
    assert layer_passes(small_plan()) == [
        LayerPass("Net/layer_0", "forward", 0, 1),
        LayerPass("Net/layer_1", "forward", 1, 2),
        LayerPass("Net/layer_1", "backward", 2, 3),
        LayerPass("Net/layer_0", "backward", 3, 4),
        LayerPass("update", "update", 4, 5),
    ]
    many = [operation("add() -> float32[]", "jvp(Net)/a", (), 0.0)] * 400
    one = operation("add() -> float32[]", "jvp(Net)/b", (), 0.0)
    assert layer_passes(dataclasses.replace(small_plan(), operations=(*many, one, *many))) == [
        LayerPass("Net/a", "forward", 0, 801)
    ]


@pytest.mark.parametrize(("array", "expected"), [("bfloat16[3,5]", 30), ("float32[]", 4), ("key<fry>[2]", 16)])
def test_bytes_of_a_type(array, expected):
    assert type_bytes(array) == expected
