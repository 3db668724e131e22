"""Peaks worked by hand: arrays of 8 x 8 numbers of 4 bytes have 256 bytes, which is N here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cost.evaluation import evaluate
from search_spaces.sharding import scheduling
from search_spaces.sharding.memory import HeldArray, Usages, memory_use
from tests.search_spaces.sharding.small_spaces import (
    array,
    hardware_of,
    mlp_arguments,
    mlp_step,
    scan_of_layers,
    space_of,
)

X = array(8, 8)
N = 256


def peak(fn, *args, donated=(), stored=None, **options):
    """The peak where everything is whole on every device, but for how the arguments in `stored` are stored."""
    space = space_of(fn, *args, sizes=(4,), donated=donated, **options)
    choice = [0] * len(space.nodes)
    for argument, (stored_spec, read_spec) in (stored or {}).items():
        specs = [(s.unreduced[0], s.results[0]) for s in space.nodes[argument].strategies]
        choice[argument] = specs.index((stored_spec, read_spec))
    return evaluate(space.problem, choice).peak


def test_arguments_live_throughout_unless_they_are_donated():
    def fn(a, b):
        return (a @ b) @ b

    assert peak(fn, X, X) == 4 * N  # a, b, and the second product beside the first
    assert peak(fn, X, X, donated=(0,)) == 3 * N  # a is dead when the second product is made


def test_a_donated_argument_that_is_a_result_as_well_lives_throughout():
    assert peak(lambda a, b: (a, a @ b), X, X, donated=(0, 1)) == 3 * N
    assert peak(lambda a, b: (a, (a @ b) @ b @ b), X, X, donated=(0, 1)) == 4 * N


def test_an_elementwise_kernel_writes_over_an_operand_that_dies():
    assert peak(jnp.tanh, X) == 2 * N
    assert peak(jnp.tanh, X, donated=(0,)) == N
    assert peak(lambda a, b: jnp.tanh(a @ b), X, X) == 3 * N  # over the product
    assert peak(lambda a, b: _with_tanh(a @ b), X, X) == 4 * N  # beside the product, which is a result
    assert peak(lambda a: (jnp.tanh(a), jnp.sin(a)), X, donated=(0,)) == 2 * N  # the second of two readers does


def _with_tanh(y):
    return y, jnp.tanh(y)


def test_an_array_that_is_only_sliced_at_a_traced_place_is_not_written():
    def fn(a, i):
        return jax.lax.dynamic_slice_in_dim(jnp.sin(a), i, 2)

    assert peak(fn, X, jax.ShapeDtypeStruct((), "int32")) == N + N / 4  # a, and the slice


def test_only_an_array_of_the_same_size_is_written_over():
    assert peak(lambda a: a.astype(jnp.bfloat16), X, donated=(0,)) == N + N / 2
    assert peak(lambda a: jnp.broadcast_to(a, (3, 8, 8)) * 2.0, X, donated=(0,)) == N + 3 * N


def test_updates_write_over_what_they_update():
    row = array(1, 8)

    def write(cache, row):
        return jax.lax.dynamic_update_slice(cache, row, (2, 0))

    assert peak(write, X, row, donated=(0,)) == N + N / 8
    assert peak(write, X, row, donated=(1,)) == 2 * N + N / 8
    # The row is seen in another shape, and the place in the table takes 4 bytes.
    assert peak(lambda table, row: table.at[3].add(row[0]), X, row, donated=(0,)) == N + 2 * N / 8 + 4


def test_what_a_fused_operation_reads_lives_until_its_reader():
    def fn(a, b):
        first = a @ b
        doubled = 2 * first  # computed by the addition
        return doubled + b @ a

    # The first product lives beside the second, and the sum is written over it.
    assert peak(fn, X, X) == 4 * N


def test_the_exponentials_of_a_cross_entropy_are_computed_again_and_its_logits_are_kept():
    """There are the logits and their gradient in bfloat16, and that gradient in float32; no exponentials."""
    rows, width, words = 8, 2, 64

    def step(x, w, labels):
        def loss(x):
            logits = (x @ w).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return jax.value_and_grad(loss)(x)

    half = jnp.bfloat16
    found = peak(step, array(rows, width, dtype=half), array(width, words, dtype=half), array(rows, dtype=jnp.int32))
    in_bfloat16, others = 2 * rows * words, 2 * (rows + words) * width + 4 * rows
    assert 4 * in_bfloat16 <= found - others < 4.5 * in_bfloat16


def test_what_is_expensive_and_read_twice_is_written():
    # Both sums read what the kernel makes: tanh is written for them, an addition is not.
    assert peak(lambda a: (jnp.tanh(a).sum(0), jnp.tanh(a).sum(1)), X) <= 2 * N
    shared = [lambda a, f=f: _sums(f(a)) for f in (jnp.tanh, lambda a: a + 1)]
    assert [peak(fn, X) for fn in shared] == [2 * N + 2 * N / 8, N + 2 * N / 8]


def _sums(y):
    return y.sum(0), y.sum(1)


def test_a_product_reads_operands_from_memory_in_any_layout():
    assert peak(lambda a, b: a.T @ b, X, X) == 3 * N
    assert peak(lambda a, b: (2 * a) @ b, X, X) == 4 * N


def test_what_a_product_reads_through_a_view_is_written():
    assert peak(lambda a, b: (2 * a).T @ b, X, X) == 4 * N
    # An image of twice the rows is repeated before the product: it has 2 N, and so has the product.
    assert peak(lambda a, b: jnp.repeat(a, 2, axis=0) @ b, X, X) == 6 * N


def test_a_loop_has_one_buffer_for_what_it_carries():
    def fn(a):
        carried = jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), a)
        return carried @ a

    assert peak(fn, X) == 3 * N  # a, the carry, the product

    def two_products(a):
        carried = jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), a)
        return (carried @ a) @ carried

    assert peak(two_products, X) == 4 * N  # a, the carry, both products


def test_a_scan_has_a_slice_of_what_it_reads_and_all_of_what_it_leaves():
    weights, x = array(3, 8, 8), array(4, 8)
    # At the product: 3 N of weights, x of N / 2, the carry of N / 2, a slice of N, the product of N / 2, and three rows
    # of N / 8, which the trips fill.
    assert peak(scan_of_layers, weights, x) == 3 * N + N / 2 + N / 2 + N + N / 2 + 3 * N / 8


def test_a_scan_with_one_trip_has_no_arrays_that_its_body_alone_has_not():
    def scanned(stacked, x):
        def layer(x, w):
            h = x @ w
            return jnp.tanh(h) @ w, h

        return jax.lax.scan(layer, x, stacked)

    # The weights, x, the carry that x is copied to, the products and the tanh: no slice, and h is there once.
    assert peak(scanned, array(1, 8, 8), X) == 6 * N
    assert peak(scanned, array(2, 8, 8), X) == 6 * N + N + N + 2 * N  # more weights, a slice, and two trips of h


def test_a_barrier_copies_nothing():
    def fn(a, b):
        c = a @ b
        (c, b) = jax.lax.optimization_barrier((c, b))
        return jnp.tanh(c @ b) @ b

    assert peak(fn, X, X) == 4 * N  # a, b, and two products


def test_a_loop_reads_what_is_before_it_from_memory():
    def fn(a, b):
        doubled = 2 * a  # would be computed by its reader if no loop lay between
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ b + doubled), b)

    # a, b, the doubled array, the carry, and the product, over which the tanh is written.
    assert peak(fn, X, X) == 5 * N


def test_captured_arrays_live_throughout():
    captured = np.ones((8, 8), np.float32)
    assert peak(lambda a: ((a @ captured) @ a) @ a, X) == 4 * N


ROWS, WHOLE = ((0,), ()), ((), ())


def two_layers(w, x):
    return jnp.tanh(x @ w) @ w


def test_a_gathered_copy_takes_memory_beside_what_is_stored():
    # The second product: x, the tanh, the result, and of w a quarter that is stored and a copy of all of it.
    assert peak(two_layers, X, X) == 4 * N
    assert peak(two_layers, X, X, stored={0: (ROWS, WHOLE)}) == 4 * N + N / 4


def test_a_gathered_copy_lives_until_a_product_reads_it_in_another_layout():
    def tied(w, x):
        return jnp.tanh(x @ w) @ w.T

    # As above: nothing writes the transposed copy, so that the second product reads the copy itself.
    assert peak(tied, X, X) == 4 * N
    assert peak(tied, X, X, stored={0: (ROWS, WHOLE)}) == 4 * N + N / 4


def test_a_gathered_copy_ends_with_its_last_reader():
    def fn(w, x):
        return ((jnp.tanh(x @ w) @ w) @ x) @ x

    # The second product is the peak: x, the tanh, the result and the copy. Later there are three arrays.
    assert peak(fn, X, X, stored={0: (ROWS, WHOLE)}) == 4 * N + N / 4


def overlapping(**options):
    """Hardware on which weights are gathered beside the product before their reader."""
    return dataclasses.replace(hardware_of("x", latency_s=0.0), exposed_share=0.25, **options)


def test_what_is_gathered_early_takes_memory_beside_the_product_before(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def four_products(v, w, x):
        return (((x @ v) @ v) @ w) @ w

    row = array(1, 8)  # N / 8
    stored = dict.fromkeys((0, 1), (ROWS, WHOLE))
    # The second product: both weights stored, the copy of one that it reads and the copy of the other for the third;
    # x, the first product, and the second.
    early = 2 * N / 4 + 2 * N + 3 * N / 8
    assert peak(four_products, X, X, row, stored=stored, hardware=overlapping()) == early
    # Where nothing is gathered early, the copies do not meet.
    assert peak(four_products, X, X, row, stored=stored) == early - N


def test_what_is_converted_early_takes_memory_beside_the_product_before(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def four_products(v, w, x):
        v = v.astype(jnp.bfloat16)
        x = (x @ v) @ v
        w = w.astype(jnp.bfloat16)
        return (x @ w) @ w

    row = array(1, 8, dtype=jnp.bfloat16)  # N / 16
    # The second product: both weights, both of them converted to half the bytes, x and two products.
    early = 2 * N + 2 * N / 2 + 3 * N / 16
    assert peak(four_products, X, X, row, hardware=overlapping()) == early
    assert peak(four_products, X, X, row) == early - N / 2


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_what_is_live(seed):
    space = space_of(mlp_step, *mlp_arguments(), donated=(0,))
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(node.strategies))) for node in space.nodes]
    usages, use = space.usages, memory_use(space.usages, choice)
    amounts = [num_bytes[choice[node]] for node, num_bytes in zip(usages.node, usages.num_bytes, strict=True)]
    for time, num_bytes in zip(use.times, use.num_bytes, strict=True):
        live = [a for a, (start, end) in zip(amounts, usages.interval, strict=True) if start <= time < end]
        assert num_bytes == pytest.approx(sum(live))
    assert use.num_bytes.max() == pytest.approx(float(np.max(evaluate(space.problem, choice).peak)))
    assert sum(held.num_bytes for held in use.at_peak) == pytest.approx(use.num_bytes.max())
    assert space.summarize(choice).peak_bytes == use.num_bytes.max()
    sizes = [held.num_bytes for held in use.at_peak]
    assert sizes == sorted(sizes, reverse=True)


def test_what_ends_where_the_peak_begins_is_no_part_of_it():
    """Of two nodes: 5 bytes at times 0 and 1, 7 at 2 and 3, and 1 at 1 and 2."""
    num_bytes = [np.array([5.0]), np.array([7.0]), np.array([1.0])]
    usages = Usages([0, 0, 1], num_bytes, [(0, 2), (2, 4), (1, 3)], [10, 11, 12], [False, True, False])
    use = memory_use(usages, [0, 0])
    assert dict(zip(use.times.tolist(), use.num_bytes.tolist(), strict=True)) == {0: 5, 1: 6, 2: 8, 3: 7, 4: 0}
    assert use.at_peak == (HeldArray(11, True, 7.0), HeldArray(12, False, 1.0))


def test_a_function_without_arrays_uses_nothing():
    use = space_of(lambda x: x + 1.0, array()).summarize([0, 0]).memory
    assert use.num_bytes.max() == 0
    assert use.at_peak == ()


def test_what_nobody_reads_takes_no_memory():
    """Rematerialised bodies keep operations whose results only the removed part of the forward pass read."""

    def fn(x):
        jax.lax.exp(jnp.broadcast_to(x[:, None], (8, 1024)))
        return x * 2.0

    space = space_of(fn, array(8))
    use = space.summarize([0] * len(space.nodes)).memory
    # Without the fix, 8 x 1024 numbers; the argument and the result have 8 each.
    assert use.num_bytes.max() == 2 * 8 * 4


def test_an_effect_is_kept_with_what_it_reads():
    def fn(x):
        jax.debug.print("{}", jnp.sin(x))
        return x[:1] * 2.0

    space = space_of(fn, array(8))
    names = {space.graph.vertices[v.vertex].primitive for v in space.graph.values if space.lifetimes.is_written[v.id]}
    assert "sin" in names
