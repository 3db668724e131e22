"""Wrong declarations and uses of kernels say what was expected and what came."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import diffshard
from tests.search_spaces.sharding.small_spaces import array, space_of

product = diffshard.kernel(jnp.matmul, "... k, k n -> ... n", reduction={"k": "sum"})


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A layer as some libraries write it: a function that compares by its arrays, and so has no hash."""

    weights: jax.Array

    def __call__(self, x):
        """Returns the array times the weights."""
        return x * self.weights


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": 3}, TypeError, "`fn` must be a function of arrays, not 3"),
        ({"backward": 3}, TypeError, "`backward` must be a function of arrays or a kernel, not 3"),
        ({"fn": Weighted(jnp.ones(3))}, TypeError, "`fn` must be hashable, .* pass its arrays as operands"),
        ({"backward": Weighted(jnp.ones(3))}, TypeError, "`backward` must be hashable, .* pass its arrays as operands"),
        ({"flops": Weighted(jnp.ones(3))}, TypeError, "`flops` must be hashable"),
        ({"rule": "k -> k", "need_replication": 3}, TypeError, "`need_replication` must be names of factors, .* not 3"),
        ({"rule": "k -> k", "need_replication": [3]}, TypeError, r"`need_replication` must be .* not \[3\]"),
        ({"rule": "k -> ", "reduction": "k"}, TypeError, "`reduction` must be a dictionary from .* not 'k'"),
        ({"rule": "k -> ", "reduction": {"k": ["sum"]}}, TypeError, r"`reduction` must .* not {'k': \['sum'\]}"),
        ({"rule": "k -> ", "reduction": {3: "sum"}}, TypeError, "`reduction` must be .* not {3: 'sum'}"),
        ({"flops": -1.0}, ValueError, "`flops` of kernel 'sin' must be finite and not negative, not -1.0"),
        (
            {"flops": "many"},
            TypeError,
            "`flops` of kernel 'sin' must be a number or a function of one device's operands, not 'many'",
        ),
        ({"flops": 10**400}, ValueError, "`flops` of kernel 'sin' must be finite and not negative, not inf"),
        ({"bytes": float("nan")}, ValueError, "`bytes` of kernel 'sin' must be finite and not negative, not nan"),
    ],
)
def test_declarations_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        diffshard.kernel(**{"fn": jnp.sin, "rule": "... -> ...", **arguments})


@pytest.mark.parametrize("argument", ["flops", "bytes"])
@pytest.mark.parametrize(
    ("price", "error", "message"),
    [
        (None, TypeError, "must be a number, not None"),
        (float("nan"), ValueError, "must be finite and not negative, not nan"),
        (-5.0, ValueError, "must be finite and not negative, not -5.0"),
        (10**400, ValueError, "must be finite and not negative, not inf"),
    ],
    ids=["none", "nan", "negative", "huge"],
)
def test_prices_by_functions_that_are_refused(argument, price, error, message):
    prices: Any = {argument: lambda x: price}
    priced = diffshard.kernel(jnp.sin, "n -> n", name="priced", **prices)
    for fn, x in ((lambda x: priced(x), array(8)), (jax.vmap(priced), array(4, 8))):
        with pytest.raises(error, match=f"`{argument}` of kernel 'priced' {message}"):
            space_of(fn, x).problem  # noqa: B018


def test_a_rule_that_does_not_fit_the_operands():
    with pytest.raises(
        ValueError, match=r"Kernel 'matmul': `rule` .* 'k' has one size everywhere, but it is 16 elsewhe"
    ):
        product(jnp.zeros((8, 16)), jnp.zeros((8, 16)))
    with pytest.raises(TypeError, match=r"Kernel 'matmul' takes 2 operands, as its `rule` .* has, but got 1"):
        product(jnp.zeros((8, 16)))


def test_a_rule_that_does_not_fit_the_results():
    turned = diffshard.kernel(lambda x: x.T, "m n -> m n", name="turned")
    with pytest.raises(
        ValueError, match=r"Kernel 'turned': .* 'm' has one size everywhere, but it is 8 elsewhere and 16"
    ):
        jax.jit(turned)(jnp.zeros((8, 16)))


def test_a_rule_that_fits_whole_arrays_only():
    padded = diffshard.kernel(lambda x: jnp.concatenate([x[:4], jnp.zeros((4, 2))]), "m n -> m n", name="padded")
    with pytest.raises(
        ValueError, match=r"kernel 'padded' .* for one device's operands float32\[.*says .*, but the func"
    ):
        space_of(padded, array(8, 2)).problem  # noqa: B018


def test_a_backward_with_other_arguments():
    wrong = diffshard.kernel(lambda x, y: x * y, "n, n -> n", name="wrong", backward=lambda x, dz: dz)
    with pytest.raises(
        TypeError, match=r"`backward` of kernel 'wrong' gets 4 arrays \(2 operands, 1 results and 1 cot.*x, dz"
    ):
        wrong(jnp.zeros(3), jnp.zeros(3))
    by_kernel = diffshard.kernel(
        jnp.sin, "n -> n", name="wrong", backward=diffshard.kernel(lambda x, dy: dy, "n, n -> n", name="b")
    )
    with pytest.raises(
        TypeError, match=r"`backward` of kernel 'wrong' gets 3 arrays .* but its own `rule` .* has 2 ope"
    ):
        by_kernel(jnp.zeros(3))


def test_a_backward_with_other_results():
    for backward in (lambda x, g, y, dy: dy, diffshard.kernel(lambda x, g, y, dy: dy, "n, m, n, n -> n", name="b")):
        wrong = diffshard.kernel(lambda x, g: x * g[0], "n, m -> n", name="wrong", backward=backward)
        with pytest.raises(
            ValueError, match=r"must return one gradient for each operand .* float32\[3\], float32\[2\]; it"
        ):
            jax.grad(lambda x, g, fn=wrong: fn(x, g).sum(), (0, 1))(jnp.zeros(3), jnp.zeros(2))


def test_an_array_from_outside():
    def fn(x):
        return diffshard.kernel(lambda y: x + y, "n -> n", name="closed")(x)

    with pytest.raises(ValueError, match="Kernel 'closed' reads an array that is traced outside of it"):
        jax.jit(fn)(jnp.zeros(3))


def test_results_that_are_no_arrays():
    with pytest.raises(TypeError, match="must return an array or a tuple of arrays"):
        diffshard.kernel(lambda x: {"a": x}, "n -> n", name="dictionary")(jnp.zeros(3))
