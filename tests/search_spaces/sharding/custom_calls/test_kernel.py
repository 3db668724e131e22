"""Kernels compute what their functions compute: by themselves, under JAX's transformations, and split by any layout."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import diffshard
from cost.base import num_strategies
from tests.search_spaces.sharding.small_spaces import array, space_of

AXES = ("x", "y")


def attend(q, k, v):
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)


def scale_rows(x, g):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def doubled_in_pallas(x):
    def body(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def doubled_backward(x, y, dy):
    del x, y
    return doubled_in_pallas(dy)


attention = diffshard.kernel(attend, "b s h d, b t h d, b t h d -> b s h d", need_replication="d")
norm = diffshard.kernel(scale_rows, "... d, d -> ... d", need_replication="d")
product = diffshard.kernel(jnp.matmul, "... k, k n -> ... n", reduction={"k": "sum"})
largest = diffshard.kernel(lambda x: jnp.max(x, -1), "... n -> ...", reduction={"n": "max"}, name="largest")
exponentials = diffshard.kernel(
    lambda x: jnp.exp(x).sum(-1), "... n -> ...", reduction={"n": "sum"}, name="exponentials"
)
doubled = diffshard.kernel(doubled_in_pallas, "... -> ...", backward=doubled_backward)
doubled_by_kernels = diffshard.kernel(
    doubled_in_pallas, "... -> ...", backward=diffshard.kernel(doubled_backward, "..., ..., ... -> ...")
)
rotated = diffshard.kernel(
    lambda x, order: (x[:, order], order), "b n, m -> b m, m", name="rotated", need_replication="n m"
)


def decoder_loss(params, x):
    """Scanned, rematerialised layers of kernels."""

    def layer(x, w):
        h = norm(x, w["norm"])
        heads = [product(h, w[name]).reshape(*h.shape[:2], 4, -1) for name in "qkv"]
        x = x + doubled(product(attention(*heads).reshape(h.shape), w["out"]))
        return x, largest(x).sum()

    x, peaks = jax.lax.scan(jax.checkpoint(layer), x, params)
    return jnp.mean(x**2) + 1e-3 * peaks.mean()


def decoder_step(params, x):
    loss, gradients = jax.value_and_grad(decoder_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def decoder_arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (2, 16, 16)
    params = {n: jax.random.normal(k, shape) / 4 for n, k in zip(("q", "k", "v", "out"), keys, strict=False)}
    return {**params, "norm": jnp.ones((2, 16))}, jax.random.normal(keys[4], (8, 8, 16))


CASES = {
    "attention": (lambda q, k, v: attention(q, k, v), [(8, 8, 4, 4)] * 3),
    "gradients of attention": (
        lambda q, k, v: jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2))(q, k, v),
        [(8, 8, 4, 4)] * 3,
    ),
    "reduction": (lambda x, w: product(x, w), [(8, 16), (16, 8)]),
    "gradients of a reduction": (
        lambda x, w: jax.grad(lambda *a: jnp.sum(product(*a) ** 2), (0, 1))(x, w),
        [(8, 16), (16, 8)],
    ),
    "maximum": (lambda x: largest(x), [(8, 16)]),
    "gradient of a maximum": (lambda x: jax.grad(lambda a: jnp.sum(largest(a) ** 2))(x), [(8, 16)]),
    "gradient of a shared scale": (
        lambda x, g: jax.grad(lambda *a: jnp.sum(norm(*a) ** 2), (0, 1))(x, g),
        [(8, 16, 4), (4,)],
    ),
    "batch": (lambda x, w: jax.vmap(product, (1, None))(x, w), [(8, 4, 16), (16, 8)]),
    "gradients of a batch": (
        lambda x, w: jax.grad(lambda *a: jnp.sum(jax.vmap(product, (1, None))(*a) ** 2), (0, 1))(x, w),
        [(8, 4, 16), (16, 8)],
    ),
    "uneven": (lambda x, w: product(x, w), [(6, 10), (10, 12)]),
    "uneven with padding that counts": (lambda x: exponentials(x), [(6, 63)]),
    "pallas": (lambda x: jax.grad(lambda a: jnp.sum(doubled(a) ** 2))(x), [(8, 16)]),
    "pallas by kernels": (lambda x: jax.grad(lambda a: jnp.sum(doubled_by_kernels(a) ** 2))(x), [(8, 16)]),
}


def arrays_of(shapes):
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def plain(fn):
    """The function with every kernel replaced by its own function."""
    return lambda *args: jax.tree.leaves(jax.jit(fn)(*args))


@pytest.mark.parametrize(("seed", "executor"), [(0, "execution"), (1, "device_program")])
@pytest.mark.parametrize("name", CASES)
def test_random_layouts_compute_what_one_device_computes(name, seed, executor):
    fn, shapes = CASES[name]
    check_layouts(fn, arrays_of(shapes), seed, executor)


@pytest.mark.parametrize("executor", ["execution", "device_program"])
@pytest.mark.parametrize("seed", range(1))
def test_random_layouts_of_a_training_step(seed, executor):
    check_layouts(decoder_step, decoder_arguments(), seed, executor)


def check_layouts(fn, arguments, seed, executor, sizes=(2, 4)):
    leaves, structure = jax.tree.flatten(arguments)
    avals = jax.tree.unflatten(structure, [array(*x.shape, dtype=x.dtype) for x in leaves])
    space = space_of(fn, *avals, sizes=sizes)
    if executor == "device_program":
        space = dataclasses.replace(space, as_program=True)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2)
    choice = np.random.default_rng(seed).integers(num_strategies(space.problem)).tolist()
    program = getattr(space, executor)(space.layout(choice), mesh)
    results = jax.jit(program)(*leaves)
    for a, b in zip(results, plain(fn)(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_a_kernel_is_its_function():
    q, k, v = arrays_of([(2, 3, 4, 5)] * 3)
    np.testing.assert_allclose(attention(q, k, v), attend(q, k, v), rtol=1e-5)
    for a, b in zip(
        jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2)))(q, k, v),
        jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    x, w = arrays_of([(2, 3, 4), (4, 5)])
    np.testing.assert_allclose(jax.vmap(product, (1, None), 1)(x, w), x @ w, rtol=1e-5)


def test_a_kernel_has_the_types_of_the_options_of_jax():
    halved = diffshard.kernel(lambda x: x * jnp.linspace(0.5, 0.5, 4), "n -> n", name="halved")
    expected = np.full(4, 0.5)
    x = np.arange(4)  # integers have the same type in both
    for is_wide, dtype in ((False, jnp.float32), (True, jnp.float64), (False, jnp.float32)):
        with jax.enable_x64(is_wide):
            result = jax.jit(halved)(jnp.asarray(x, jnp.int32))
        assert result.dtype == dtype
        np.testing.assert_allclose(result, expected * x)


@pytest.mark.parametrize("executor", ["execution", "device_program"])
def test_arrays_of_a_dropped_kernel_are_freed(executor):
    def use(weights):
        scaled = diffshard.kernel(lambda x: x * weights, "... n -> ... n", need_replication="n", name="scaled")

        def loss(x):
            return jnp.sum(scaled(jax.vmap(scaled)(x)) ** 2)

        check_layouts(jax.grad(loss), [jnp.ones((8, 8, 4))], 0, executor)

    weights = jnp.asarray(np.arange(4, dtype=np.float32))
    reference = weakref.ref(weights)
    use(weights)
    del weights
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_equal_uses_of_a_kernel_are_traced_once():
    shapes = []

    def fn(x):
        shapes.append(x.shape)
        return 2 * x

    doubling = diffshard.kernel(fn, "n -> n", name="doubling")

    def loss(x):
        for _ in range(3):
            x = jax.vmap(doubling)(x)
        return x.sum()

    jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 8)))
    once = len(shapes)
    jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 8)))
    assert len(shapes) == once


def test_a_kernel_that_jax_cannot_differentiate_asks_for_a_backward():
    def summed_in_steps(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, x))[1]

    kernel = diffshard.kernel(summed_in_steps, "... -> ...")
    with pytest.raises(TypeError, match=r"'summed_in_steps' cannot be differentiated by JAX .*Give `backward=`"):
        jax.grad(lambda x: kernel(x).sum())(jnp.ones(4))


def test_a_backward_has_no_gradient_of_integers():
    x, order = jnp.arange(6.0).reshape(2, 3), jnp.array([2, 0, 1])
    gradient = jax.grad(lambda a: jnp.sum(rotated(a, order)[0] * jnp.array([1.0, 2.0, 3.0])))(x)
    np.testing.assert_allclose(gradient, [[2.0, 3.0, 1.0]] * 2)


def strategies_of(fn, *avals, sizes=(2, 4)):
    """The operation's own strategies, by the specs of its operands."""
    space = space_of(fn, *avals, sizes=sizes)
    return space, [(v, space.nodes[v.index].strategies) for v in space.graph.operations() if v.primitive == "kernel"]


