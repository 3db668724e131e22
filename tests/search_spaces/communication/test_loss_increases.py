"""Predicted increases of the loss: known errors by hand, on a mesh as simulated, in loops and in branches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from search_spaces.communication.call_sites import alternatives
from tests.search_spaces.communication.small_communication import (
    BATCH,
    PARAMS,
    SPACE,
    SPECS,
    STRATEGIES,
    WIDTH,
    arguments,
    mesh,
    one_site_space,
    small_space,
)

KEY = jax.random.key(7)


def test_increases_are_second_order_terms_of_known_errors():
    """Errors are read off results and gradients, and multiplied by hand."""
    space, params, batch = one_site_space(2)
    specs = {"w": P("model")}
    assert [group.name for group in space.groups] == [
        "all_reduce forward",
        "all_reduce backward",
        "matrices over data gradient",
    ]
    forward, backward, gradient = jax.jit(lambda p: space.loss_increases(p, batch, KEY, step_sizes=0.5))(params)

    def exact(params):
        return batch[0] @ params["w"]

    # Forward: the encoded sum is what a loss that returns it sees; both data rows compute the same here.
    g = jax.grad(lambda y: jnp.square(jnp.tanh(y) - batch[1]).mean())(exact(params))
    summed = small_space(
        lambda params, batch: (lax.psum(batch[0] @ params["w"], "model") * batch[1]).sum(), params, batch, specs,
        (P(None, "model"), P()),
    )  # fmt: skip

    def one_result(choice):
        basis = jnp.eye(2 * WIDTH).reshape(2 * WIDTH, 2, WIDTH)
        read = jax.jit(jax.vmap(lambda b: summed.loss(params, (batch[0], b), [choice, 0, 0], KEY)))
        return read(basis).reshape(2, WIDTH)

    error = one_result(1) - one_result(0)
    expected = 0.5 * 2 * jnp.square((g * error).sum(axis=1)).sum()
    assert float(expected) > 0
    assert float(forward[1]) == pytest.approx(float(expected), rel=1e-2)

    # Gradient: the error of the gradient that arrives.
    def arrived(choice):
        run = jax.jit(lambda p: space.loss_and_gradients(p, batch, choice, space.init_residuals(p), KEY))
        return run(params)[1]["w"]

    error = arrived((0, 0, 1)) - arrived((0, 0, 0))
    assert float(gradient[1]) == pytest.approx(float(0.25 * 0.5 * jnp.square(error).sum()), rel=1e-3)
    assert [float(x[0]) for x in (forward, backward, gradient)] == [0, 0, 0]


def test_backward_increase_of_one_token_is_that_of_the_gradients_error():
    """In the mean over random signs; each parameter with a step size of its own."""
    space, params, batch = one_site_space(1)
    sizes = {"w": jax.random.uniform(jax.random.key(3), params["w"].shape)}

    def arrived(back):
        run = jax.jit(lambda p: space.loss_and_gradients(p, batch, (0, back, 0), space.init_residuals(p), KEY))
        return run(params)[1]["w"]

    # The two rows of data are copies of each other: each sees a half of the error of their sum.
    error = (arrived(1) - arrived(0)) / 2
    loss_increases = jax.jit(jax.vmap(lambda key: space.loss_increases(params, batch, key, step_sizes=sizes)[1][1]))
    results = loss_increases(jax.random.split(KEY, 500))
    expected = float(0.25 * 2 * (sizes["w"] * jnp.square(error)).sum())
    assert expected > 0
    assert float(results.mean()) == pytest.approx(expected, abs=4 * float(results.std()) / 500**0.5)
    assert float(results.std()) / 500**0.5 < 0.1 * expected


def test_increases_of_narrow_parameters_are_about_those_of_wide_ones():
    """Tangents have the parameters' type."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments())
    results = jax.jit(lambda p: small_space(params=params, batch=batch).loss_increases(p, batch, KEY))(params)
    wide = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    for narrow, row in zip(results, wide, strict=True):
        assert 0.5 * row[1] < narrow[1] < 3 * row[1]  # results in bfloat16 round once more


