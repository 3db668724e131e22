"""Clusters of unequal hosts: their kinds, the parts that can work together, and the links of these."""

from typing import Any

import jax
import pytest

from cost.base import Hardware, Link
from cost.clusters import Cluster, Hosts, Submesh
from cost.presets import preset

INSIDE, BETWEEN = Link(1.0, 2.0), Link(10.0, 5.0)  # seconds, seconds for each byte
NO_HARDWARE: Any = Link
NO_LINK: Any = 1e-9
OWN = Hardware("own", 1.0, 1.0, 1.0, {})
MIXED = Cluster([Hosts(2, devices=8, hardware="a100"), Hosts(2, devices=4, hardware="t4")], INSIDE, BETWEEN)


def test_submeshes_are_powers_of_two_within_a_host_and_whole_hosts():
    assert [s.shape for s in MIXED.submeshes(0)] == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
    assert [s.shape for s in MIXED.submeshes(1)] == [(1, 1), (1, 2), (1, 4), (2, 4)]
    assert MIXED.submeshes() == (*MIXED.submeshes(0), *MIXED.submeshes(1))
    assert [s.num_devices for s in Cluster([Hosts(3, 6, "a100")]).submeshes()] == [1, 2, 4, 6, 12, 18]


def test_equal_groups_of_hosts_are_one_kind():
    cluster = Cluster([Hosts(2, 8, "a100"), Hosts(1, 8, "A100"), Hosts(1, 4, "a100")])
    assert [(hosts.name, hosts.count, hosts.devices) for hosts in cluster.kinds] == [
        ("A100-80GB", 3, 8),
        ("A100-80GB", 1, 4),
    ]
    assert cluster.num_devices == 28


def test_a_cluster_of_one_preset_has_the_links_of_the_preset():
    axes = {"data": 4, "model": 4}
    assert Cluster([Hosts(2, 8, "h100")]).hardware(0, axes) == preset("h100", axes)
    four = Cluster([Hosts(4, 4, "v100")]).hardware(0, axes)
    assert four == preset("v100", axes, devices_per_host=4)


def test_a_device_of_a_simulated_host_has_its_part_of_the_processor_in_every_submesh():
    cluster = Cluster([Hosts(1, 8, "cpu")])
    assert cluster.hardware(0, {"x": 2}).memory_bytes == preset("cpu", {"x": 8}).memory_bytes


def test_links_of_a_mesh_follow_from_the_links_inside_and_between_hosts():
    links = MIXED.hardware(1, {"data": 2, "model": 4}).links
    assert (links["model"].latency_s, links["model"].s_per_byte) == (3 * 1.0, 2.0)  # three steps of a ring
    assert links["data"].latency_s == 10.0
    assert links["data"].s_per_byte == pytest.approx(4 * 5.0)  # one of four groups that share the host's connection
    assert (links["data"].num_hosts, links["model"].num_hosts) == (2, 1)


def test_another_network_between_hosts_leaves_the_links_inside_as_they_are():
    axes = {"data": 2, "model": 8}
    for name in ("v100", "tpu_v5e", "cpu"):
        usual, slower = (Cluster([Hosts(2, 8, name)], between=b).hardware(0, axes) for b in (None, BETWEEN))
        assert slower.link("model").lines("all_reduce") == usual.link("model").lines("all_reduce")
        assert slower.link("data").s_per_byte == pytest.approx(8 * 5.0)


def test_submeshes_send_equal_parts_at_the_same_time():
    two, four = Submesh(0, 2, (1, 2)), Submesh(0, 4, (1, 4))
    assert MIXED.link_s(8.0, two, four) == 1.0 + 2.0 * 8 / 2  # two devices send all 8 bytes
    assert MIXED.link_s(8.0, four, two) == 1.0 + 2.0 * 8 / 2  # two devices receive them
    assert MIXED.link_s(8.0, two, four, in_one_host=False) == 10.0 + 5.0 * 8  # the host's connection is slower
    whole, both = Submesh(0, 8, (1, 8)), Submesh(0, 16, (2, 8))
    assert MIXED.link_s(8.0, whole, four) == 10.0 + 5.0 * 8  # they do not fit one host
    assert MIXED.link_s(8.0, both, Submesh(1, 8, (2, 4))) == 10.0 + 5.0 * 8 / 2  # two connections on both sides
    assert MIXED.link_s(8.0, both, Submesh(1, 4, (1, 4))) == 10.0 + 5.0 * 8


def test_devices_may_be_slower_than_the_network():
    cluster = Cluster([Hosts(2, 2, OWN)], inside=Link(0.0, 3.0), between=Link(0.0, 1.0))
    assert cluster.link_s(6.0, Submesh(0, 2, (1, 2)), Submesh(0, 1, (1, 1))) == 3.0 * 6