def test_a_kernel_is_one_vertex_that_is_split_as_its_rule_says():
    _, ((_, strategies),) = strategies_of(lambda *x: attention(*x), *[array(8, 8, 4, 4)] * 3)
    split = {d for s in strategies for d, axes in enumerate(s.operands[0]) if axes}
    assert split == {0, 1, 2}, "batch, length of queries, heads"
    assert not any(s.operands[1][1] for s in strategies), "the length of keys"


def test_a_reduction_may_be_scattered_into_one_of_several_results():
    gradients = CASES["gradient of a shared scale"][0]
    _, (_, (_, backward)) = strategies_of(gradients, array(8, 16, 4), array(4))
    kinds = {tuple(step.kind for step in s.reductions[1]) for s in backward}
    assert ("all_reduce",) in kinds
    assert ("reduce_scatter",) in kinds
    assert not any(s.reductions[0] for s in backward), "the gradient of x is complete"


def test_a_price_is_of_one_devices_part():
    def flops(x, w):
        return 2 * np.prod(x.shape) * w.shape[1]

    by_function = diffshard.kernel(jnp.matmul, "m k, k n -> m n", flops=flops, bytes=lambda x, w: 0)
    by_number = diffshard.kernel(jnp.matmul, "m k, k n -> m n", flops=2 * 64 * 32 * 16, bytes=0)
    by_trace = diffshard.kernel(jnp.matmul, "m k, k n -> m n", bytes=0)
    prices = []
    for fn in (by_function, by_number, by_trace):
        space, ((vertex, strategies),) = strategies_of(fn, array(64, 32), array(32, 16))
        prices.append(space.node_costs.compute_s(vertex, strategies))
        assert prices[-1] == pytest.approx([2 * 64 * 32 * 16 / s.parts / 1e12 for s in strategies])
    assert len(set(prices[0])) > 2


