"""JAX's `custom_partitioning` is split by its own rule and runs what its own `partition` returns."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tests.search_spaces.sharding.custom_calls.layouts import check_layout, split_dimensions, strategies_of
from tests.search_spaces.sharding.small_spaces import array


def shardings_of(shapes):
    return jax.tree.map(lambda x: x.sharding, shapes)


def as_it_is(fn):
    """A `partition` that runs a function on any parts."""
    return lambda mesh, arguments, result: (mesh, fn, shardings_of(result), shardings_of(arguments))


def softmax_of(rule, **options):
    @custom_partitioning
    def softmax(x):
        return jax.nn.softmax(x)

    softmax.def_partition(as_it_is(jax.nn.softmax), sharding_rule=rule, **options)
    return lambda x: softmax(x)


def rule_by_types(mesh, operands, results):
    del mesh, results
    names = tuple(f"d{i}" for i in range(len(operands[0].shape)))
    return SdyShardingRule((ArrayMapping(*names),), (ArrayMapping(*names),), need_replication_factors=names[-1:])


@custom_partitioning
def product(x, w):
    """A product of matrices that sums over devices itself."""
    return x @ w


def partition_product(mesh, arguments, result):
    contracted = tuple(arguments[0].sharding.spec)[1:2]

    def run(x, w):
        return lax.psum(x @ w, contracted[0]) if contracted and contracted[0] is not None else x @ w

    return mesh, run, shardings_of(result), shardings_of(arguments)


product.def_partition(partition_product, sharding_rule="m k, k n -> m n", reduction_factors=("k",))

ROWS = ArrayMapping("a", "b", "n")
CASES = {
    "text": softmax_of("... n -> ... n", need_replication_factors=("n",)),
    "object": softmax_of(SdyShardingRule((ROWS,), (ROWS,), need_replication_factors=("n",))),
    "function": softmax_of(rule_by_types),
}


@pytest.mark.parametrize("executor", ["execution", "device_program"])
@pytest.mark.parametrize("name", CASES)
def test_random_layouts_compute_what_one_device_computes(name, executor):
    x = jax.random.normal(jax.random.key(0), (8, 4, 16))
    for seed in range(2):
        check_layout(CASES[name], [x], seed, executor)


@pytest.mark.parametrize("executor", ["execution", "device_program"])
def test_a_reduction_that_is_finished_inside_is_not_finished_again(executor):
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (16, 8))]
    for seed in range(6):
        check_layout(lambda x, w: product(x, w), arrays, seed, executor)
    _, ((_, strategies),) = strategies_of("custom_partitioning", lambda x, w: product(x, w), *map(abstract, arrays))
    kinds = {step.kind for s in strategies for steps in s.reductions for step in steps}
    assert kinds == {"all_reduce"}, "priced, and not scattered"


def abstract(x):
    return array(*x.shape)


@pytest.mark.parametrize("name", CASES)
def test_rules_are_read(name):
    _, ((_, strategies),) = strategies_of("custom_partitioning", CASES[name], array(8, 4, 16))
    assert split_dimensions(strategies) == {0, 1}


def test_a_function_without_a_rule_runs_whole_and_is_priced():
    space, ((vertex, strategies),) = strategies_of("custom_partitioning", softmax_of(None), array(64, 32, 16))
    assert len(strategies) == 1
    assert any("custom_partitioning 'softmax" in n or "softmax" in n for n in space.notes if "runs whole" in n)
    assert space.node_costs.compute_s(vertex, strategies)[0] >= 2 * 64 * 32 * 16 * 4 / 1e12


def test_a_partition_that_wants_other_parts_is_not_given_these():
    def keeps_rows_whole(mesh, arguments, result):
        del arguments, result
        whole = NamedSharding(mesh, PartitionSpec())
        return mesh, jax.nn.softmax, whole, (whole,)

    @custom_partitioning
    def stubborn(x):
        return jax.nn.softmax(x)

    stubborn.def_partition(keeps_rows_whole, sharding_rule="m n -> m n", need_replication_factors=("n",))
    space, ((_, strategies),) = strategies_of("custom_partitioning", lambda x: stubborn(x), array(8, 16))
    assert len(strategies) == 1
    assert any("its `partition` takes" in note for note in space.notes)


def test_arithmetic_is_that_of_the_function():
    flops = 2 * 512 * 512 * 512
    space, ((vertex, strategies),) = strategies_of(
        "custom_partitioning", lambda x, w: product(x, w), array(512, 512), array(512, 512)
    )
    seconds = space.node_costs.compute_s(vertex, strategies)
    assert seconds == pytest.approx([flops / s.parts / 1e12 for s in strategies])


def test_batches_of_custom_calls_keep_their_shape():
    fn = CASES["text"]
    assert jnp.allclose(fn(jnp.ones((2, 3, 4))), 0.25)
