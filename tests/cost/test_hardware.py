"""Hardware's rules at the boundary, and which link a mesh axis gets."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost.base import CollectiveKind, Hardware, Link
from cost.compute import roofline_s
from cost.lines import Line
from cost.presets import PRESET_NAMES, hardware_of, preset, preset_name_of, preset_of_mesh

LINK = Link(1e-6, 1e-9)


def hardware(**changes):
    fields = {
        "name": "test",
        "flops_per_s": {"float32": 4.0, "bfloat16": 8.0, "int8": 16.0},
        "memory_bytes_per_s": 1.0,
        "memory_bytes": 1.0,
        "links": {"data": LINK},
    }
    return Hardware(**{**fields, **changes})


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "memory_bytes", "flops_per_s"])
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, 1e-300, True, "fast"])
def test_rates_must_be_positive_numbers(field, value):
    with pytest.raises(ValueError, match=f"`Hardware.{field}` must be a positive number"):
        hardware(**{field: value})


@pytest.mark.parametrize("value", [math.nan, -1e-9, 1e300, math.inf])
@pytest.mark.parametrize("field", ["latency_s", "s_per_byte"])
def test_link_costs_must_be_finite_and_not_negative(field, value):
    with pytest.raises(ValueError, match=f"`Link.{field}` must be a finite number"):
        dataclasses.replace(LINK, **{field: value})
    line = Line(1e-6, 1e-9)._replace(**{field: value})
    with pytest.raises(ValueError, match=rf"`Link\.by_kind\['all_to_all'\]\.{field}` must be a finite number"):
        Link(1e-6, 1e-9, {"all_to_all": (line,)})


@pytest.mark.parametrize(
    ("by_kind", "message"),
    [
        ({"gather": (Line(1.0, 1.0),)}, "must have keys of .*, not 'gather'"),
        ({"all_gather": ()}, "must be a tuple of one Line or more, not "),
        ({"all_gather": ((1.0, 1.0),)}, "must be a tuple of one Line or more, not "),
        ({"all_gather": 3.0}, "must be a tuple of one Line or more, not 3.0"),
    ],
)
def test_links_have_lines_for_known_kinds(by_kind, message):
    with pytest.raises(ValueError, match=message):
        Link(1e-6, 1e-9, by_kind)


def test_equal_links_have_equal_hashes_and_links_that_differ_in_a_kind_do_not():
    lines: dict[CollectiveKind, tuple[Line, ...]] = {
        "all_gather": (Line(1.0, 2.0),),
        "all_to_all": (Line(1.0, 3.0), Line(2.0, 1.0)),
    }
    one, other = Link(1.0, 1.0, lines), Link(1.0, 1.0, dict(reversed(lines.items())))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Link(1.0, 1.0)


@pytest.mark.parametrize("field", ["matrix_share", "memory_share"])
def test_shares_of_rates_are_above_0_and_at_most_1(field):
    with pytest.raises(ValueError, match=f"`Hardware.{field}` must be a positive number"):
        hardware(**{field: 0.0})
    with pytest.raises(ValueError, match=rf"`Hardware\.{field}` must be a positive number \(at most 1;"):
        hardware(**{field: 1.5})
    with pytest.raises(ValueError, match=r"`Hardware\.kernel_launch_s` must be a finite number of seconds"):
        hardware(kernel_launch_s=math.inf)


def test_programs_reach_a_share_of_the_rates():
    half = hardware(matrix_share=0.5, memory_share=0.25)
    assert (half.reached_flops_per_s("bfloat16"), half.reached_memory_bytes_per_s) == (4.0, 0.25)
    assert float(roofline_s(8.0, 0.0, "bfloat16", half)) == 2.0
    assert float(roofline_s(0.0, 1.0, "bfloat16", half)) == 4.0
    assert half != hardware()


def test_a_bad_rate_of_one_dtype_is_named():
    with pytest.raises(ValueError, match=r"flops_per_s\['bfloat16'\]"):
        hardware(flops_per_s={"float32": 1.0, "bfloat16": math.nan})
    with pytest.raises(ValueError, match="'float31' is not a dtype"):
        hardware(flops_per_s={"float31": 1.0})
    with pytest.raises(ValueError, match="has no dtype"):
        hardware(flops_per_s={})


def test_links_are_links_and_a_missing_one_is_named():
    with pytest.raises(TypeError, match="must be a Link"):
        hardware(links={"data": 1e-9})
    with pytest.raises(ValueError, match="no link for the mesh axis 'model'; it has \\('data',\\)"):
        hardware().link("model")


def test_links_and_kinds_are_dicts():
    with pytest.raises(TypeError, match=r"`Hardware\.links` must be a dict from axes of the mesh to Link.*, not \[1\]"):
        hardware(links=[1])
    with pytest.raises(TypeError, match=r"`Link\.by_kind` must be a dict from kinds .* to tuples of Line, not \[1\]"):
        Link(0.0, 0.0, [1])  # pyright: ignore[reportArgumentType]


def test_free_memory_traffic_and_free_latency_are_allowed():
    assert (
        hardware(memory_bytes_per_s=math.inf, memory_bytes=math.inf, links={"x": Link(0.0, 0.0)}).link("x").latency_s
        == 0
    )


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("float32", 4.0),
        ("float16", 8.0),  # as wide as bfloat16
        ("float8_e4m3fn", 8.0),  # the narrowest float that is wide enough, not int8
        ("float64", 2.0),  # half of the widest
        ("complex64", 4.0),
        ("uint8", 16.0),
        ("int32", 4.0),  # no integer is wide enough: the float that is
        ("bool", 16.0),
    ],
)
def test_rate_of_a_dtype_that_is_not_listed(dtype, rate):
    assert hardware().peak_flops_per_s(dtype) == rate
    assert hardware(flops_per_s=3.0).peak_flops_per_s(dtype) == 3.0


def test_equal_hardware_is_equal_and_hashes_equally_and_keeps_no_alias():
    links = {"data": LINK}
    one, two = hardware(links=links), hardware(links=dict(links))
    links["model"] = LINK
    assert one == two
    assert hash(one) == hash(two)
    assert set(one.links) == {"data"}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_has_a_link_for_each_axis_and_rates_for_training(name):
    result = preset(name, {"pod": 2, "data": 4, "model": 4})
    assert set(result.links) == {"pod", "data", "model"}
    assert result.peak_flops_per_s("bfloat16") >= result.peak_flops_per_s("float32") > 0
    assert result.link("model").s_per_byte <= result.link("pod").s_per_byte


@pytest.mark.parametrize(
    ("name", "memory_gb", "memory_gb_per_s", "bfloat16_tflops"),
    [  # as the makers' data sheets print them; the V100 has no bfloat16 units
        ("v100", 16, 900, 15.5), ("a100", 80, 2039, 312), ("h100", 80, 3350, 989), ("h200", 141, 4800, 989),
        ("gh200", 96, 4000, 989), ("tpu_v5e", 16, 819, 197), ("tpu_v5p", 95, 2765, 459),
        ("tpu_v6e", 32, 1638, 918),
    ],
)  # fmt: skip
def test_presets_have_the_numbers_of_data_sheets(name, memory_gb, memory_gb_per_s, bfloat16_tflops):
    result = preset(name, {"data": 8})
    assert result.memory_bytes in (memory_gb * 10**9, memory_gb * 2**30)
    assert result.memory_bytes_per_s == pytest.approx(memory_gb_per_s * 1e9, rel=0.002)
    assert result.peak_flops_per_s("bfloat16") == pytest.approx(bfloat16_tflops * 1e12, rel=0.002)


def test_copies_to_the_host_are_as_fast_as_its_bus_allows():
    each_way = {"v100": 15.75, "t4": 15.75, "a100": 31.5, "h100": 63, "h200": 63, "gh200": 450}  # as the makers say
    for name, gb_per_s in each_way.items():
        rate = preset(name, {"data": 2}).host_memory_bytes_per_s
        assert rate is not None
        assert 0.65 * gb_per_s < rate / 1e9 < 0.9 * gb_per_s, name
    assert preset("cpu", {"data": 2}).host_memory_bytes_per_s is None
    assert preset_name_of("NVIDIA GH200 480GB") == "gh200"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "fast"])
def test_a_rate_of_copies_to_the_host_is_a_positive_number_or_not_known(value):
    with pytest.raises(ValueError, match=r"`Hardware\.host_memory_bytes_per_s` must be a positive number"):
        hardware(host_memory_bytes_per_s=value)
    assert hardware().host_memory_bytes_per_s is None
    assert hardware(host_memory_bytes_per_s=5e10) != hardware()


def test_axis_in_the_host_is_fast_and_axes_across_hosts_share_its_network():
    h100 = preset("h100", {"data": 4, "model": 8})
    assert 1 / h100.link("model").s_per_byte == pytest.approx(450e9 * 0.82)
    assert 1 / h100.link("data").s_per_byte == pytest.approx(400e9 * 0.93 / 8)  # one of 8 groups that share it
    # The same 32 devices as one axis: a ring leaves each host once and has all of its network.
    flat = preset("h100", {"data": 32})
    assert 1 / flat.link("data").s_per_byte == pytest.approx(450e9 * 0.82)
    (exchange,) = flat.link("data").lines("all_to_all")
    assert exchange.s_per_byte == pytest.approx(h100.link("data").s_per_byte)
    half = preset("h100", {"data": 4, "model": 4})  # two members of each data group in a host
    assert 1 / half.link("data").s_per_byte == pytest.approx(2 * 400e9 * 0.93 / 8)


def test_v100_axes_inside_and_across_hosts_differ_as_measured():
    links = preset("V100", {"data": 4, "model": 8}).links
    assert 130e9 * links["data"].s_per_byte == pytest.approx(400, rel=0.01)


def test_tpu_axis_that_closes_to_a_ring_is_twice_as_fast():
    ring, line = (preset("tpu-v5e", {"x": n}).link("x") for n in (16, 8))
    assert line.s_per_byte == pytest.approx(2 * ring.s_per_byte)
    across = preset("tpu_v5e", {"pod": 2, "x": 256}).link("pod")
    assert 1 / across.s_per_byte == pytest.approx(3.125e9)


def test_simulated_devices_share_the_processor():
    one, eight = preset("cpu", {"x": 1}), preset("cpu", {"x": 2, "y": 4})
    assert eight.peak_flops_per_s("float32") == one.peak_flops_per_s("float32") / 8
    assert eight.memory_bytes == one.memory_bytes / 8


def test_links_that_the_user_gives_are_kept():
    result = preset("a100", {"data": 2, "model": 2}, links={"data": LINK})
    assert result.link("data") == LINK
    assert result.link("model") == preset("a100", {"data": 2, "model": 2}).link("model")


def test_bad_names_axes_and_links_are_named():
    with pytest.raises(ValueError, match="'h300' is unknown; there are v100, a100"):
        preset("h300", {"data": 2})
    with pytest.raises(ValueError, match="`mesh_axes` 'data'"):
        preset("h100", {"data": 0})
    with pytest.raises(ValueError, match="`links` has an axis 'modle'"):
        preset("h100", {"model": 2}, links={"modle": LINK})


def test_hardware_of_a_mesh_is_that_of_its_devices():
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("data",))
    assert hardware_of(mesh) == preset("cpu", {"data": 1})
    with pytest.raises(ValueError, match="must be given for an AbstractMesh"):
        hardware_of(AbstractMesh((2,), ("data",)))


class _Device:
    device_kind, platform = "NVIDIA H200", "gpu"

    def __init__(self, process_index, slice_index=None):
        self.process_index, self.slice_index = process_index, slice_index


def _mesh(devices, **axes):
    class Devices:
        shape = axes

    Devices.devices = np.array(devices, dtype=object).reshape(*axes.values())  # pyright: ignore[reportAttributeAccessIssue]
    return Devices()


def test_hosts_of_a_real_mesh_are_its_processes():
    result = hardware_of(_mesh([_Device(0), _Device(0), _Device(1), _Device(1)], data=2, model=2))
    assert result == preset("h200", {"data": 2, "model": 2}, devices_per_host=2)
    assert result.link("data").s_per_byte > result.link("model").s_per_byte
    assert (result.link("data").num_hosts, result.link("model").num_hosts) == (2, 1)


def test_an_axis_between_hosts_may_be_the_last_one():
    devices = [_Device(0), _Device(1), _Device(0), _Device(1)]
    result = hardware_of(_mesh(devices, data=2, model=2))
    swapped = preset("h200", {"model": 2, "data": 2}, devices_per_host=2)
    assert result.link("model") == swapped.link("model")
    assert (result.link("data").num_hosts, result.link("model").num_hosts) == (1, 2)
    assert result.link("data").s_per_byte < result.link("model").s_per_byte


def test_gpus_of_one_host_may_have_a_process_each():
    devices = [_Device(i, slice_index=i // 2) for i in range(4)]
    two_hosts = preset("h200", {"data": 2, "model": 2}, devices_per_host=2)
    assert hardware_of(_mesh(devices, data=2, model=2)) == two_hosts


def test_a_preset_by_name_has_the_hosts_of_the_devices():
    mesh = _mesh([_Device(i // 4) for i in range(8)], data=2, model=4)
    assert preset_of_mesh("h100", mesh) == preset("h100", {"data": 2, "model": 4}, devices_per_host=4)
    one_host = _mesh([_Device(0)] * 8, data=2, model=4)
    assert preset_of_mesh("h100", one_host) == preset("h100", {"data": 2, "model": 4})


def test_pods_of_tpus_are_smaller_than_the_largest_one():
    chips = [_Device(i // 4, slice_index=i // 16) for i in range(32)]
    result = preset_of_mesh("tpu_v5e", _mesh(chips, pod=2, x=16))
    assert result.link("x") == preset("tpu_v5e", {"x": 16}).link("x")
    assert 1 / result.link("pod").s_per_byte == pytest.approx(3.125e9)


def test_processes_share_a_processor_each():
    class Core(_Device):
        device_kind, platform = "cpu", "cpu"

    result = hardware_of(_mesh([Core(i // 4, slice_index=0) for i in range(8)], data=2, model=4))
    assert result.memory_bytes == preset("cpu", {"x": 4}).memory_bytes
    assert (result.link("data").num_hosts, result.link("model").num_hosts) == (2, 1)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "a", None])
def test_the_exposed_share_is_a_share(share):
    with pytest.raises(ValueError, match="exposed_share` must be a share from 0 to 1"):
        Hardware("h", 1.0, 1.0, 1.0, {}, exposed_share=share)


def test_a_preset_asks_for_the_sizes_of_axes_where_it_is_given_a_mesh():
    with pytest.raises(TypeError, match=r"`mesh_axes` must map .* `dict\(mesh.shape\)` does, not AbstractMesh"):
        preset("h100", AbstractMesh((2,), ("data",)))  # pyright: ignore[reportArgumentType]


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match=r"`Hardware.name` must be text, such as 'my devices', not None"):
        Hardware(name=None, flops_per_s=1e12, memory_bytes_per_s=1e12, memory_bytes=1e9, links={})  # type: ignore[arg-type]
