"""Work of equations, held against hand counts and against XLA's own count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Hardware
from cost.compute import equation_dtype, equation_flops, equation_work, inner_jaxprs, jaxpr_flops, roofline_s


def flops(function, *arguments):
    return jaxpr_flops(jax.make_jaxpr(function)(*arguments))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled_flops(function, *arguments):
    """XLA's own count."""
    cost = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert cost is not None
    return cost["flops"]


def convolution(stride=1, padding="SAME", **more):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more
        )

    return convolve


@pytest.mark.parametrize(
    ("convolve", "x", "kernel"),
    [
        (convolution(), (2, 9, 9, 3), (3, 3, 3, 4)),
        (convolution(2, "VALID"), (2, 9, 9, 3), (3, 3, 3, 4)),
        (convolution(2, "SAME"), (1, 8, 7, 2), (3, 5, 2, 4)),
        (convolution(feature_group_count=2), (2, 9, 9, 4), (3, 3, 2, 8)),
        (convolution(rhs_dilation=(2, 2)), (2, 9, 9, 3), (3, 3, 3, 4)),
    ],
)
def test_convolutions_and_their_gradients_count_as_xla_counts(convolve, x, kernel):
    x, kernel = array(*x), array(*kernel)
    out = jax.eval_shape(convolve, x, kernel)
    assert flops(convolve, x, kernel) == compiled_flops(convolve, x, kernel)
    for which in (0, 1):

        def transposed(x, kernel, g, which=which):
            return jax.vjp(convolve, x, kernel)[1](g)[which]

        forward = flops(convolve, x, kernel)
        # The trace holds the convolution and both gradients, each with the same multiply-adds; XLA keeps one.
        assert flops(transposed, x, kernel, out) == pytest.approx(3 * forward)
        assert compiled_flops(transposed, x, kernel, out) == pytest.approx(forward)


def test_products_count_as_xla_counts():
    einsum = lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b)  # noqa: E731
    arguments = array(3, 8, 16), array(3, 16, 5)
    assert flops(einsum, *arguments) == 2 * 3 * 8 * 16 * 5 == compiled_flops(einsum, *arguments)


def test_ragged_products_meet_one_group_for_each_row():
    arguments = array(8, 4), array(2, 4, 5), array(2, dtype="int32")
    assert flops(jax.lax.ragged_dot, *arguments) == 2 * 8 * 4 * 5
    weight_gradient = jax.grad(lambda a, b, c: jax.lax.ragged_dot(a, b, c).sum(), 1)
    jaxpr = jax.make_jaxpr(weight_gradient)(*arguments)
    products = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "ragged_dot_general"]
    assert [equation_flops(e) for e in products][-1] == 2 * 8 * 4 * 5


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x: x + x, (4, 5), 20),
        (lambda x: x.sum(0), (4, 5), 20),
        (lambda x: jnp.argmax(x, 1), (4, 5), 20),
        (lambda x: x.T.reshape(-1)[None], (4, 5), 0),
        (lambda x: jax.lax.sort(x), (4, 8), 4 * 8 * 3),
        (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"), (4, 4), 4 * 4),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], (4, 4), 5 * 2 * 4**3),
        (lambda x: jax.lax.cond(True, lambda x: x @ x, lambda x: x, x), (4, 4), 2 * 4**3),
        (lambda x: jax.lax.while_loop(lambda c: False, lambda c: c @ c, x), (4, 4), 2 * 4**3),
        (jax.checkpoint(lambda x: x @ x), (4, 4), 2 * 4**3),
        (jax.jit(lambda x: x @ x), (4, 4), 2 * 4**3),
        (lambda x: jax.lax.linalg.triangular_solve(x, x, left_side=True), (6, 6), 6**3),
        (jnp.fft.fft, (16,), 5 * 16 * 4),  # 5 n log2 n
        (jnp.fft.rfft, (16,), 5 * 16 * 4 / 2),  # a half where one side is real
        (jnp.fft.irfft, (9,), 5 * 16 * 4 / 2),
        (lambda x: jax.lax.top_k(x, 3), (16,), 32),
    ],
)
def test_counts_by_hand(function, shape, expected):
    assert flops(function, array(*shape)) == expected


