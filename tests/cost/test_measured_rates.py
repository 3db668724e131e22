"""Laws of measured kernels: by hand, growing with each size, and only where something was measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import AttentionWork, Work
from cost.calibration import MEASURED, measured_preset
from cost.compute import product_s, work_s
from cost.measured_rates import AttentionRate, ProductRate, measured_rates
from cost.presets import preset

SIZES = 2 ** np.arange(4, 17)


def test_a_product_by_hand():
    rate = ProductRate(flops_per_s=1e12, lost_rows=2, lost_depth=10, launch_s=1e-6, memory_bytes_per_s=1e9)
    # Two products of (8 + 2) rows, (18 + 2) columns and a depth of 40 + 10, twice 10,000 multiply-adds each.
    assert rate.seconds(2, 8, 18, 40, 0) == pytest.approx(2 * 2 * 10_000 / 1e12)
    assert rate.seconds(2, 8, 18, 40, 1000) == pytest.approx(1e-6), "its traffic takes longer"
    assert rate.seconds(0, 8, 18, 40, 0) == rate.seconds(2, 8, 18, 0, 0) == 0.0


def test_attention_by_hand():
    rate = AttentionRate(flops_per_s=1e12, bytes_per_s=1e9, idle_blocks=3, launch_s=1e-6, backward_share=0.5)
    # 1 s of arithmetic and 1 s for bytes, in two blocks of 128 queries: (1 + 3/2) times as long.
    assert rate.seconds(1e12, 1e9, 256) == pytest.approx(2 * 2.5 + 1e-6)
    assert rate.seconds(1e12, 1e9, 256, is_forward=False) == pytest.approx(3 * 2.5 + 1e-6)
    assert rate.seconds(0, 0, 256) == 0.0


@pytest.mark.parametrize("name", MEASURED)
def test_products_and_attention_never_take_less_where_they_are_larger(name):
    rates = measured_rates(name)
    for rate in rates.products.values():
        for sizes in ((SIZES, 64, 64), (64, SIZES, 64), (64, 64, SIZES)):
            rows, columns, depth = sizes
            num_bytes = 2 * (rows * depth + depth * columns + rows * columns)
            assert (np.diff(rate.seconds(1, *sizes, num_bytes)) >= 0).all()
        assert rate.seconds(1, 4096, 8192, 1024, 0) == rate.seconds(1, 8192, 4096, 1024, 0), "the transposed product"
    if rates.attention is not None:
        seconds = rates.attention.seconds(2.0 * SIZES**2 * 128, 8.0 * SIZES * 128, SIZES)
        assert (np.diff(seconds) >= 0).all()


@pytest.mark.parametrize("name", MEASURED)
def test_no_law_is_faster_than_the_datasheet(name):
    hardware = preset(name, {})
    for dtype, rate in measured_rates(name).products.items():
        assert 0.6 * hardware.peak_flops_per_s(dtype) < rate.flops_per_s < hardware.peak_flops_per_s(dtype)
        assert rate.memory_bytes_per_s < hardware.memory_bytes_per_s
    attention = measured_rates(name).attention
    assert attention is None or attention.flops_per_s < hardware.peak_flops_per_s("bfloat16")


def test_fused_attention_has_a_price_of_its_own_where_it_was_measured():
    short = AttentionWork(1e9, 1e6, "bfloat16", 1024, True)
    measured, other = preset("h100", {}), preset("t4", {})
    assert work_s(short, measured) > 1.5 * work_s(Work(*short[:3]), measured), "few blocks do not fill a device"
    assert work_s(short, other) == work_s(Work(*short[:3]), other)
    wide = short._replace(dtype="float32")
    assert work_s(wide, measured) == work_s(Work(*wide[:3]), measured), "kernels of 16 bits were measured"


def test_a_product_is_priced_by_the_shapes_of_one_device():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 256, 512), (4, 512, 1024))]
    (equation,) = jax.make_jaxpr(lambda x, y: jnp.einsum("bij,bjk->bik", x, y))(*shapes).jaxpr.eqns
    hardware = measured_preset("h100", {})
    rate = hardware.measured.products["bfloat16"]
    num_bytes = 2 * 2 * (128 * 512 + 512 * 1024 + 128 * 1024)
    own = [(2, 128, 512), (2, 512, 1024)]
    assert product_s(equation, own, hardware) == rate.launch_s + rate.seconds(2, 128, 1024, 512, num_bytes)
    assert product_s(equation, own, preset("h100", {})) is None, "this preset has a share of the datasheet's rate"


def test_measured_links_are_those_inside_a_host():
    hardware = measured_preset("h100", {"hosts": 2, "outer": 4, "inner": 2})
    plain = preset("h100", {"hosts": 2, "outer": 4, "inner": 2})
    assert hardware.links["hosts"] == plain.links["hosts"]
    assert hardware.links["inner"].lines("all_gather") != plain.links["inner"].lines("all_gather")
    with pytest.raises(ValueError, match="'t4' was not measured; there are a100, h100, h200, b200"):
        measured_preset("t4", {})


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"`ProductRate.flops_per_s` must be finite and positive, not 0"):
        ProductRate(0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"`AttentionRate.idle_blocks` must be finite and zero or more, not -1"):
        AttentionRate(1, 1, -1, 0, 1)