def test_increases_on_a_mesh_and_in_loops():
    simulated = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    real = jax.jit(lambda p: SPACE.on_mesh(mesh()).loss_increases(p, BATCH, KEY))(PARAMS)
    for a, b in zip(simulated, real, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
        assert a[0] == 0
        assert (a[1:] > 0).all()


@pytest.mark.parametrize("split_rows", [False, True])
def test_increases_of_exchanges_in_a_row_are_those_on_the_mesh(split_rows: bool):
    """Second derivatives pass the collectives' transposes, which `jax.vmap` gets wrong where it does not batch them."""

    def loss(params, batch):
        hidden = jnp.tanh(batch @ params["e"])
        sent = lax.all_to_all(hidden.reshape(8, -1, WIDTH), "model", 0, 1, tiled=True)
        inside = jnp.einsum("erm,emn->ern", sent, params["w"])
        back = lax.all_to_all(inside, "model", 1, 0, tiled=True).reshape(hidden.shape)
        gathered = lax.all_gather(back + hidden, ("data", "model"), axis=1, tiled=True)
        return jnp.square(gathered).mean()

    keys = jax.random.split(jax.random.key(5), 3)
    params = {"w": jax.random.normal(keys[0], (8, WIDTH, WIDTH)), "e": jax.random.normal(keys[1], (WIDTH, WIDTH))}
    batch = jax.random.normal(keys[2], (32, WIDTH))
    rows = P("data") if split_rows else P()
    strategies = {direction: STRATEGIES[direction][:2] for direction in STRATEGIES}
    space = small_space(loss, params, batch, {"w": P("model"), "e": P()}, rows, strategies=strategies)
    simulated = jax.jit(lambda p: space.loss_increases(p, batch, KEY))(params)
    real = jax.jit(lambda p: space.on_mesh(mesh()).loss_increases(p, batch, KEY))(params)
    for group, a, b in zip(space.groups, simulated, real, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05)
        assert (a[1:] > 0).all(), group.name


def test_increases_of_sites_in_other_branches_are_those_of_a_loss_that_runs_them():
    """Also in alternatives within alternatives, where both run another branch than the first, in two layers."""

    def summed(x):
        with jax.named_scope("summed"):
            return lax.psum(jnp.tanh(x), "model")

    def nested(x):
        return alternatives("inner", {"plain": jnp.tanh, "summed": summed}, 2 * x)

    ways = {
        "direct": lambda x: summed(2 * x),
        "nested": lambda x: alternatives("outer", {"plain": jnp.cos, "in": nested}, x),
    }

    def loss_increases(way):
        def mixer(params, batch):
            x = batch[0]
            for _ in range(2):
                x = ways[way](x @ params["head"])
            return jnp.square(x - 1).mean()

        space = small_space(mixer, {"head": PARAMS["head"]}, specs={"head": P()})
        results = jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))({"head": PARAMS["head"]})
        names = [group.name.rpartition("/")[2] for group in space.groups]
        return {name: row for name, row in zip(names, results, strict=True) if name.startswith("all_reduce ")}

    direct, inside = loss_increases("direct"), loss_increases("nested")
    assert list(direct) == list(inside) == ["all_reduce forward", "all_reduce backward"]
    for name, row in direct.items():
        assert row[1] > 0
        np.testing.assert_allclose(inside[name], row, rtol=1e-5)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_increases_pass_functions_with_a_custom_backward(clip):
    """Also in a loop, where the function counts its calls in an integer; its backward is not its derivative.

    A backward that clips, where nothing is large, gives the same as one that does not.
    """

    @jax.custom_vjp
    def steep(x, number):
        return jnp.tanh(x), number + 1

    def pull_back(x, cotangents):
        of_x = 3.0 * cotangents[0] * (1 - jnp.tanh(x) ** 2)
        return of_x if clip is None else jnp.clip(of_x, -clip, clip), None

    steep.defvjp(lambda x, number: ((jnp.tanh(x), number + 1), x), pull_back)

    def thrice(x, number):  # the same without one
        y = jnp.tanh(x)
        return 3.0 * y - lax.stop_gradient(2.0 * y), number + 1

    def loss_increases(function):
        def loss(params, batch):
            def layer(carried, w):
                x, number = function(*carried)
                return (lax.psum(x @ w["up"] @ w["down"], "model"), number), None

            x, number = lax.scan(layer, (batch[0], jnp.int32(0)), params["layers"])[0]
            return jnp.square(x - batch[1]).mean() * number

        params = {"layers": PARAMS["layers"]}
        space = small_space(loss, params, specs={"layers": SPECS["layers"]})
        return jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))(params)

    for results, expected in zip(loss_increases(steep), loss_increases(thrice), strict=True):
        assert expected[1] > 0
        np.testing.assert_allclose(results, expected, rtol=1e-4)
