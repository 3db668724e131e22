"""Copies to the host's memory and back follow one another on the link, and end before what they are for begins."""

import itertools

import numpy as np
import pytest

from search_spaces.rematerialisation.choices import Network
from search_spaces.rematerialisation.offloading import HostLink, offloadable, offloading
from search_spaces.rematerialisation.passes import passes_of, step_key
from tests.search_spaces.rematerialisation.differentiated_steps import STEPS, arguments, graph_of


def case(seed, name="layers"):
    """Returns a network with random seconds, its passes, and the choice that keeps everything."""
    graph, rng = graph_of(STEPS[name], arguments()), np.random.default_rng(seed)
    seconds = rng.uniform(1, 10, len(graph.vertices))
    passes = passes_of(graph)
    network = Network(graph, passes, lambda v: seconds[v.index], lambda v: float(v.num_bytes), lambda v: True)
    return network, passes, network.cheapest(0.0)


def seconds_of(network, steps):
    return [network.step_s(step) for step in steps]  # the steps of these layers are single operations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("s_per_byte", [1e-4, 2e-3, 0.02])
def test_the_link_copies_one_array_after_the_other_beside_the_steps(seed, s_per_byte):
    network, (passes,), choice = case(seed)
    found = offloading(network, [passes], choice, HostLink(s_per_byte, 0.25), 0.8)
    assert found is not None
    made_at = {v.id: i for i, step in enumerate(passes.forward) for v in step.results}
    place = {step_key(step): i for i, step in enumerate((*passes.forward, *passes.backward))}
    forward_s, backward_s = (seconds_of(network, steps) for steps in (passes.forward, passes.backward))
    begins = np.cumsum([0.0, *forward_s, *backward_s])  # of all steps, without any wait
    first_read = {}
    for i, step in enumerate(passes.backward):
        for operand in step.operands:
            first_read.setdefault(getattr(operand, "id", None), len(passes.forward) + i)
    gone, back = ({o[0]: place[o[i]] for o in found.offloaded} for i in (1, 2))
    free_s = 0.0
    for value in sorted(gone, key=made_at.__getitem__):
        free_s = max(free_s, begins[made_at[value] + 1]) + s_per_byte * network.bytes[value]
        possible = [i for i in range(made_at[value] + 1, len(passes.forward)) if begins[i] >= free_s]
        assert gone[value] == min(possible, default=len(passes.forward))
    free_s = np.inf
    for value in sorted(back, key=lambda v: -first_read[v]):
        free_s = min(free_s, begins[first_read[value]]) - s_per_byte * network.bytes[value]
        possible = [i for i in range(len(passes.forward), first_read[value] + 1) if begins[i] <= free_s]
        assert back[value] == max(possible, default=len(passes.forward))


@pytest.mark.parametrize("seed", range(3))
def test_as_much_is_offloaded_as_the_link_copies_in_a_share_of_the_forward_pass(seed):
    network, (passes,), choice = case(seed)
    forward_s = sum(seconds_of(network, passes.forward))
    made_at = {v.id: i for i, step in enumerate(passes.forward) for v in step.results}
    could = offloadable(network, [passes])
    large = [v for v in could & choice.kept if network.bytes[v] >= 0.01 * choice.kept_bytes]
    order = sorted(large, key=lambda v: (made_at[v], v))
    assert len(order) > 5
    for share, part in itertools.product((0.3, 1.0), (0.2, 0.6, 2.0)):
        s_per_byte = part * forward_s / sum(network.bytes[v] for v in order)
        found = offloading(network, [passes], choice, HostLink(s_per_byte, 0.25), share)
        copied_s = s_per_byte * np.cumsum([network.bytes[v] for v in order])
        expected = order[: int(np.searchsorted(copied_s, share * forward_s, side="right"))]
        if not expected:
            assert found is None
            continue
        assert found is not None
        assert [o[0] for o in found.offloaded] == sorted(expected)
        assert found.kept == choice.kept - set(expected)
        num_bytes = sum(network.bytes[v] for v in expected)
        assert (found.host_bytes, found.kept_bytes) == (num_bytes, choice.kept_bytes - num_bytes)
        assert found.seconds == pytest.approx(choice.seconds + 2 * 0.25 * s_per_byte * num_bytes)


def test_of_a_scan_the_largest_arrays_of_all_trips_go_first_without_places():
    network, passes, choice = case(0, "scan")
    (pair,) = (one for one in passes if one.pair is not None)
    assert pair.pair is not None
    carried = {carry.results[0].id for carry in pair.pair.forward.carries}
    in_body = {v.id for step in pair.forward for v in step.results} | carried
    could = sorted(offloadable(network, [pair]) & choice.kept, key=lambda v: -network.bytes[v])
    assert set(could) <= in_body
    assert carried & set(could)  # the input of each layer
    total = sum(network.bytes[v] for v in could)
    forward_s = sum(seconds_of(network, pair.forward))
    half = HostLink(0.5 * forward_s / total, 0.1)
    found = offloading(network, [pair], choice, half, 0.5)
    assert found is not None
    assert all(o[1:] == (0, 0) for o in found.offloaded)
    sizes = sorted(network.bytes[o[0]] for o in found.offloaded)
    assert sizes == sorted(network.bytes[v] for v in could[: len(sizes)])
    assert 0 < len(sizes) < len(could) or sum(sizes) == total
