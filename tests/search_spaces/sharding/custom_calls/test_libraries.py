"""Linear algebra and ragged products are split and priced; calls of foreign code cost their bytes and are noted."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cost.compute import equation_flops
from tests.search_spaces.sharding.custom_calls.layouts import check_layout, split_dimensions, strategies_of
from tests.search_spaces.sharding.small_spaces import array

BATCH, N = 8, 12
CUBE = BATCH * N**3


def matrices(count=1):
    """Well-conditioned symmetric matrices."""
    keys = jax.random.split(jax.random.key(0), count)
    random = [jax.random.normal(key, (BATCH, N, N)) for key in keys]
    return [x @ x.mT / N + 2 * jnp.eye(N) for x in random]


def vectors(count):
    keys = jax.random.split(jax.random.key(1), count)
    return [1 + jax.random.uniform(key, (BATCH, N)) for key in keys]


# For each primitive a function with one of it, arguments, and the least arithmetic that it counts as.
OPERATIONS = {
    "cholesky": (lax.linalg.cholesky, matrices(), CUBE / 3),
    "eigh": (lambda a: jnp.abs(lax.linalg.eigh(a)[0]), matrices(), 9 * CUBE),
    "eig": (lambda a: lax.linalg.eig(a)[1].real ** 2, matrices(), 25 * CUBE),
    "hessenberg": (lambda a: jnp.abs(lax.linalg.hessenberg(a)[0]), matrices(), 3 * CUBE),
    "schur": (lambda a: jnp.abs(lax.linalg.schur(a)[0]), matrices(), 25 * CUBE),
    "tridiagonal": (lambda a: lax.linalg.tridiagonal(a)[1], matrices(), CUBE),
    "lu": (lambda a: lax.linalg.lu(a)[0], matrices(), 2 / 3 * CUBE),
    "qr": (lambda a: jnp.abs(lax.linalg.qr(a)[1]), matrices(), CUBE),
    "svd": (lambda a: lax.linalg.svd(a)[1], matrices(), 14 * CUBE),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), matrices(2), CUBE),
    "symmetric_product": (lambda a, c: lax.linalg.symmetric_product(a, c), matrices(2), CUBE),
    "householder_product": (lambda a, t: lax.linalg.householder_product(a, t), [*matrices(), *vectors(1)], CUBE),
    "tridiagonal_solve": (
        lambda a, b, c, d: lax.linalg.tridiagonal_solve(a, 4 + b, c, d),
        [*vectors(3), *matrices()],
        5 * BATCH * N**2,
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_matrices_are_split_by_batch_and_priced(name):
    fn, arguments, least_flops = OPERATIONS[name]
    _, ((vertex, strategies),) = strategies_of(name, fn, *(array(*x.shape) for x in arguments))
    assert split_dimensions(strategies) == {0}
    assert vertex.equation is not None
    assert equation_flops(vertex.equation) >= 0.99 * least_flops
    check_layout(fn, arguments, 0, "device_program")


def solved(a, b):
    return jnp.linalg.solve(a, b)


@pytest.mark.parametrize("executor", ["execution", "device_program"])
def test_solutions_of_linear_equations_are_split_by_batch(executor):
    def gradients(a, b):
        return jax.grad(lambda x, y: jnp.sum(solved(x, y) ** 2), (0, 1))(a, b)

    space, solves = strategies_of("triangular_solve", gradients, *[array(BATCH, N, N)] * 2)
    assert solves
    assert all(split_dimensions(strategies) == {0} for _, strategies in solves)
    assert not space.notes
    check_layout(gradients, matrices(2), 0, executor)


RIGHT_SIDES = {
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), [matrices()[0][0]], 1),
    "triangular_solve of rows": (lambda a, b: lax.linalg.triangular_solve(a, b), [matrices()[0][0]], 0),
    "ormqr": (lambda a, t, c: lax.linalg.ormqr(a, t, c), [matrices()[0][0], vectors(1)[0][0]], 1),
    "ormqr of rows": (
        lambda a, t, c: lax.linalg.ormqr(a, t, c, left=False), [matrices()[0][0], vectors(1)[0][0]], 0,
    ),
    "tridiagonal_solve": (
        lambda a, b, c, d: lax.linalg.tridiagonal_solve(a, 4 + b, c, d), [v[0] for v in vectors(3)], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("executor", ["execution", "device_program"])
@pytest.mark.parametrize("name", RIGHT_SIDES)
def test_right_hand_sides_are_split(name, executor):
    fn, arguments, dim = RIGHT_SIDES[name]
    arguments = [*arguments, jax.random.normal(jax.random.key(7), (N, 2 * N) if dim else (2 * N, N))]
    primitive = name.split(" ")[0]
    _, ((_, strategies),) = strategies_of(primitive, fn, *(array(*x.shape) for x in arguments))
    split = {d for strategy in strategies for d, axes in enumerate(strategy.operands[-1]) if axes}
    assert split == {dim}
    assert all(not any(spec) for strategy in strategies for spec in strategy.operands[:-1])
    for seed in range(2):
        check_layout(fn, arguments, seed, executor)


@pytest.mark.parametrize("executor", ["execution", "device_program"])
def test_ragged_products_are_split_and_priced(executor):
    sizes = jnp.array([5, 0, 9, 2], jnp.int32)

    def gradients(x, w):
        return jax.grad(lambda a, b: jnp.sum(lax.ragged_dot(a, b, sizes) ** 2), (0, 1))(x, w)

    keys = jax.random.split(jax.random.key(0))
    arguments = [jax.random.normal(keys[0], (16, 8)), jax.random.normal(keys[1], (4, 8, 8))]
    _, products = strategies_of("ragged_dot_general", gradients, *(array(*x.shape) for x in arguments))
    assert len(products) == 3
    for vertex, strategies in products:
        assert len(strategies) > 1
        assert vertex.equation is not None
        assert equation_flops(vertex.equation) == 2 * 16 * 8 * 8
    for seed in range(2):
        check_layout(gradients, arguments, seed, executor)


def foreign(x):
    return jax.ffi.ffi_call("somewhere", jax.ShapeDtypeStruct((512, 512), jnp.float32))(x)


def called_back(x):
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((512, 512), jnp.float32), x)


@pytest.mark.parametrize(("fn", "name"), [(foreign, "ffi_call"), (called_back, "pure_callback")])
def test_calls_of_foreign_code_cost_their_bytes_and_are_noted(fn, name):
    space, ((vertex, strategies),) = strategies_of(name, fn, array(512, 512))
    assert len(strategies) == 1
    assert space.node_costs.compute_s(vertex, strategies) == pytest.approx([2 * 512 * 512 * 4 / 1e12])
    (note,) = (n for n in space.notes if "runs whole on every device" in n)
    assert note.startswith(name)
    assert "test_libraries.py" in note
    assert "priced by the bytes of its operands and results" in note
