"""A plan that runs as a program computes what one device does where XLA's partitioner is known to fail.

Of these cases plain `jax.jit` with the same shardings of arguments is wrong on CPUs under JAX 0.10.2 for the product,
the convolution, and the slice whose result is split. The other two were wrong on GPUs and TPUs, and are right on CPUs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import diffshard

MESH = jax.make_mesh((2, 2, 2), ("x", "y", "z"), (AxisType.Auto,) * 3, devices=jax.devices()[:8])
SLOW = diffshard.Hardware(
    # Arithmetic that costs, so that plans split it.
    "slow", 1e7, float("inf"), float("inf"), {axis: diffshard.Link(1e-9, 1e-7) for axis in MESH.axis_names}
)  # fmt: skip


def product(x, matrices, vectors):
    return x + jnp.einsum("bk,bjk->bj", vectors, matrices)


def convolution(images, kernel):
    return lax.conv_general_dilated(images, kernel, (1,), "SAME")


def slice_beyond_the_end(x, start):
    return 2 * lax.dynamic_slice(x, (start, 0), (32, 64))


def lookup_gradient(table, ids, cotangents):
    """The scatter-add of a lookup whose ids are split over an axis that splits the table as well."""
    return jax.grad(lambda table: (jnp.take(table, ids, axis=0) * cotangents).sum())(table)


def accumulated_lookup_gradients(table, ids, cotangents):
    """The same, added up over micro-batches in a scan."""

    def add(total, batch):
        return total + lookup_gradient(table, *batch), None

    return lax.scan(add, jnp.zeros_like(table), (ids, cotangents))[0]


def numbers(*shape):
    return np.random.default_rng(sum(shape)).integers(-8, 9, shape).astype(np.float32)


def ids(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 16, shape).astype(np.int32)


ALL = ("x", "y", "z")
CASES = {
    "batched product": (
        product, (numbers(8, 12), numbers(8, 12, 12), numbers(8, 12)),
        (P(("x", "y")), P("x", None, ("y", "z")), P("x", ("y", "z"))),
    ),
    "convolution along a split dimension": (
        convolution, (numbers(8, 8, 8), numbers(8, 8, 3)), (P(None, None, "x"), P("y", "x")),
    ),
    "slice beyond the end": (slice_beyond_the_end, (numbers(64, 64), np.int32(50)), (P("x", "y"), P())),
    "scatter-add over 8 devices": (
        lookup_gradient, (numbers(16, 8), ids(8, 8), numbers(8, 8, 8)), (P(("y", "z")), P("x", "z"), P("x", "z")),
    ),
    "accumulation in a scan": (
        accumulated_lookup_gradients, (numbers(16, 8), ids(3, 8, 8), numbers(3, 8, 8, 8)),
        (P(ALL), P(None, ALL), P(None, ALL)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_computes_what_one_device_does(name):
    fn, arrays, specs = CASES[name]
    step = diffshard.search(fn, MESH, hardware=SLOW, in_shardings=specs)
    plan = step.plan(*arrays)
    assert plan.executor == "program"
    np.testing.assert_array_equal(step(*plan.shard(*arrays)), jax.jit(fn)(*arrays))  # of whole numbers, so exactly


def test_a_plan_with_a_product_that_xla_partitions_wrongly_is_refused_by_constraints():
    fn, arrays, specs = CASES["batched product"]
    plan = wrongly_partitioned(diffshard.search(fn, MESH, hardware=SLOW, in_shardings=specs).plan(*arrays))
    message = r"partitioner would compute dot_general \(1x, .*test_partitioner_faults.py.*\) wrongly.*\"program\""
    with pytest.raises(diffshard.PlanError, match=message):
        plan.apply(fn, executor="constraints")(*plan.shard(*arrays))
    np.testing.assert_array_equal(plan.apply(fn)(*plan.shard(*arrays)), jax.jit(fn)(*arrays))


def wrongly_partitioned(plan):
    """Returns a plan whose product is scattered into its batch over one of the axes over which it is contracted."""
    (index,) = (i for i, o in enumerate(plan.operations) if o.signature.startswith("dot_general"))
    batch, axes = ("x",), ("y", "z")
    product = dataclasses.replace(
        plan.operations[index],
        operands=((batch, axes), (batch, (), axes)),
        unreduced=((batch, ()),),
        results=((("x", "y"), ()),),
        value_specs=((("x", "y"), ()),),
        reductions=((("reduce_scatter", "y"), ("all_reduce", "z")),),
    )
    operations = (*plan.operations[:index], product, *plan.operations[index + 1 :])
    return dataclasses.replace(plan, operations=operations)


def test_a_search_for_constraints_leaves_such_products_out():
    fn, arrays, specs = CASES["batched product"]
    step = diffshard.search(fn, MESH, hardware=SLOW, in_shardings=specs, executor="constraints")
    np.testing.assert_array_equal(step(*step.plan(*arrays).shard(*arrays)), jax.jit(fn)(*arrays))
