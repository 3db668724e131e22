"""The collectives of a `shard_map`'s body: their bytes by hand, their place in a plan's time, and their gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from search_spaces.sharding.own_collectives import MappedCollectives, stating_seconds
from tests.search_spaces.sharding.small_spaces import array, hardware_of, space_of

NAMES, SIZES = ("x", "y"), (2, 4)
BLOCK_BYTES = 16 * 8 * 4
SLOWEST_IS_X = MappedCollectives(NAMES, SIZES, lambda axis, num_bytes: num_bytes / (axis + 1))


def mapped(body):
    """A `shard_map` of blocks `[16, 8]` on a mesh of 2 x 4 devices."""
    mesh = AbstractMesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * len(NAMES))
    return jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)


def sent(body):
    """What a body sends, as kind, axis, blocks of bytes, and count."""
    (equation,) = jax.make_jaxpr(mapped(body))(array(32, 32)).eqns
    return [(c.kind, NAMES[c.axis], c.num_bytes / BLOCK_BYTES, c.count) for c in SLOWEST_IS_X.of(equation)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda b: lax.psum(b, "y"), [("all_reduce", "y", 1.0, 1)]),
        (lambda b: b + lax.pmax(b.sum(), "x"), [("all_reduce", "x", 1 / 128, 1)]),
        (lambda b: lax.psum(b, ("x", "y")), [("all_reduce", "x", 1.0, 1), ("all_reduce", "y", 1.0, 1)]),
        (lambda b: lax.all_gather(b, "y").sum(0), [("all_gather", "y", 4.0, 1)]),
        # The gathers along y come first, and the one along x sends what they have gathered.
        (lambda b: lax.all_gather(b, NAMES).sum(0), [("all_gather", "y", 4.0, 1), ("all_gather", "x", 8.0, 1)]),
        (lambda b: lax.psum_scatter(b, "y", tiled=True), [("reduce_scatter", "y", 1.0, 1)]),
        (lambda b: lax.all_to_all(b, "y", 0, 0, tiled=True), [("all_to_all", "y", 4.0, 1)]),
        # In groups of two a device sends 1/2 of its block, and 3/4 of it along the whole axis: 4 · (1/2) / (3/4).
        (
            lambda b: lax.all_to_all(b, "y", 0, 0, axis_index_groups=[[0, 1], [2, 3]], tiled=True),
            [("all_to_all", "y", pytest.approx(8 / 3), 1)],
        ),
        (lambda b: lax.ppermute(b, "y", [(0, 1)]), [("collective_permute", "y", 1.0, 1)]),
        (lambda b: lax.ppermute(b, NAMES, [(0, 1), (4, 6)]), [("collective_permute", "y", 1.0, 1)]),
        (lambda b: lax.ppermute(b, NAMES, [(0, 4), (1, 2)]), [("collective_permute", "x", 1.0, 1)]),
        (lambda b: lax.ppermute(b, "y", [(0, 0), (1, 1)]), []),
        (
            lambda b: lax.fori_loop(0, 3, lambda i, c: lax.ppermute(c, "x", [(0, 1), (1, 0)]), b),
            [("collective_permute", "x", 1.0, 3)],
        ),
        (
            lambda b: lax.cond(b[0, 0] > 0, lambda b: b + lax.psum(b.sum(), "y"), lambda b: lax.psum(b, "y"), b),
            [("all_reduce", "y", 1.0, 1)],
        ),
        (jax.jit(lambda b: lax.psum(b, "x") + lax.psum(b, "x")), [("all_reduce", "x", 1.0, 2)]),
        (jax.vmap(lambda row: lax.psum(row, ("y", "rows")), axis_name="rows"), [("all_reduce", "y", 1 / 16, 1)]),
        (jnp.sin, []),
    ],
)
def test_a_body_says_what_each_device_sends(body, expected):
    assert sent(body) == expected


def test_other_operations_send_nothing_here():
    (equation,) = jax.make_jaxpr(jnp.sin)(array(4)).eqns
    assert SLOWEST_IS_X.of(equation) == ()


def test_a_plan_counts_the_seconds_of_both_passes_and_lists_what_is_sent():
    exchange = mapped(lambda b: lax.all_to_all(b, "y", 0, 0, tiled=True))
    plain = mapped(lambda b: jnp.sin(b))

    def loss(layer, x):
        return (x * layer(x)).sum()

    hardware = hardware_of(NAMES)
    seconds, listed = [], []
    for layer in (plain, exchange):
        space = space_of(jax.grad(lambda x, layer=layer: loss(layer, x)), array(32, 32), sizes=SIZES, hardware=hardware)
        vertices = [(n.vertex, n) for n in space.nodes if n.shared_value is None and n.vertex.primitive == "shard_map"]
        own = [space.node_costs.own_collectives(v, n.strategies[0]) for v, n in vertices]
        seconds.append([sum(c.exposed_s for c in cs) for cs in own])
        listed.append([c.collective.kind for cs in own for c in cs])
        for (_, node), alone_s in zip(vertices, seconds[-1], strict=True):
            assert space.node_costs.node_s(node)[0] > alone_s
    assert listed == [[], ["all_to_all", "all_to_all"]]
    # Each device sends 3/4 of its block along y, a link of half a nanosecond for each byte.
    assert seconds[1] == [pytest.approx(1e-6 + 0.75 * BLOCK_BYTES * 0.5e-9)] * 2


def test_a_body_that_states_its_seconds_has_its_collectives_in_them():
    layer = mapped(lambda b: stating_seconds(lax.psum(b, "y"), 1e-3))
    space = space_of(layer, array(32, 32), sizes=SIZES, hardware=hardware_of(NAMES))
    (node,) = [n for n in space.nodes if n.shared_value is None and n.vertex.primitive == "shard_map"]
    assert space.node_costs.own_collectives(node.vertex, node.strategies[0]) == []
    assert space.node_costs.node_s(node) == pytest.approx([1e-3])
