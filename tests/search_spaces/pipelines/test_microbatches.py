"""Functions in micro-batches give the results of the whole batch, or name the operation that needs the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from tests.search_spaces.pipelines.microbatch_functions import (
    FUNCTIONS,
    KEY,
    WEIGHTS,
    X,
    numbered,
    train_step,
    with_dropout,
)


@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_whole_batch(name, num_microbatches):
    fn, args = FUNCTIONS[name]
    results = jax.jit(diffshard.pipelines.in_microbatches(fn, num_microbatches))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))


def test_activations_take_the_memory_of_a_microbatch():
    x = jnp.ones((64, 128, 64))
    args = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 8))}, (x, jnp.zeros((64, 128), int))

    def temporary_bytes(fn):
        analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole, parts = temporary_bytes(with_dropout), temporary_bytes(diffshard.pipelines.in_microbatches(with_dropout, 8))
    assert parts < whole / 4, "an eighth of the activations, and the sums of the gradients"


def test_sums_of_short_floats_are_kept_in_float32():
    """In bfloat16 the 4,096 ones of 64 micro-batches would add up to 256, where one more makes no difference."""

    def fn(weight, x):
        return (x * weight).sum(axis=0)

    x = jnp.ones((4096, 8), jnp.bfloat16)
    total = jax.jit(diffshard.pipelines.in_microbatches(fn, 4096))(jnp.bfloat16(1), x)
    assert total.dtype == jnp.bfloat16
    assert (total == 4096).all()


def test_a_function_in_microbatches_is_searched_and_runs_on_a_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fn, args = FUNCTIONS["training step"]
    step = diffshard.search(diffshard.pipelines.in_microbatches(fn, 2), mesh, hardware="h100")
    plan = step.plan(*args)
    results = step(*plan.shard(*args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))
    assert any(operation.count == 2 for operation in plan.operations), "operations of a micro-batch run twice"


def test_what_prints_does_so_where_its_values_are_known(capfd):
    def fn(weights, x):
        loss = (x @ weights["up"]).sum()
        jax.debug.print("the loss is {}", loss)
        return loss

    loss = jax.jit(diffshard.pipelines.in_microbatches(fn, 4))(WEIGHTS, X)
    jax.effects_barrier()
    assert capfd.readouterr().out == f"the loss is {loss}\n"


def test_arguments_by_keyword_are_those_by_position():
    fn, (weights, batch) = FUNCTIONS["dropout"]
    expected = jax.jit(fn)(weights, batch)
    by_position = diffshard.pipelines.in_microbatches(fn, 4)
    by_name = diffshard.pipelines.in_microbatches(fn, 4, batch_argnums=(), batch_argnames="batch")
    for results in (by_position(weights, batch=batch), by_name(weights, batch=batch), by_name(weights, batch)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, expected)


def test_one_part_is_the_function_itself():
    assert diffshard.pipelines.in_microbatches(train_step, 1) is train_step


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`num_microbatches` must be a whole number, 1 or more, not 0"):
        diffshard.pipelines.in_microbatches(train_step, 0)
    with pytest.raises(ValueError, match=r"`batch_argnums` must be positions of arguments, 0 or more, not \(-1,\)"):
        diffshard.pipelines.in_microbatches(train_step, 2, batch_argnums=-1)
    with pytest.raises(ValueError, match=r"must divide the batch; got 3 and x of shape \(8, 6, 12\)"):
        diffshard.pipelines.in_microbatches(numbered, 3)(WEIGHTS, X)
    with pytest.raises(ValueError, match=r"names the argument 2, which numbered was not given; it was .*, x\. Give"):
        diffshard.pipelines.in_microbatches(numbered, 2, batch_argnums=(1, 2))(WEIGHTS, X)
    with pytest.raises(ValueError, match="must name arguments with arrays that have a leading dimension"):
        diffshard.pipelines.in_microbatches(lambda x, key: x, 2)(X, KEY)
    with pytest.raises(ValueError, match=r"The batch must have rows, but `x` has the shape \(0, 6, 12\)"):
        diffshard.pipelines.in_microbatches(numbered, 2)(WEIGHTS, X[:0])


@pytest.mark.parametrize(
    ("name", "num_scans"), [("training step", 1), ("balanced routing", 2), ("gradient penalty", 4)]
)
def test_sums_that_gradients_read_are_made_before_and_nothing_else(name, num_scans):
    """A scan for each level of such sums, each with fewer products than the one after it."""
    fn, args = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(diffshard.pipelines.in_microbatches(fn, 2))(*args)
    scans = [str(equation).count("dot_general[") for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(scans) == num_scans
    assert scans == sorted(set(scans))