def test_an_unpriced_kernel_costs_its_bytes():
    doubling = diffshard.kernel(lambda x: x + x, "... -> ...", name="doubling")
    space, ((vertex, strategies),) = strategies_of(doubling, array(64, 32))
    assert space.node_costs.compute_s(vertex, strategies[:1]) == pytest.approx(2 * 64 * 32 * 4 / 1e12)


def test_a_batch_of_kernels_has_the_price_of_all():
    for flops in (100.0, lambda x: 100.0):
        costly = diffshard.kernel(lambda x: x + x, "n -> n", flops=flops, bytes=0, name="costly")
        space, ((vertex, strategies),) = strategies_of(jax.vmap(costly), array(8, 4))
        assert space.node_costs.compute_s(vertex, strategies[:1]) == pytest.approx(800 / 1e12)


def test_parts_that_a_function_does_not_accept_are_not_offered():
    def in_tiles(x):
        if x.shape[0] % 4:
            raise ValueError("rows come in tiles of 4")
        return 2 * x

    tiled = diffshard.kernel(in_tiles, "m n -> m n")
    space, ((_, strategies),) = strategies_of(tiled, array(8, 16))
    assert {s.operands[0][0] for s in strategies} == {(), (0,)}, "8 rows are 2 tiles"
    assert any("in_tiles" in note and "rows come in tiles of 4" in note for note in space.notes)


def test_uneven_parts_are_not_offered():
    _, ((_, strategies),) = strategies_of(exponentials, array(6, 63), sizes=(2, 4))
    assert {s.operands[0] for s in strategies} == {((), ()), ((0,), ())}, "63 numbers would be padded to 64 for 4 parts"


def test_equal_layers_of_kernels_have_equal_forms():
    space = space_of(decoder_step, *jax.tree.map(lambda x: array(*x.shape), decoder_arguments()))
    assert len({space.forms[v.index] for v in space.graph.operations() if v.primitive == "kernel"}) < sum(
        v.primitive == "kernel" for v in space.graph.operations()
    )


def test_a_plan_with_kernels_is_searched_and_runs():
    params, x = decoder_arguments()
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    expected = jax.jit(decoder_step)(params, x)
    for executor in ("program", "constraints"):
        step = diffshard.search(decoder_step, mesh, hardware="h100", executor=executor)
        plan = step.plan(params, x)
        assert "attend/kernel" in str(plan)
        results = step(*plan.shard(params, x))
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


# Bad input.


@pytest.mark.parametrize("backward", [None, lambda x, y, dy: pytest.fail("there is nothing to differentiate")])
def test_whole_numbers_get_no_gradient_and_their_backward_is_not_called(backward):
    if backward is None:
        backward = diffshard.kernel(lambda x, y, dy: dy, "r c, r c, r c -> r c")
    halved = diffshard.kernel(lambda x: x / 2, "r c -> r c", backward=backward)
    x = jnp.arange(6).reshape(2, 3)
    gradient = jax.grad(lambda x: halved(x).sum(), allow_int=True)(x)
    assert (gradient.shape, gradient.dtype) == (x.shape, jax.dtypes.float0)
