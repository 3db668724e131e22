"""Functions as graphs: what is inlined, what stays a region, how often things run and from when to when they live."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.sharding.graph import Region, Value, Vertex
from search_spaces.sharding.tracing import feedback_of
from tests.search_spaces.sharding.small_spaces import EXAMPLES, array, branches, graph_of, loop_until, scan_of_layers


def names(graph):
    return [v.primitive for v in graph.operations()]


def named(graph, name):
    return [v for v in graph.operations() if v.primitive == name]


def shape(operand):
    assert isinstance(operand, Value)
    return operand.shape


def regions(block):
    found = [step for step in block.steps if isinstance(step, Region)]
    return found + [inner for region in found for b in region.blocks for inner in regions(b)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_vertex_knows_its_place(name):
    graph = graph_of(EXAMPLES[name][0], *EXAMPLES[name][1])
    assert [v.index for v in graph.vertices] == list(range(len(graph.vertices)))
    assert [v.id for v in graph.values] == list(range(len(graph.values)))
    for vertex in graph.vertices:
        assert len(vertex.operand_weight) == len(vertex.operands)
        for i, value in enumerate(vertex.results):
            assert (value.vertex, value.result) == (vertex.index, i)
    operations = list(graph.operations())
    assert sorted(v.position for v in operations) == [v.position for v in operations]


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_are_born_before_they_are_read_and_live_until_then(name):
    graph = graph_of(EXAMPLES[name][0], *EXAMPLES[name][1])
    for value, readers in zip(graph.values, graph.consumers(), strict=True):
        for reader, operand in readers:
            assert reader.operands[operand] is value
            if reader.kind == "operation":
                assert value.made_at <= reader.position <= value.last_read_at
    for output in graph.outputs:
        assert not isinstance(output, Value) or output.last_read_at == graph.length
    for vertex in (*graph.inputs, *graph.constants):
        assert vertex.results[0].made_at == -1


def test_lifetimes_by_hand():
    def fn(a, b):
        c = a @ b  # position 0
        d = jnp.sin(c)  # 1
        return d + a, c  # 2

    graph = graph_of(fn, array(4, 4), array(4, 4))
    assert names(graph) == ["dot_general", "sin", "add"]
    lives = {v.vertex: (v.made_at, v.last_read_at) for v in graph.values}
    assert lives == {0: (-1, 2), 1: (-1, 0), 2: (0, 3), 3: (1, 2), 4: (2, 3)}
    assert graph.length == 3


def test_calls_are_inlined():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, ()), lambda _, g: (2 * g,))

    @jax.custom_jvp
    def triple(x):
        return 3 * x

    triple.defjvp(lambda primals, tangents: (3 * primals[0], 3 * tangents[0]))
    graph = graph_of(lambda x: jax.jit(jax.jit(jnp.sin))(triple(double(x))), array(4))
    assert names(graph) == ["mul", "mul", "sin"]
    assert graph.block.steps == list(graph.operations())


def test_inlined_results_are_the_callers_values():
    graph = graph_of(lambda x: jax.jit(lambda y: (y, jnp.sin(y)))(x), array(4))
    assert graph.outputs[0] is graph.inputs[0].results[0]
    assert graph.outputs[1] is graph.vertices[1].results[0]


def test_captured_arrays_are_constants():
    table = jnp.arange(6.0)
    graph = graph_of(lambda x: x + table, array(6))
    (constant,) = graph.constants
    assert constant.kind == "constant"
    np.testing.assert_array_equal(graph.constant_arrays[0], table)


def test_a_scan_runs_its_body_once_for_each_trip():
    graph = graph_of(scan_of_layers, array(3, 8, 8), array(4, 8))
    (region,) = regions(graph.block)
    (carry,), (piece,) = region.carries, region.slices
    assert [v.weight for v in named(graph, "dot_general")] == [3]
    # The carry is entered once and left three times; inside it is read, outside it is the result.
    assert carry.operand_weight == [1, 3]
    assert [r.shape for r in carry.results] == [(4, 8), (4, 8)]
    assert region.results[0] is carry.results[1]
    assert named(graph, "dot_general")[0].operands[0] is carry.results[0]
    assert (piece.results[0].shape, piece.weight) == ((8, 8), 3)
    (stack,) = [v for v in graph.vertices if v.kind == "stack"]
    assert (stack.results[0].shape, shape(stack.operands[0]), stack.weight) == ((3, 8), (8,), 3)
    assert region.results[1] is stack.results[0]
    # What is stacked is there before the first trip ends.
    assert stack.results[0].made_at <= min(v.position for v in named(graph, "dot_general"))


def test_nested_loops_multiply_their_trips():
    def fn(x):
        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.fori_loop(0, 2, lambda _, d: jnp.sin(d), c), x)

    graph = graph_of(fn, array(4))
    assert [v.weight for v in named(graph, "sin")] == [10]
    assert len(regions(graph.block)) == 2


def test_what_a_body_reads_from_outside_lives_until_the_loop_ends():
    def fn(x, w):
        y = jax.lax.fori_loop(0, 3, lambda _, c: jnp.cos(jnp.sin(c @ w)), x)
        return y * 2

    graph = graph_of(fn, array(4, 4), array(4, 4))
    weights = graph.inputs[1].results[0]
    last = max(v.position for v in named(graph, "cos"))
    assert named(graph, "dot_general")[0].position < last < weights.last_read_at
    assert weights.last_read_at < named(graph, "mul")[-1].position + 1


def test_a_while_loop_has_a_condition_and_a_body_and_counts_as_one_trip():
    graph = graph_of(loop_until, array(4, 8), array(8, 8))
    (region,) = regions(graph.block)
    condition, body = region.blocks
    assert shape(condition.outputs[0]) == ()
    assert [v.primitive for v in body.steps if isinstance(v, Vertex)] == ["dot_general", "add"]
    (carry,) = region.carries
    assert carry.operands == [graph.inputs[0].results[0], body.outputs[0]]
    assert carry.weight == 1
    assert len(graph.notes) == 1


def test_branches_share_the_weight_and_join():
    graph = graph_of(branches, array(dtype=bool), array(4, 8), array(8, 8))
    (region,) = regions(graph.block)
    (join,) = [v for v in graph.vertices if v.kind == "join"]
    assert [v.weight for v in named(graph, "dot_general")] == [0.5]
    assert len(region.blocks) == len(join.operands) == 2
    assert join.operand_weight == [0.5, 0.5]
    assert join.results[0] is region.results[0]
    assert named(graph, "reduce_sum")[-1].operands[0] is join.results[0]


def test_remat_stays_a_region_whose_operations_are_vertices():
    fn, args = EXAMPLES["remat"]
    graph = graph_of(fn, *args)
    found = regions(graph.block)
    assert len(found) == 2
    for region in found:
        assert len(region.blocks) == 1
        inside = {id(step) for step in region.blocks[0].steps}
        assert inside
        assert inside <= {id(v) for v in graph.vertices}
        assert all(result in region.blocks[0].outputs for result in region.results)


def test_feedback_pairs_a_state_with_the_argument_it_replaces():
    state, batch = {"w": array(2, 3), "b": array(3)}, array(4, 2)
    assert feedback_of((state, array()), (state, batch)) == [0, 1, None]
    assert feedback_of((array(), state), (batch, state)) == [None, 1, 2]


def test_feedback_finds_parts_of_a_result_and_uses_an_argument_once():
    first, second = array(2, 3), array(2, 3)
    assert feedback_of((first, second), (first, second)) == [0, 1]
    assert feedback_of((first, second), (first,)) == [0, None]
    assert feedback_of(((first,), [second]), (first, [second])) == [0, 1]


def test_feedback_needs_equal_shapes_types_and_structures():
    assert feedback_of(array(2, 3), (array(3, 2),)) == [None]
    assert feedback_of(array(2, dtype=jnp.int32), (array(2),)) == [None]
    assert feedback_of({"a": array(2)}, ({"b": array(2)},)) == [None]
    assert feedback_of((), (array(2),)) == []


def test_bytes_of_values():
    graph = graph_of(lambda x: x.astype(jnp.bfloat16), array(3, 5))
    assert [v.num_bytes for v in graph.values] == [60, 30]


def test_operations_know_where_they_come_from():
    def fn(x):
        with jax.named_scope("layer"):
            return jnp.sin(x)

    (vertex,) = graph_of(fn, array(3)).operations()
    assert "test_graph.py" in vertex.source
    assert vertex.scope == "layer"


def test_operations_inside_a_body_have_the_names_around_it():
    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            return jax.jit(jnp.sin)(x)

    def fn(x):
        with jax.named_scope("outer"):
            return jax.lax.scan(lambda x, _: (block(x), None), x, length=2)[0]

    (vertex,) = (v for v in graph_of(fn, array(3)).operations() if v.primitive == "sin")
    assert vertex.scope.startswith("outer/")
    assert vertex.scope.endswith("/block") or "/block/" in vertex.scope
