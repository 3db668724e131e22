"""The first call is held against another run of the same function, and wrong numbers are an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.sharding_search import numbers_check
from tests.diffshard.sharding_search.small_searches import SLOW, assert_equal, mesh_2x2, train_arguments, train_step
from tests.diffshard.sharding_search.test_partitioner_faults import CASES, MESH, wrongly_partitioned
from tests.diffshard.sharding_search.test_partitioner_faults import SLOW as SLOW_CUBE

EXECUTORS = ("program", "constraints", "propagation")


def searched(fn, **options):
    return diffshard.search(fn, mesh_2x2(), hardware=SLOW, **options)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_right_step_passes_and_gives_its_donated_arguments_up(executor):
    step = searched(train_step, executor=executor, check="numbers", donate_argnums=0)
    state, batch = step.plan(*train_arguments()).shard(*train_arguments())
    expected = jax.jit(train_step)(*train_arguments())
    new_state, loss = step(state, batch)
    assert_equal((new_state, loss), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not batch.is_deleted()
    assert_equal(step(new_state, batch), jax.jit(train_step)(expected[0], batch))  # the second call


def plan_of_product(executor):
    fn, arrays, specs = CASES["batched product"]
    plan = diffshard.search(fn, MESH, hardware=SLOW_CUBE, in_shardings=specs).plan(*arrays)
    return plan.apply(fn, executor=executor), plan.shard(*arrays)


def test_what_xla_propagates_wrongly_is_an_error_with_both_numbers_and_the_name():
    step, arrays = plan_of_product("propagation")
    message = r"`result\[\d, \d+\]` is (\S+) by `executor` \"propagation\", and (\S+) by the program for each device"
    for given in (arrays, list(map(np.asarray, arrays)), list(map(jnp.asarray, CASES["batched product"][1]))):
        with pytest.raises(diffshard.NumbersError, match=message) as error:
            step(*given)
        assert '`executor="program"`' in str(error.value)


def test_a_wrong_result_leaves_donated_arguments_usable_and_is_not_forgotten():
    fn, arrays, specs = CASES["batched product"]
    step = diffshard.search(fn, MESH, hardware=SLOW_CUBE, in_shardings=specs, executor="propagation", donate_argnums=0)
    placed = step.plan(*arrays).shard(*arrays)
    for _ in range(2):
        with pytest.raises(diffshard.NumbersError):
            step(*placed)
    np.testing.assert_array_equal(fn(*placed), fn(*arrays))


def test_a_program_is_held_against_one_device(monkeypatch):
    plan = searched(train_step).plan(*train_arguments())
    faulty = plan.apply(train_step, check="numbers")
    faulty.plan(*train_arguments())
    monkeypatch.setattr(numbers_check.core, "jaxpr_as_fun", lambda jaxpr: lambda *x: [jnp.zeros_like(a) for a in x[:8]])
    message = r"is \S+ by `executor` \"program\", and 0 by one device.* fault of diffshard"
    with pytest.raises(diffshard.NumbersError, match=message):
        faulty(*plan.shard(*train_arguments()))


def test_planning_asks_whether_numbers_can_be_held_and_builds_no_other_run(monkeypatch):
    built = []
    monkeypatch.setattr(numbers_check, "flat_function", lambda *args: built.append(args))
    searched(train_step, executor="constraints", check="numbers").plan(*train_arguments())
    assert built == []


def results_with(monkeypatch, fn, change, *args, **options):
    """Returns the results of a function by constraints where the program for each device is changed."""
    step = searched(fn, executor="constraints", check="numbers", **options)
    step.plan(*args)
    flat_function = numbers_check.flat_function

    def changed(plan, *rest):
        flat = flat_function(plan, *rest)
        return flat._replace(run=lambda *arrays: change(flat.run(*arrays)))

    monkeypatch.setattr(numbers_check, "flat_function", changed)
    return step(*step.plan(*args).shard(*args)) if len(args) > 1 else step(step.plan(*args).shard(*args))


def test_integers_have_to_be_equal_and_nan_equals_nan(monkeypatch):
    def fn(x):
        return {"counts": (x > 0).sum(0), "logs": jnp.log(x), "flags": x > 1}

    x = jnp.cos(jnp.arange(64.0)).reshape(8, 8) + 0.1
    result = results_with(monkeypatch, fn, lambda results: results, x)
    assert np.isnan(result["logs"]).any()

    def add_one_to_counts(results):
        return [results[0] + 1, *results[1:]]

    with pytest.raises(
        diffshard.NumbersError, match=r"`result\['counts'\]\[\d\]` is (\d) by .* and (\d) by the program"
    ):
        results_with(monkeypatch, fn, add_one_to_counts, x)


def test_not_a_number_for_a_number_is_an_error(monkeypatch):
    x = jnp.ones((8, 8))
    with pytest.raises(diffshard.NumbersError, match=r"`result.*` is 2 by .* and nan by the program"):
        results_with(monkeypatch, lambda x: 2 * x, lambda results: [results[0] * jnp.nan], x)


@pytest.mark.parametrize(("dtype", "share"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.1)])
def test_differences_count_by_the_precision_of_the_type(monkeypatch, dtype, share):
    x = jnp.ones((8, 8), dtype)
    results_with(monkeypatch, lambda x: 2 * x, lambda results: [results[0] * (1 + jnp.finfo(dtype).eps)], x)
    with pytest.raises(diffshard.NumbersError):
        results_with(monkeypatch, lambda x: 2 * x, lambda results: [results[0] * (1 + share)], x)


def test_a_result_that_is_nothing_but_rounding_may_differ(monkeypatch):
    def fn(x, w):
        y = jnp.tanh(x @ w)
        return y, y.sum(0) - (y[::-1].sum(0) - 0.0)  # zero, but for rounding

    arrays = jnp.sin(jnp.arange(4096.0)).reshape(64, 64), jnp.cos(jnp.arange(4096.0)).reshape(64, 64)

    def rounded(results):
        return [results[0], results[1] + 1e-6]

    results_with(monkeypatch, fn, rounded, *arrays)
    with pytest.raises(diffshard.NumbersError):
        results_with(monkeypatch, fn, lambda results: [results[0], results[1] + 0.1], *arrays)


def test_random_numbers_are_the_same_in_both_runs():
    def noisy(x, key):
        return x + jax.random.normal(key, x.shape), jax.random.split(key)

    step = searched(noisy, executor="propagation", in_shardings=(P("x", "y"), None))
    arguments = jnp.ones((8, 8)), jax.random.key(3)
    result, keys = step(*step.plan(*arguments).shard(*arguments))
    expected, expected_keys = jax.jit(noisy)(*arguments)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert (jax.random.key_data(keys) == jax.random.key_data(expected_keys)).all()


def test_what_cannot_be_held_is_refused_before_anything_runs():
    def notify(x):
        return x + io_callback(lambda: np.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32))

    def constrained(x):
        return jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh_2x2(), P("x")))

    x = jnp.ones((8, 8))
    with pytest.raises(diffshard.PlanError, match=r"io_callback \(1x, .*test_numbers_check.py.*executor=\"constraints"):
        searched(notify, check="numbers").plan(x)
    with pytest.raises(diffshard.PlanError, match="io_callback"):
        searched(notify, executor="propagation")(x)
    with pytest.raises(diffshard.PlanError, match=r"sharding_constraint .* names devices of the mesh"):
        searched(constrained, check="numbers").plan(x)
    assert searched(constrained, executor="constraints", check="numbers")(x).sum() == 128
    with pytest.raises(ValueError, match=r"`check` \"numbers\" .* `mesh` .*2.* is abstract"):
        diffshard.search(constrained, AbstractMesh((2,), ("x",)), hardware="h100", check="numbers")


def test_under_another_transformation_there_are_no_numbers_to_hold():
    x = jnp.ones((8, 8))
    step = searched(lambda x: 2 * x, executor="propagation")
    with pytest.raises(diffshard.PlanError, match="under another transformation there are no numbers"):
        jax.jit(step)(x)
    step(x)
    assert jax.jit(step)(x).sum() == 128


@pytest.mark.parametrize("check", ["names", ("shardy", "compile"), ("numbers", "names"), 3])
def test_only_known_checks_are_taken_and_one_compiler(check):
    with pytest.raises((ValueError, TypeError), match=r"`check` must be one of .* a compiler together with"):
        searched(train_step, check=check)


def test_a_compiler_and_numbers_can_both_check():
    step = searched(train_step, executor="propagation", check=("shardy", "numbers"))
    assert_equal(step(*train_arguments()), jax.jit(train_step)(*train_arguments()))
    with pytest.raises(ValueError, match="`check` must be \"numbers\" or None, not 'shardy'"):
        step.plan(*train_arguments()).apply(train_step, check="shardy")  # pyright: ignore[reportArgumentType]


def test_plans_are_stored_and_found_whether_or_not_numbers_are_checked(tmp_path):
    first = searched(train_step, cache=tmp_path).plan(*train_arguments())
    again = searched(train_step, cache=tmp_path, check="numbers").plan(*train_arguments())
    assert not first.stored_in
    assert again.stored_in


def test_a_product_that_is_known_to_be_wrong_is_refused_before_it_is_compared():
    fn, arrays, specs = CASES["batched product"]
    plan = diffshard.search(fn, MESH, hardware=SLOW_CUBE, in_shardings=specs).plan(*arrays)
    with pytest.raises(diffshard.PlanError, match="dot_general"):
        wrongly_partitioned(plan).apply(fn, executor="constraints", check="numbers").plan(*arrays)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_numbers_are_held_under_a_context_mesh(executor):
    step = searched(train_step, executor=executor, check="numbers")
    expected = jax.jit(train_step)(*train_arguments())
    arguments = jax.tree.map(np.asarray, train_arguments())
    with jax.set_mesh(mesh_2x2()):
        assert_equal(step(*arguments), expected)
