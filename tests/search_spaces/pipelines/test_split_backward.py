"""A backward program in two halves: the same results, every product once, and what lies between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from cost.compute import equation_work, inner_jaxprs
from search_spaces.pipelines.divided_program import DividedProgram, flattened

LAYERS, WIDTH, KEY = 3, 6, jax.random.key(0)
WEIGHTS = {
    "up": jax.random.normal(KEY, (LAYERS, WIDTH, 4)),
    "down": jax.random.normal(KEY, (LAYERS, 4, WIDTH)),
    "shared": jax.random.normal(KEY, (WIDTH, WIDTH)),
}
X = jax.random.normal(KEY, (5, WIDTH))


def layer(x, weights, shared):
    return x + jnp.tanh(jnp.tanh(x @ weights["up"]) @ weights["down"]) @ shared


def scanned(weights, x, remat=False):
    """A scan whose layers share weights as well, so that its reverse scan carries a gradient of weights."""
    own = {name: weights[name] for name in ("up", "down")}
    body = jax.checkpoint(layer) if remat else layer
    return lax.scan(lambda x, w: (body(x, w, weights["shared"]), None), x, own)[0]


def unrolled(weights, x):
    for n in range(LAYERS):
        x = jax.jit(layer)(x, {name: weights[name][n] for name in ("up", "down")}, weights["shared"])
    return x


FUNCTIONS = {
    "scanned": scanned,
    "rematerialised": lambda weights, x: scanned(weights, x, remat=True),
    "unrolled": unrolled,
    "scan in a scan": lambda weights, x: lax.scan(lambda x, _: (scanned(weights, x), None), x, None, length=2)[0],
}


def backward_of(function):
    """Returns a backward program: of the gradient of the result to those of the activations and the weights."""
    _, pull = jax.vjp(function, WEIGHTS, X)
    flat, tree = jax.tree.flatten(pull)

    def backward(cotangent, residuals):
        weights, x = jax.tree.unflatten(tree, residuals)(cotangent)
        return x, *jax.tree.leaves(weights)

    return jax.make_jaxpr(backward)(X, flat), [X, *flat]


def product_flops(jaxpr, trips=1):
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += trips * equation_work(equation).flops
        for inner in inner_jaxprs(equation):
            inner = getattr(inner, "jaxpr", inner)
            total += product_flops(inner, trips * equation.params.get("length", 1))
    return total


@pytest.mark.parametrize("name", FUNCTIONS)
def test_halves_give_the_results_of_the_whole_and_run_each_product_once(name):
    program, operands = backward_of(FUNCTIONS[name])
    divided = DividedProgram(flattened(program), [True, False, False, False])
    (x,), left = divided.first(operands)
    weights = divided.second(operands, left)
    expected = core.jaxpr_as_fun(program)(*operands)
    for found, whole in zip([x, *weights], expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
    assert len(left) == divided.num_left > 0
    first = jax.make_jaxpr(divided.first)(operands)
    second = jax.make_jaxpr(divided.second)(operands, left)
    flops = [product_flops(half.jaxpr) for half in (first, second)]
    assert sum(flops) == product_flops(program.jaxpr)
    assert flops[1] == product_flops(jax.make_jaxpr(FUNCTIONS[name])(WEIGHTS, X).jaxpr)  # one product for each forward


def test_a_product_whose_results_are_all_in_the_first_half_leaves_nothing():
    program, operands = backward_of(FUNCTIONS["unrolled"])
    divided = DividedProgram(flattened(program), [True] * 4)
    assert divided.num_left == 0
    assert not divided.has_work
    assert len(divided.first(operands)[0]) == 4


def test_what_the_second_half_can_move_itself_is_not_left():
    def program(x, w):
        wide = jnp.broadcast_to(x[:, None], (4, 3))
        return (wide @ w).sum(), w.T @ wide.T

    traced = jax.make_jaxpr(program)(jnp.ones(4), jnp.ones((3, 2)))
    assert DividedProgram(traced, [True, False]).num_left == 0