@pytest.mark.parametrize(
    ("primitive", "function", "shape", "expected"),
    [
        ("cholesky", jax.lax.linalg.cholesky, (3, 6, 6), 3 * 6**3 / 3),
        ("lu", jax.lax.linalg.lu, (6, 6), 2 * 6**3 / 3),
        ("eigh", jax.lax.linalg.eigh, (6, 6), 9 * 6**3),
        ("svd", jax.lax.linalg.svd, (8, 6), 14 * 8 * 6 * 6),
    ],
)
def test_dense_linear_algebra_counts_by_golub_and_van_loan(primitive, function, shape, expected):
    equations = list(all_equations(jax.make_jaxpr(function)(array(*shape)).jaxpr))
    assert [equation_flops(e) for e in equations if e.primitive.name == primitive] == [pytest.approx(expected)]


def all_equations(jaxpr):
    """Yields the equations of a jaxpr, those inside of others as well."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(getattr(inner, "jaxpr", inner))


def test_functions_with_rules_of_their_own_count_what_runs():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x.T + x.T @ g,))
    assert flops(square, array(4, 4)) == 2 * 4**3
    assert flops(jax.nn.relu, array(4, 4)) == 16


def test_shard_map_counts_all_devices():
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(lambda x: x + x, mesh=mesh, in_specs=spec, out_specs=spec)
    assert flops(mapped, array(8)) == 8


def test_whole_training_step_counts_about_six_times_parameters_and_examples():
    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w[0]) @ w[1]).mean()

    w, x = [array(64, 256), array(256, 64)], array(128, 64)
    expected = 6 * 2 * 64 * 256 * 128 - 2 * 128 * 64 * 256  # no gradient with respect to the input
    assert flops(jax.grad(loss), w, x) == pytest.approx(expected, rel=0.1)


def test_a_product_of_bfloat16_that_accumulates_in_float32_runs_in_bfloat16():
    def product(a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32)

    jaxpr = jax.make_jaxpr(product)(array(2, 3, dtype="bfloat16"), array(3, 4, dtype="bfloat16"))
    (equation,) = jaxpr.jaxpr.eqns
    assert equation_dtype(equation) == "bfloat16"
    assert equation_work(equation) == (2 * 2 * 3 * 4, 2 * 6 + 2 * 12 + 4 * 8, "bfloat16")


def test_roofline_is_the_slower_of_arithmetic_and_traffic_over_arrays():
    hardware = Hardware("test", {"float32": 10.0, "bfloat16": 20.0}, 4.0, 1.0, {})
    seconds = roofline_s(np.array([100.0, 10.0]), np.array([4.0, 80.0]), "float32", hardware)
    np.testing.assert_array_equal(seconds, [10.0, 20.0])
    assert roofline_s(100, 0, "bfloat16", hardware) == 5
    free = Hardware("test", 10.0, math.inf, 1.0, {})
    assert roofline_s(10, 1e30, "float32", free) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.sort(x, dimension=0),
        lambda x: jax.lax.sort(x, dimension=1),
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x.sum(axis=1),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: jnp.fft.fft(x),
        lambda x: jax.lax.scan(lambda c, row: (c, row * 2), 0.0, x)[1],
        lambda x: jax.lax.linalg.cholesky(x[:, :0]),
    ],
)
def test_what_computes_nothing_counts_nothing(function):
    assert flops(function, array(0, 4)) == 0


def test_empty_arrays_and_random_bits_are_counted_without_error():
    assert flops(lambda x: x @ x.T, array(0, 4)) == 0
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert flops(lambda k: jax.random.normal(k, (8, 8)), key) > 64