def test_devices_of_two_kinds_are_never_in_one_host():
    one, other = Submesh(0, 1, (1, 1)), Submesh(1, 1, (1, 1))
    assert MIXED.link_s(1.0, one, other) == 10.0 + 5.0
    with pytest.raises(ValueError, match="`in_one_host` is true, but no host has the devices of both"):
        MIXED.link_s(1.0, one, other, in_one_host=True)


class _Device:
    platform = "gpu"

    def __init__(self, kind, host):
        self.device_kind, self.process_index = kind, host


def test_devices_are_grouped_by_host_and_kind():
    devices = [_Device("NVIDIA A100-SXM4-80GB", i // 4) for i in range(8)] + [_Device("Tesla T4", 2) for _ in range(2)]
    cluster = Cluster.from_devices(devices, between=BETWEEN)
    assert [(hosts.name, hosts.count, hosts.devices) for hosts in cluster.kinds] == [
        ("A100-80GB", 2, 4),
        ("T4-16GB", 1, 2),
    ]
    assert cluster.devices == ((tuple(devices[:4]), tuple(devices[4:8])), (tuple(devices[8:]),))
    here = Cluster.from_devices(jax.devices())
    assert here.num_devices == len(jax.devices())
    assert here.hardware(0, {"x": 1}) == preset("cpu", {"x": 1}, devices_per_host=len(jax.devices()), hosts={"x": 1})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Hosts(0, 8, "a100"), ValueError, r"`Hosts\.count` must be a whole number, 1 or more, not 0"),
        (lambda: Hosts(1, 0, "a100"), ValueError, r"`Hosts\.devices` must be a whole number, 1 or more, not 0"),
        (lambda: Hosts(1, 1, "a1000"), ValueError, "`hardware` 'a1000' is unknown; there are v100, a100, t4"),
        (lambda: Hosts(1, 1, NO_HARDWARE), TypeError, r"`Hosts\.hardware` must be a Hardware or the name of a preset"),
        (lambda: Hosts(1, 1, "a100", NO_LINK), TypeError, r"`Hosts\.inside` must be a Link\(latency_s, s_per_byte\)"),
        (lambda: Cluster([]), ValueError, r"`Cluster\.hosts` is empty"),
        (lambda: Cluster([NO_LINK]), TypeError, r"`Cluster\.hosts` must be `Hosts\(count, "),
        (lambda: Cluster([Hosts(1, 1, "a100")], Link(0, 0, {}, 2)), ValueError, r"`Cluster\.inside` must be a Link of"),
        (
            lambda: Cluster([Hosts(1, 8, "a100", INSIDE), Hosts(1, 8, "a100", BETWEEN)]),
            ValueError,
            "disagree on the link inside of hosts of 8 x A100-80GB",
        ),
        (
            lambda: Cluster([Hosts(1, 8, "a100"), Hosts(1, 8, "v100")]),
            ValueError,
            r"`Cluster\.between` must be given: hosts of A100-80GB and V100-16GB have different networks",
        ),
        (lambda: Cluster([Hosts(1, 2, OWN)]), ValueError, r"`Cluster\.inside` must be given for own"),
        (lambda: Cluster([Hosts(2, 1, OWN)]), ValueError, r"`Cluster\.between` must be given for own"),
        (lambda: MIXED.hardware(2, {"x": 1}), ValueError, r"`kind` must be the index of a kind \(0: A100-80GB, 1"),
        (lambda: MIXED.hardware(0, {"x": 12}), ValueError, r"`shape` {'x': 12} has 12 devices, but the submeshes of"),
        (lambda: MIXED.hardware(0, {"x": -4, "y": -4}), ValueError, "`shape` must have a whole number of devices"),
        (lambda: MIXED.link_s(-1, *MIXED.submeshes()[:2]), ValueError, "`num_bytes` must be a number, zero or more"),
        (lambda: Cluster.from_devices([]), ValueError, "`devices` is empty"),
    ],
)
def test_what_breaks_a_rule_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ("cpu", TypeError, "must be JAX devices"),
        ([], ValueError, "`devices` is empty"),
        (jax.devices()[:1] * 2, ValueError, "has a device twice"),
    ],
)
def test_what_are_no_devices_is_refused(devices, error, message):
    with pytest.raises(error, match=message):
        Cluster.from_devices(devices, hardware="h100")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cpu", "here 2 of 2: such as"),
        (list(range(4)), "here 2 of 2: such as"),
        (((0, 1), (2, 3)), "here 2 of 2: such as"),  # hosts without their kind
        ((((0, 1),),), "here 2 of 2: such as"),  # a host is missing
        ((((0, 1), (2,)),), "here 2 of 2: such as"),  # a device is missing
        ((((0, 1), (0, 1)),), "has a device twice"),
    ],
)
def test_devices_are_as_many_as_the_hosts_have(devices, message):
    with pytest.raises(ValueError, match=r"`Cluster\.devices` .*" + message):
        Cluster([Hosts(2, 2, "h100")], devices=devices)
    assert Cluster([Hosts(2, 2, "h100")], devices=(((0, 1), (2, 3)),)).num_devices == 4
