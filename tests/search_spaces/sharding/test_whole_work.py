"""What is left whole because it cannot be split, number by number; what the search leaves whole is not counted."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from cost.base import Hardware
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.whole_work import UnevenDimension, whole_work
from tests.search_spaces.sharding.small_spaces import array, graph_of, hardware_of

FAST = Hardware("arithmetic only", 1e6, float("inf"), float("inf"), hardware_of("xy").links)
"""A flop takes a microsecond, memory and launches nothing."""


def space_of(fn, *args, sizes=(2, 4), hardware=FAST, loaded=(1,)):
    graph = graph_of(fn, *args)
    flags = (False,) * len(graph.inputs)
    return ShardingSpace(graph, ("x", "y"), sizes, hardware, {}, flags, loaded=frozenset(loaded))


def product(weights, rows):
    return weights + (rows @ weights).sum()


def work_of(space, wanted):
    """What is whole in the layout in which each operation has the first strategy that a function wants, or replicates.

    `wanted` takes a vertex and a strategy.
    """
    choice = [
        next(
            (
                s
                for s, strategy in enumerate(node.strategies)
                if node.shared_value is None and wanted(node.vertex, strategy)
            ),
            0,
        )
        for node in space.nodes
    ]
    strategies = space.layout(choice).strategies
    return whole_work(space.graph, space.rules, space.nodes, strategies, space.node_costs, space.loaded)


def replicated(vertex, strategy):
    del vertex
    return strategy.parts == 1


def rows_over_y(vertex, strategy):
    return vertex.primitive == "dot_general" and strategy.parts == 4 and strategy.operands[0] == ((1,), ())


def test_rows_that_axes_do_not_divide_lose_what_padded_rows_would_save():
    space = space_of(product, array(16, 8), array(100, 16))
    (work,) = work_of(space, rows_over_y)
    seconds = 2 * 100 * 16 * 8 * 1e-6
    assert work.uneven == UnevenDimension(100, 8, (0, 1), ((1, 0),))
    names = {space.graph.vertices[i].primitive for i in work.vertices}
    assert names == {"dot_general", "reduce_sum"}
    sums = 100 * 8 * 1e-6  # replicated here; but four devices divide 100, and the search could have split it over them
    # Over y each device takes a quarter of the time; padded to 104 rows, 104/100 of an eighth.
    assert work.seconds == pytest.approx((seconds + sums) * (1 / 4 - 1.04 / 8), rel=0.01)


def test_what_the_search_leaves_whole_is_not_counted():
    assert work_of(space_of(product, array(16, 8), array(96, 16)), replicated) == []
    # Without examples any dimension that divides is enough: here the width of 16 does.
    assert work_of(space_of(product, array(16, 8), array(99, 16), loaded=()), replicated) == []
    found = work_of(space_of(product, array(7, 9), array(99, 7), loaded=()), replicated)
    # The search could have padded 99 rows to 100 over y, so that 7 and 9 lose more.
    assert {work.uneven.size for work in found if work.uneven is not None} == {7, 9}


def test_a_launch_is_no_work_that_could_be_shared():
    hardware = replace(FAST, kernel_launch_s=1.0)
    assert work_of(space_of(product, array(16, 8), array(99, 16), hardware=hardware), replicated) == []


def test_operations_that_nothing_splits_lose_all_but_a_share():
    def ranked(weights, x):
        return weights + jnp.sort(x).sum()

    hardware = replace(FAST, memory_bytes_per_s=1e6)
    space = space_of(ranked, array(8), array(4096), hardware=hardware)
    (work,) = work_of(space, replicated)
    (vertex,) = (space.graph.vertices[i] for i in work.vertices)
    assert vertex.primitive == "sort"
    assert work.uneven is None
    sort_s = space.node_costs.chosen_compute_s(vertex, space.nodes[vertex.index].strategies[0])
    assert work.seconds == pytest.approx(sort_s * 7 / 8)


def test_one_device_repeats_nothing():
    assert work_of(space_of(product, array(16, 8), array(99, 16), sizes=(1, 1)), replicated) == []


def test_parts_of_weights_that_are_read_whole_are_no_loss():
    # With three rows the weights' bytes count, which splitting the rows would not lessen.
    hardware = replace(FAST, flops_per_s=1e15, memory_bytes_per_s=1e6)
    space = space_of(product, array(512, 512), array(3, 512), hardware=hardware)
    (matmul,) = (vertex for vertex in space.graph.vertices if vertex.primitive == "dot_general")
    whole_s = space.node_costs.chosen_compute_s(matmul, space.nodes[matmul.index].strategies[0])
    assert sum(work.seconds for work in work_of(space, replicated)) < 0.05 * whole_s
