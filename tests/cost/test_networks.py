"""Links of networks beside a count of what crosses each cable."""

import itertools
import math

import pytest

from cost.networks import SwitchedHost, TorusPod, links_of

POD = TorusPod(
    num_devices=64, wrap=4, link_bytes_per_s=50.0, network_bytes_per_s=5.0, launch_s=1.0, hop_s=0.25, network_hop_s=8.0
)
HOST = SwitchedHost(
    num_devices=8, device_bytes_per_s=100.0, network_bytes_per_s=40.0, launch_s=1.0, hop_s=0.25, network_hop_s=8.0
)


def busiest_cable(size: int, *, is_ring: bool) -> float:
    """Returns how many blocks the busiest cable carries one way if each chip sends each other one the shortest way."""
    carried: dict[tuple[int, int], float] = dict.fromkeys(itertools.product(range(size), (1, -1)), 0.0)
    for source, target in itertools.permutations(range(size), 2):
        forward = (target - source) % size
        if is_ring:  # blocks that are as far both ways are halved
            ways = [(1, forward)] * (forward <= size / 2) + [(-1, size - forward)] * (forward >= size / 2)
        else:
            ways = [(1, target - source) if target > source else (-1, source - target)]
        for direction, hops in ways:
            for hop in range(hops):
                carried[(source + direction * hop) % size, direction] += 1 / len(ways)
    return max(carried.values())


@pytest.mark.parametrize("size", [2, 4, 6, 8, 12, 16])
def test_an_exchange_in_a_torus_takes_as_long_as_its_busiest_cable(size):
    is_ring = size % POD.wrap == 0
    link = POD.link(size, 1)
    whole_bytes = 1000.0 * size**2  # blocks of 1,000 bytes
    seconds = busiest_cable(size, is_ring=is_ring) * 1000.0 / POD.link_bytes_per_s
    (line,) = link.lines("all_to_all")
    # An all-to-all sends (n - 1) / n² of the bytes of all devices' operands together.
    assert line.s_per_byte * whole_bytes * (size - 1) / size**2 == pytest.approx(seconds)
    assert line.latency_s == link.latency_s == POD.launch_s + POD.hop_s * (size // 2 if is_ring else size - 1)
    assert 1 / link.s_per_byte == POD.link_bytes_per_s * (2 if is_ring else 1)


@pytest.mark.parametrize(("size", "stride", "num_hosts"), [(128, 1, None), (2, 64, None), (4, 32, None), (4, 1, 2)])
def test_an_axis_across_pods_goes_over_the_network(size, stride, num_hosts):
    link = POD.link(size, stride, num_hosts)
    assert 1 / link.s_per_byte == POD.network_bytes_per_s
    assert link.latency_s == POD.launch_s + (size - 1) * POD.network_hop_s
    inside = POD.link(64 // stride, stride)
    assert 1 / inside.s_per_byte >= POD.link_bytes_per_s


@pytest.mark.parametrize(
    ("size", "stride", "num_hosts", "members"),
    [(8, 1, None, 8), (16, 1, None, 8), (4, 4, None, 2), (2, 8, None, 1), (4, 16, None, 1), (4, 1, 2, 2), (3, 1, 2, 2)],
)
def test_an_axis_across_hosts_shares_their_network(size, stride, num_hosts, members):
    hosts = math.ceil(size / members)
    link = HOST.link(size, stride, num_hosts)
    hops = (size - hosts) * HOST.hop_s + (hosts - 1) * HOST.network_hop_s
    assert link.latency_s == HOST.launch_s + hops
    # Of the 8 rings (or what belongs to 8 devices) that leave a host, this one has as many as it has members there.
    rate = HOST.network_bytes_per_s * members / 8 if hosts > 1 else HOST.device_bytes_per_s
    assert 1 / link.s_per_byte == pytest.approx(rate)
    (line,) = link.by_kind["all_to_all"]
    share = HOST.network_bytes_per_s / 8 if hosts > 1 else HOST.device_bytes_per_s
    assert 1 / line.s_per_byte == pytest.approx(share)


def test_the_last_axis_of_a_mesh_has_neighbours_in_the_host():
    found = links_of(HOST, {"data": 4, "model": 4})
    assert list(found) == ["data", "model"]
    assert found == {"data": HOST.link(4, 4), "model": HOST.link(4, 1)}
    known = links_of(HOST, {"data": 4, "model": 4}, {"data": 1, "model": 4})
    assert known == {"data": HOST.link(4, 4, 1), "model": HOST.link(4, 1, 4)}
