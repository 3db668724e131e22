"""What needs a result of the whole batch: sums that are finished in time, and functions that are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import diffshard
from diffshard.pipelines.microbatches import BatchArguments, divided_call, traced_call
from tests.search_spaces.pipelines.microbatch_functions import (
    WEIGHTS,
    X,
    whole_in_a_branch,
)


def in_a_loop(operation):
    """A function that applies an operation to a sum over the batch inside a loop, where sums stay in parts."""

    def fn(weights, x):
        return lax.scan(lambda total, _: (total + operation(x), None), jnp.zeros_like(operation(x)), None, length=2)[0]

    return fn


LINEAR = {
    "float16 from float32": (lambda x: (1000 * x.sum(0)).astype(jnp.float16), False),
    "bfloat16 from float32": (lambda x: x.sum(0).astype(jnp.bfloat16), True),
    "integers from floats": (lambda x: (3 * x.sum(0)).astype(jnp.int32), False),
    "short integers": (lambda x: (x > 0).astype(jnp.int32).sum(0).astype(jnp.int8), False),
    "long integers": (lambda x: (x > 0).astype(jnp.int8).sum(0, dtype=jnp.int16).astype(jnp.int32), True),
    "truth values": (lambda x: (x > 0).astype(jnp.int32).sum(0).astype(bool), False),
    "integer division": (lambda x: (x > 0).astype(jnp.int32).sum(0) // 3, False),
    "division": (lambda x: x.sum(0) / 3, True),
    "a gather that fills": (lambda x: x.sum(0).at[jnp.array([0, 99])].get(mode="fill", fill_value=1.0), False),
    "a gather that clips": (lambda x: x.sum(0).at[jnp.array([0, 99])].get(mode="clip"), True),
    "less precision": (lambda x: lax.reduce_precision(x.sum(0), 8, 4), False),
    "a choice": (lambda x: jnp.where(jnp.arange(12) > 5, x.sum(0), 7.0), True),
    "a padded sum": (lambda x: jnp.pad(x.sum(0), ((0, 0), (1, 1)), constant_values=2.0), True),
    "a power": (lambda x: x.sum(0) ** 2, False),
    "an update": (lambda x: lax.dynamic_update_slice(jnp.ones((6, 20)), x.sum(0), (0, 3)), True),
    "a product of sums": (lambda x: x.sum(0) @ x.sum(0).T, False),
    "a product": (lambda x: x.sum(0) @ jnp.ones((12, 3)), True),
    "a largest one": (lambda x: x.max(0) + 1, False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_inside_loops_what_is_linear_gives_the_whole_sum_and_all_else_is_refused(name):
    operation, is_linear = LINEAR[name]
    fn = in_a_loop(operation)
    if not is_linear:
        with pytest.raises(ValueError, match=r"needs a result of the whole batch|a part of a sum"):
            diffshard.pipelines.in_microbatches(fn, 4)(WEIGHTS, X)
        return
    actual, expected = diffshard.pipelines.in_microbatches(fn, 4)(WEIGHTS, X), fn(WEIGHTS, X)
    assert actual.dtype == expected.dtype
    tolerance = 2e-2 if actual.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)


def batch_norm(weights, x):
    hidden = x @ weights["up"]
    return (hidden - hidden.mean(0)).sum()


def contrastive(weights, x):
    hidden = x[:, 0] @ weights["up"]
    return jax.nn.log_softmax(hidden @ hidden.T).sum()


def scan_over_batch(weights, x):
    return lax.scan(lambda total, row: (jnp.tanh(total + row), None), jnp.zeros(x.shape[1:]), x)[0]


def norm_in_a_loop(weights, x):
    def layer(h, _):
        return h - h.mean(0), None

    return lax.scan(layer, x, None, length=2)[0].sum()


def stops_by_the_batch(weights, x):
    return lax.while_loop(lambda h: jnp.any(h < 9), lambda h: h + 1, x)


def stops_by_a_mean(weights, x):
    return lax.while_loop(lambda h: h.mean() < 9, lambda h: h + 1, x)


@pytest.mark.parametrize(
    ("fn", "operation", "reason"),
    [
        (batch_norm, "sub", "needs a result of the whole batch before"),
        (contrastive, "dot_general", "mixes the examples"),
        (scan_over_batch, "scan", "goes through the batch"),
        (norm_in_a_loop, "sub", "needs a result of the whole batch before"),
        (lambda weights, x: jnp.sort(x, axis=0), "sort", "mixes the examples"),
        (lambda weights, x: jnp.cumsum(x, axis=0), "cumsum", "mixes the examples"),
        (lambda weights, x: jnp.sin(x.reshape(36, 16)).mean(1), "reshape", "mixes the examples"),
        (whole_in_a_branch, "cond", "in some branch only"),
        (stops_by_a_mean, "lt", "is inside a loop"),
        (stops_by_the_batch, "while", "stops by the batch"),
    ],
)
def test_what_needs_the_whole_batch_is_named(fn, operation, reason):
    with pytest.raises(
        ValueError, match=f"`num_microbatches` must be 1.*{operation} .*_(batches|functions).py.*{reason}"
    ):
        jax.eval_shape(diffshard.pipelines.in_microbatches(fn, 2), WEIGHTS, X)


def test_a_reshape_keeps_groups_of_examples_beside_each_other_or_is_refused():
    def divided(replicas, num_groups):
        def fn(weights, x):
            return jnp.sin(x.reshape(replicas, 16 // replicas, 6, 12)).mean(1) @ weights["up"]

        args = WEIGHTS, jnp.concatenate([X, 2 * X])
        call = traced_call(fn, 4, BatchArguments.checked(1, ()), args, {})
        results = divided_call(call, 4, num_groups=num_groups)(*call.arrays)
        np.testing.assert_allclose(results[0], fn(*args), rtol=1e-5, atol=1e-6)

    divided(2, 1)
    divided(1, 2)
    with pytest.raises(ValueError, match=r"reshape .* mixes the examples"):
        divided(2, 2)
