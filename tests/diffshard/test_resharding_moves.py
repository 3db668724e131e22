"""What moves between shardings send, against every element counted by hand and by JAX's own maps of devices."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from cost.base import Link
from diffshard.resharding import Devices, move_s, moved_bytes
from search_spaces.partition_specs import named_spec, partition_spec
from search_spaces.sharding.spec import specs_of_shape

NAMES = ("x", "y")


def mesh_of(ids, axis_sizes):
    return Mesh(np.array([jax.devices()[i] for i in ids]).reshape(axis_sizes), NAMES)


def counted(shape, before, after):
    """Counts the bytes that each device sends and receives, element by element, from JAX's maps of devices."""
    (devices, spec), (new_devices, new_spec) = before, after

    def held(devices, spec):
        sharding = NamedSharding(mesh_of(devices.ids, devices.axis_sizes), partition_spec(named_spec(spec, NAMES)))
        whole = np.arange(math.prod(shape)).reshape(shape)
        parts = sharding.devices_indices_map(shape)
        return {device.id: set(whole[index].ravel().tolist()) for device, index in parts.items()}

    old, new = held(devices, spec), held(new_devices, new_spec)
    sent, received = dict.fromkeys(devices.ids, 0.0), dict.fromkeys(new_devices.ids, 0.0)
    for device, elements in new.items():
        for element in elements - old.get(device, set()):
            holders = [other for other, own in old.items() if element in own]
            received[device] += 4
            for holder in holders:
                sent[holder] += 4 / len(holders)
    return [sent[i] for i in devices.ids], [received[i] for i in new_devices.ids]


@pytest.mark.parametrize(
    ("devices", "new_devices"),
    [
        (Devices((0, 1, 2, 3, 4, 5, 6, 7), (2, 4)), Devices((0, 1, 2, 3), (1, 4))),
        (Devices((0, 1, 2, 3), (2, 2)), Devices((0, 1, 2, 3, 4, 5, 6, 7), (4, 2))),
        (Devices((3, 2, 1, 0), (2, 2)), Devices((2, 3, 4, 5), (1, 4))),  # some leave and others come
        (Devices((0,), (1, 1)), Devices((1, 0), (2, 1))),
    ],
)
def test_moved_bytes_are_those_of_every_element_counted(devices, new_devices):
    shape = (8, 16)
    specs = [specs_of_shape(shape, d.axis_sizes, with_padding=False) for d in (devices, new_devices)]
    assert len(specs[0]) * len(specs[1]) >= 3
    for spec, new_spec in itertools.product(*specs):
        before, after = (devices, spec), (new_devices, new_spec)
        moved = moved_bytes(shape, 4 * math.prod(shape), before, after)
        sent, received = counted(shape, before, after)
        np.testing.assert_allclose(moved.sent, sent, err_msg=str((spec, new_spec)))
        np.testing.assert_allclose(moved.received, received, err_msg=str((spec, new_spec)))


def test_scalars_and_empty_arrays_move_too():
    one, two = Devices((0,), (1, 1)), Devices((0, 1), (2, 1))
    moved = moved_bytes((), 4, (one, ()), (two, ()))
    assert (moved.sent.tolist(), moved.received.tolist()) == ([4], [0, 4])
    assert moved_bytes((0, 8), 0, (one, ((), ())), (two, ((), ()))).received.tolist() == [0, 0]


def test_a_move_takes_as_long_as_its_busiest_device_on_the_slowest_link():
    one, two = Devices((0,), (1, 1)), Devices((0, 1, 2), (3, 1))
    moved = moved_bytes((6,), 24, (one, ((),)), (two, ((0,),)))
    assert (moved.sent.tolist(), moved.received.tolist()) == ([16], [0, 8, 8])
    links = Link(1.0, 1e-3), Link(2.0, 1e-1)
    assert move_s(moved, links) == pytest.approx(2 + 1.6)
    assert move_s(moved, links, latency_share=0.25) == pytest.approx(0.5 + 1.6)


def test_nothing_moves_where_every_device_keeps_its_part():
    devices = Devices((0, 1, 2, 3), (2, 2))
    moved = moved_bytes((8, 8), 256, (devices, ((), ())), (Devices((1, 3), (1, 2)), ((1,), ())))
    assert moved.sent.sum() == moved.received.sum() == 0
    assert move_s(moved, ()) == 0
