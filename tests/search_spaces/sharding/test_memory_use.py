"""What a choice keeps in memory, against a count of every usage at every time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.evaluation import evaluate
from search_spaces.sharding.memory import Usages
from search_spaces.sharding.memory_use import HeldArray, memory_use
from tests.search_spaces.sharding.small_spaces import array, mlp_arguments, mlp_step, space_of


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
