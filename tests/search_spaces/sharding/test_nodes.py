"""What vertices of each kind may choose from, and what is left out on meshes of many axes."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Hardware, Link
from search_spaces.sharding.graph import Value
from search_spaces.sharding.nodes import MOST_STRATEGIES
from search_spaces.sharding.reshard_costs import ReshardCosts
from search_spaces.sharding.spec import axes_in, shards, specs_of_shape
from search_spaces.sharding.strategies import in_order, interchangeable_axes, kinds_of_dimensions
from tests.search_spaces.sharding.small_spaces import array, graph_of, mlp_arguments, mlp_step, scan_of_layers, space_of


def equal_links(names, s_per_byte=1e-9):
    return Hardware("equal", 1e12, 1e12, float("inf"), dict.fromkeys(names, Link(1e-6, s_per_byte)))


def strategies(space, kind):
    return [n.strategies for n in space.nodes if n.shared_value is None and n.vertex.kind == kind]


def test_an_argument_with_one_reader_has_its_specs():
    space = space_of(lambda x: jnp.sin(x), array(4, 6))
    found = strategies(space, "input")[0]
    assert [s.unreduced[0] for s in found] == list(specs_of_shape((4, 6), (2, 2)))
    assert all(s.results == s.unreduced and s.reductions == ((),) for s in found)


def test_an_argument_with_several_readers_may_be_gathered_once_for_all():
    space = space_of(lambda x: (jnp.sin(x), jnp.cos(x)), array(4), sizes=(2, 2))
    found = {(s.unreduced[0], s.results[0]): s for s in strategies(space, "input")[0]}
    assert set(found) == {
        (((),), ((),)),
        (((0,),), ((0,),)),
        (((0,),), ((),)),
        (((1,),), ((1,),)),
        (((1,),), ((),)),
        (((0, 1),), ((0, 1),)),
        (((0, 1),), ((0,),)),
        (((0, 1),), ((1,),)),
        (((0, 1),), ((),)),
    }
    gathered = found[((0, 1),), ((),)]
    assert {m.kind for m in gathered.reductions[0]} == {"all_gather"}
    assert gathered.parts == 4


def test_loops_stack_and_slice_along_their_whole_first_dimension():
    space = space_of(scan_of_layers, array(2, 8, 8), array(4, 8))
    for found in strategies(space, "slice"):
        assert {s.operands[0] for s in found} == {((), *s) for s in specs_of_shape((8, 8), (2, 2))}
        assert all(s.operands[0][1:] == s.unreduced[0] for s in found)
    for found in strategies(space, "stack"):
        assert [(s.operands[0], s.results[0]) for s in found] == [
            ((s,), ((), s)) for (s,) in specs_of_shape((8,), (2, 2))
        ]
    for found in strategies(space, "carry"):
        for s in found:
            assert s.operands == (s.unreduced[0],) * 2
            assert s.results[1] == s.unreduced[0]
            assert axes_in(s.results[0]) <= axes_in(s.unreduced[0])


def test_branches_meet_in_one_spec():
    space = space_of(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), array(dtype=bool), array(4, 8))
    (found,) = strategies(space, "join")
    assert [s.operands for s in found] == [(s, s) for s in specs_of_shape((4, 8), (2, 2))]


def test_dimensions_are_of_one_kind_where_operations_say_so():
    def fn(x, w, v):  # [B, L, M], [M, H], [H, M]
        h = jnp.sin(x @ w)
        return (h @ v + x).transpose(1, 0, 2)

    graph = graph_of(fn, array(2, 3, 4), array(4, 5), array(5, 4))
    kinds = kinds_of_dimensions(graph, space_of(fn, array(2, 3, 4), array(4, 5), array(5, 4)).rules)
    b, length, m = kinds[0]
    m_too, h = kinds[1]
    assert (m, h, m) == (m_too, *kinds[2])
    assert len({b, length, m, h}) == 4
    (turned,) = graph.outputs
    assert isinstance(turned, Value)
    assert kinds[turned.id] == (length, b, m)


def test_stacked_layers_are_of_the_kinds_of_their_slices():
    args = array(2, 8, 8), array(4, 8)
    space = space_of(scan_of_layers, *args)
    kinds = kinds_of_dimensions(space.graph, space.rules)
    (piece,) = [v for v in space.graph.vertices if v.kind == "slice"]
    assert kinds[piece.results[0].id] == kinds[space.graph.inputs[0].results[0].id][1:]


def test_data_that_comes_in_with_each_call_is_of_the_first_kind():
    space = space_of(mlp_step, *mlp_arguments())
    kinds = kinds_of_dimensions(space.graph, space.rules)
    x = space.graph.inputs[4].results[0]
    assert kinds[x.id][0] < min(kind for kinds_ in kinds[:4] for kind in kinds_ if kind not in kinds[x.id])


def test_axes_of_equal_size_and_link_are_interchangeable_from_three_on():
    def interchangeable(sizes, speeds, fixed=()):
        names = "xyzw"[: len(sizes)]
        links = {n: Link(0.0, s) for n, s in zip(names, speeds, strict=True)}
        rates = ReshardCosts(names, sizes, Hardware("some", 1.0, 1.0, 1.0, links)).rates
        return interchangeable_axes(sizes, rates, frozenset(fixed)).interchangeable

    assert interchangeable((2, 2), (1, 1)) == ()
    assert interchangeable((2, 2, 2), (1, 1, 1)) == ((0, 1, 2),)
    assert interchangeable((2, 2, 2), (1, 2, 1)) == ((0, 2),)
    assert interchangeable((2, 4, 2), (1, 1, 1)) == ((0, 2),)
    assert interchangeable((2, 2, 2), (1, 2, 3)) == ()
    assert interchangeable((2, 2, 2), (1, 1, 1), fixed=[1]) == ((0, 2),)
    assert interchangeable((2, 2, 2, 2), (1, 4, 2, 3)) == ((1, 3, 2, 0),)
    assert interchangeable((2, 1, 2), (1, 1, 1)) == ()


def test_the_fastest_link_comes_first_and_of_equal_ones_the_last_axis():
    links = {n: Link(0.0, s) for n, s in zip("xyz", (2.0, 1.0, 2.0), strict=True)}
    rates = ReshardCosts("xyz", (2, 2, 2), Hardware("some", 1.0, 1.0, 1.0, links)).rates
    assert interchangeable_axes((2, 2, 2), rates, frozenset()).fast_first == (1, 2, 0)


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (((0,), (1,), (2,)), True),
        (((1,), (0,), ()), False),
        (((0, 1), (), (2,)), True),
        (((0, 2), (1,), ()), False),  # not neighbours
        (((), (1, 2), (0,)), False),
        (((2,), (), ()), True),
        (((1,), (0,)), True),  # a matrix may be either way
        (((0, 2), ()), False),
    ],
)
def test_like_axes_take_kinds_in_order(spec, kept):
    assert in_order(spec, tuple(range(len(spec))), ((0, 1, 2),)) is kept


def test_of_every_plan_with_like_axes_swapped_one_is_kept():
    """Each assignment of whole groups of axes to kinds of dimension has a copy, by swapping axes, that is in order."""

    def swapped(spec, order):
        return tuple(tuple(sorted(order[a] for a in axes)) for axes in spec)

    for spec in specs_of_shape((8, 8, 8), (2, 2, 2)):
        copies = {swapped(spec, order) for order in permutations(range(3))}
        assert any(in_order(copy, (0, 1, 2), ((0, 1, 2),)) for copy in copies)


def test_many_axes_leave_out_copies_but_never_the_whole_or_the_most_parallel():
    def fn(x, w):
        return jnp.einsum("blm,mhd->blhd", x, w)

    args = array(16, 16, 16), array(16, 16, 16)
    for sizes in ((2, 2, 2), (2, 2, 2, 2)):
        hardware = equal_links("xyzw"[: len(sizes)])
        space = space_of(fn, *args, sizes=sizes, hardware=hardware)
        for node in space.nodes:
            assert 0 < len(node.strategies) <= MOST_STRATEGIES
            specs = {s.results[0] for s in node.strategies}
            assert ((),) * len(next(iter(specs))) in specs
            for d in range(len(next(iter(specs)))):
                all_axes = tuple(range(len(sizes)))
                assert any(spec[d] == all_axes for spec in specs)
            assert max(s.parts for s in node.strategies) == np.prod(sizes)


def test_given_specs_keep_axes_apart():
    """A user who names an axis gets it, though like axes would be taken in another order."""

    def fn(x):
        return jnp.sin(x) * 2

    space = space_of(fn, array(8, 8, 8), sizes=(2, 2, 2), hardware=equal_links("xyz"), given={0: [(2,), (1,), (0,)]})
    assert [s.unreduced[0] for s in space.nodes[0].strategies] == [((2,), (1,), (0,))]
    for node in space.nodes:
        assert ((2,), (1,), (0,)) in {s.results[0] for s in node.strategies}


def test_a_sharding_constraint_is_the_only_strategy():
    mesh = jax.make_mesh((2, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED, "y")

    def fn(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), jax.sharding.NamedSharding(mesh, spec)) * 2

    space = space_of(fn, array(4, 8))
    (constrained,) = [n for n in space.nodes if n.vertex.primitive == "sharding_constraint"]
    assert {s.results[0] for s in constrained.strategies} == {((), (1,)), ((0,), (1,))}


def test_a_shard_map_keeps_its_own_specs():
    mesh = jax.make_mesh((2, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x", None)

    def fn(x):
        return jax.shard_map(lambda part: part * 2, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    space = space_of(fn, array(4, 8))
    (manual,) = [n for n in space.nodes if n.vertex.primitive == "shard_map"]
    (strategy,) = manual.strategies
    assert strategy.operands == strategy.results == (((0,), ()),)
    assert shards(strategy.results[0], (2, 2)) == 2
