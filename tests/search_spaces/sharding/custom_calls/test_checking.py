"""A rule that is wrong about numbers is found by running the kernel on halves."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import diffshard
from tests.search_spaces.sharding.small_spaces import array

X = array(4, 6)


def product_backward(x, y, z, dz):
    del z
    return dz @ y.T, x.T @ dz


def test_right_rules_are_tried_by_each_factor():
    product = diffshard.kernel(jnp.matmul, "m k, k n -> m n", reduction={"k": "sum"}, backward=product_backward)
    assert diffshard.check_kernel(product, X, array(6, 8)) == ("m", "k", "n")
    largest = diffshard.kernel(lambda x: x.max(1), "m k -> m", reduction={"k": "max"})
    assert diffshard.check_kernel(largest, X) == ("m", "k")
    softmax = diffshard.kernel(jax.nn.softmax, "... k -> ... k", need_replication="k")
    assert diffshard.check_kernel(softmax, array(3, 4, 6)) == ("...1",)
    lookup = diffshard.kernel(lambda table, i: table[i], "rows d, n -> n d")
    assert diffshard.check_kernel(lookup, array(2, 4), array(6, dtype=jnp.int32)) == ("d", "n")


@pytest.mark.parametrize(
    ("fn", "rule", "options", "message"),
    [
        (jax.nn.softmax, "r c -> r c", {}, "wrong about 'c'.*put together.*Name 'c' in `need_replication`"),
        (lambda x: x.mean(1), "r c -> r", {"reduction": {"c": "sum"}}, "wrong about 'c'.*combined by 'sum'"),
        (lambda x: x.sum(1), "r c -> r", {"reduction": {"c": "max"}}, "wrong about 'c'.*or correct `reduction`"),
        (lambda x: jnp.cumsum(x, 0), "r c -> r c", {}, "wrong about 'r'"),
    ],
)
def test_a_wrong_rule_names_its_factor(fn, rule, options, message):
    with pytest.raises(ValueError, match=message):
        diffshard.check_kernel(diffshard.kernel(fn, rule, **options), X)


def test_a_wrong_backward_is_found():
    scaled = diffshard.kernel(
        lambda x: 2 * x, "r c -> r c", need_replication="c", backward=lambda x, y, dy: 2 * dy - dy.mean(0)
    )
    with pytest.raises(ValueError, match="_backward' is wrong about 'r'"):
        diffshard.check_kernel(scaled, X)


def test_a_backward_that_is_a_kernel_is_tried_by_its_own_rule():
    backward = diffshard.kernel(lambda x, y, dy: 2 * dy - dy.mean(1, keepdims=True), "r c, r c, r c -> r c")
    with pytest.raises(ValueError, match="is wrong about 'c'"):
        diffshard.check_kernel(diffshard.kernel(lambda x: 2 * x, "r c -> r c", backward=backward), X)


def test_what_is_no_kernel_is_refused():
    function: Any = jnp.sin
    with pytest.raises(TypeError, match=r"`kernel` must be made by `diffshard\.kernel`"):
        diffshard.check_kernel(function, X)
