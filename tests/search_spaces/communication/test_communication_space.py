"""The space: gradients as on one device, emulated as on a mesh, residuals, mixtures, loss_increases, costs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost.collectives import collective_s
from cost.evaluation import evaluate
from cost.validation import validate
from search_spaces.communication.costs import coding_s
from search_spaces.communication.places import alternatives
from search_spaces.communication.precision import INT4, INT8
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact, Schedule
from tests.search_spaces.communication.small_communication import (
    HARDWARE,
    SPECS,
    STRATEGIES,
    WIDTH,
    arguments,
    loss_fn,
    mesh,
    plain_loss,
    small_space,
)

KEY = jax.random.key(7)
PARAMS, BATCH = arguments()
SPACE = small_space()


def _step(space, choice, state=None, step=0):
    run = jax.jit(lambda p, b, s, k, t: space.loss_and_gradients(p, b, choice, s, k, t))
    return run(PARAMS, BATCH, space.state(PARAMS) if state is None else state, KEY, step)


def _largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


def _close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


def test_sites_and_groups_of_the_small_network():
    assert [(site.name, site.trips, site.shape) for site in SPACE.sites] == [
        ("mlp/all_reduce forward", 2, (8, WIDTH)),
        ("mlp/all_reduce backward", 2, (8, WIDTH)),
        ("head gradient", 1, (WIDTH, WIDTH)),
        ("layers/down gradient", 1, (2, 16, WIDTH)),
        ("layers/up gradient", 1, (2, WIDTH, 16)),
    ]
    assert [group.sites for group in SPACE.groups] == [(0,), (1,), (2,), (3, 4)]
    assert SPACE.strategy_names(3) == ("exact", "int8", "int8 with error feedback", "exact every 2 steps")
    assert [group.sites for group in small_space(tie=None).groups] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_exact_strategies_give_the_gradients_of_one_device(on_mesh):
    space = SPACE.on_mesh(mesh()) if on_mesh else SPACE
    loss, gradients, _ = _step(space, space.exact_choice())
    expected, expected_gradients = jax.jit(jax.value_and_grad(plain_loss))(PARAMS, BATCH)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    _close(gradients, expected_gradients, 1e-6)


def test_meshes_may_be_explicit_and_axes_of_one_device():
    space = SPACE.on_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2))
    loss, gradients, _ = _step(space, space.exact_choice())
    _close((loss, gradients), _step(SPACE, SPACE.exact_choice())[:2], 1e-6)
    alone = CommunicationSpace(loss_fn, {"data": 1, "model": 1}, PARAMS, BATCH, SPECS, P("data"))
    assert not alone.sites
    assert float(alone.loss(PARAMS, BATCH, [], KEY)) == pytest.approx(float(loss), rel=1e-6)


def test_shapes_are_enough_and_random_keys_may_be_data():
    shapes = jax.eval_shape(lambda: (PARAMS, BATCH))
    assert small_space(params=shapes[0], batch=shapes[1]).groups == SPACE.groups

    def noisy(params, batch):
        data, key = batch
        return loss_fn(params, data) + jax.random.normal(key)

    space = small_space(noisy, batch=(BATCH, KEY), batch_specs=(P("data"), P()))
    loss = jax.jit(lambda p, b: space.loss(p, b, space.exact_choice(), KEY))(PARAMS, (BATCH, jax.random.key(3)))
    assert float(loss) == pytest.approx(
        float(plain_loss(PARAMS, BATCH) + jax.random.normal(jax.random.key(3))), rel=1e-5
    )


@pytest.mark.parametrize("choice", [(1, 1, 1, 1), (1, 0, 2, 3)])
def test_emulation_is_the_mesh(choice):
    """Sums in another order differ by an ulp, which rounding makes a code's step for a few numbers."""
    emulated, real = _step(SPACE, choice), _step(SPACE.on_mesh(mesh()), choice)
    assert float(emulated[0]) == pytest.approx(float(real[0]), rel=1e-5)
    exact = _step(SPACE, (0, 0, 0, 0))
    for a, b, e in zip(*map(jax.tree.leaves, (emulated[1], real[1], exact[1])), strict=True):
        assert np.mean(np.abs(a - b) > 1e-6) < 0.02
        assert np.abs(a - b).max() < 0.02 * np.abs(e).max()
        assert np.abs(a - e).max() > 1e-5  # lossy indeed


def test_a_traced_choice_is_the_known_one():
    choice, compiled = jnp.array([1, 1, 2, 3]), []

    @jax.jit
    def run(choice):
        compiled.append(choice)
        return SPACE.loss_and_gradients(PARAMS, BATCH, list(choice), SPACE.state(PARAMS), KEY, 1)

    _close(run(choice), _step(SPACE, choice.tolist(), step=1), 1e-6)
    run(jnp.array([0, 0, 1, 1]))
    assert len(compiled) == 1


@pytest.mark.parametrize("gradients", [1, 2, 3])
def test_what_was_sent_and_what_is_left_make_the_sum_of_gradients(gradients):
    exact = _step(SPACE, (0, 0, 0, 0))[1]
    run = jax.jit(lambda s, t: SPACE.loss_and_gradients(PARAMS, BATCH, (0, 0, gradients, gradients), s, KEY, t)[1:])
    state, sent, sizes = SPACE.state(PARAMS), [], []
    for step in range(3):
        arrived, state = run(state, step)
        sent.append(np.asarray(arrived["head"]))
        sizes.append(np.abs(sent[-1]).max())
    total, left = np.sum(sent, axis=0), np.asarray(state["head"]).sum(axis=0)
    missing = np.abs(total + left - 3 * np.asarray(exact["head"])).max()
    if gradients == 1:
        assert not left.any()
        assert missing > 1e-4
    else:
        assert missing < 1e-5
        assert np.abs(left).max() > 1e-4
    if gradients == 3:
        assert [size > 0 for size in sizes] == [False, True, False]


def test_narrow_gradients_travel_as_they_are_and_residuals_stay_wide():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    space = small_space(params=params, strategies={"gradient": (Exact(), ErrorFeedback(INT4))})
    exact, fed_back = [0] * 4, [0, 0, 1, 1]
    assert space.sent_bytes(exact) < 0.8 * SPACE.sent_bytes(exact)
    run = jax.jit(lambda choice, s: space.loss_and_gradients(params, BATCH, list(choice), s, KEY)[1:])
    plain, left = run(jnp.array(exact), space.state(params))
    assert plain["head"].dtype == jnp.bfloat16
    assert not left["head"].any()
    first, left = run(jnp.array(fed_back), left)
    second, left = run(jnp.array(fed_back), left)
    assert left["head"].dtype == jnp.float32
    total = first["head"].astype(jnp.float32) + second["head"] + left["head"].sum(axis=0)
    twice = 2 * plain["head"].astype(jnp.float32)
    rounding = 2**-6 * float(jnp.abs(twice).max())  # of sums of eight in bfloat16
    assert float(jnp.abs(total - twice).max()) < rounding
    assert float(jnp.abs(left["head"].sum(axis=0)).max()) > 2 * rounding


def test_a_schedule_switches():
    schedule = Schedule(Exact(), Encode(INT8), 5, 20)
    space = small_space(
        strategies={direction: (Exact(), schedule) for direction in ("forward", "backward", "gradient")}
    )
    lossy = small_space(strategies={direction: (Encode(INT8),) for direction in ("forward", "backward", "gradient")})
    run = jax.jit(lambda step: space.loss(PARAMS, BATCH, [1] * 4, KEY, step))
    assert float(run(4)) == pytest.approx(float(space.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    assert float(run(5)) == pytest.approx(float(lossy.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    exact_bytes, lossy_bytes = space.sent_bytes([0] * 4), lossy.sent_bytes([0] * 4)
    assert space.sent_bytes([1] * 4) == pytest.approx(0.25 * exact_bytes + 0.75 * lossy_bytes)


def _one_site(params, batch):
    h, target = batch
    return jnp.square(jnp.tanh(lax.psum(h @ params["w"], "model")) - target).mean()


def _one_site_space(rows):
    """One sum over hidden units, of so many tokens, the same for both parts of the data axis."""
    params = {"w": PARAMS["layers"]["down"][0]}
    batch = (jax.random.normal(KEY, (rows, 64)), BATCH[1][:rows])
    return small_space(_one_site, params, batch, {"w": P("model")}, (P(None, "model"), P())), params, batch


@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_a_mixture(on_mesh):
    space, params, batch = _one_site_space(2)
    space = space.on_mesh(mesh()) if on_mesh else space
    weights = [jnp.array([0.3, 0.7]), jnp.array([1.0, 0.0]), jnp.full(4, 0.25)]
    loss = jax.jit(lambda params, weights: space.mixed_loss(params, batch, weights, KEY))
    of_weights = jax.jit(jax.grad(loss, 1))(params, weights)
    for j in range(2):
        bump = [1e-2 * jnp.eye(2)[j], jnp.zeros(2), jnp.zeros(4)]
        up, down = (loss(params, jax.tree.map(lambda w, b, s=s: w + s * b, weights, bump)) for s in (1, -1))
        assert float(of_weights[0][j]) == pytest.approx(float(up - down) / 2e-2, rel=1e-3)
    assert not of_weights[1].any()
    assert not of_weights[2].any()


def test_a_mixture_of_exact_strategies_has_the_plain_gradient():
    loss = jax.jit(lambda params, weights: SPACE.mixed_loss(params, BATCH, weights, KEY))
    gradients = jax.jit(jax.grad(loss))
    exact = jax.jit(jax.grad(plain_loss))(PARAMS, BATCH)
    pure = [jnp.eye(len(group.names))[0] for group in SPACE.groups]
    even = [jnp.full(len(group.names), 1 / len(group.names)) for group in SPACE.groups]
    _close(gradients(PARAMS, pure), exact, 1e-6)
    assert _largest_difference(gradients(PARAMS, even), exact) > 1e-5


def test_damages_are_second_order_terms_of_known_errors():
    """Errors are read off results and gradients, and multiplied by hand."""
    space, params, batch = _one_site_space(2)
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
        run = jax.jit(lambda p: space.loss_and_gradients(p, batch, choice, space.state(p), KEY))
        return run(params)[1]["w"]

    error = arrived((0, 0, 1)) - arrived((0, 0, 0))
    assert float(gradient[1]) == pytest.approx(float(0.25 * 0.5 * jnp.square(error).sum()), rel=1e-3)
    assert [float(x[0]) for x in (forward, backward, gradient)] == [0, 0, 0]


def test_backward_damage_of_one_token_is_that_of_the_gradients_error():
    """In the mean over random signs; each parameter with a step size of its own."""
    space, params, batch = _one_site_space(1)
    sizes = {"w": jax.random.uniform(jax.random.key(3), params["w"].shape)}

    def arrived(back):
        run = jax.jit(lambda p: space.loss_and_gradients(p, batch, (0, back, 0), space.state(p), KEY))
        return run(params)[1]["w"]

    # The two rows of data are copies of each other: each sees a half of the error of their sum.
    error = (arrived(1) - arrived(0)) / 2
    loss_increases = jax.jit(jax.vmap(lambda key: space.loss_increases(params, batch, key, step_sizes=sizes)[1][1]))
    found = loss_increases(jax.random.split(KEY, 500))
    expected = float(0.25 * 2 * (sizes["w"] * jnp.square(error)).sum())
    assert expected > 0
    assert float(found.mean()) == pytest.approx(expected, abs=4 * float(found.std()) / 500**0.5)
    assert float(found.std()) / 500**0.5 < 0.1 * expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_residuals_stay_float32_and_gradients_have_the_parameters_type(dtype):
    """A state of another type after a step would not fit the step's own branches, loops or compiled code."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), arguments())
        space = small_space(params=params, batch=batch)
        choice, state = [1] * len(space.groups), space.state(params)
        found = jax.eval_shape(lambda p: space.loss_and_gradients(p, batch, choice, state, KEY), params)
        assert {x.dtype for x in jax.tree.leaves(found[1])} == {jnp.dtype(dtype)}
        assert jax.tree.map(lambda x: x.dtype, found[2]) == jax.tree.map(lambda x: x.dtype, state)
        assert state


def test_damages_of_narrow_parameters_are_about_those_of_wide_ones():
    """Tangents have the parameters' type."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments())
    found = jax.jit(lambda p: small_space(params=params, batch=batch).loss_increases(p, batch, KEY))(params)
    wide = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    for narrow, row in zip(found, wide, strict=True):
        assert 0.5 * row[1] < narrow[1] < 3 * row[1]  # results in bfloat16 round once more


def test_damages_on_a_mesh_and_in_loops():
    emulated = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    real = jax.jit(lambda p: SPACE.on_mesh(mesh()).loss_increases(p, BATCH, KEY))(PARAMS)
    for a, b in zip(emulated, real, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
        assert a[0] == 0
        assert (a[1:] > 0).all()


@pytest.mark.parametrize("split_rows", [False, True])
def test_damages_of_exchanges_in_a_row_are_those_on_the_mesh(split_rows: bool):
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
    emulated = jax.jit(lambda p: space.loss_increases(p, batch, KEY))(params)
    real = jax.jit(lambda p: space.on_mesh(mesh()).loss_increases(p, batch, KEY))(params)
    for group, a, b in zip(space.groups, emulated, real, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05)
        assert (a[1:] > 0).all(), group.name


def test_costs_by_hand():
    problem = SPACE.problem
    validate(problem)
    exact = 2 * collective_s("all_reduce", 8 * WIDTH * 4, 4, HARDWARE.link("model"))
    assert problem.node_cost[0][0] == pytest.approx(float(exact))
    part = 32 + 4  # a fourth of the 128 numbers, and a scale
    link, numbers = HARDWARE.link("model"), 8 * WIDTH
    encoded = collective_s("all_to_all", 4 * part * 4, 4, link) + collective_s("all_gather", 4 * part, 4, link)
    coded = 2 * numbers + numbers / 4 + numbers
    expected = 2 * (float(encoded) + coded * coding_s(INT8, HARDWARE))
    assert problem.node_cost[0][1] == pytest.approx(expected)
    for choice in itertools.product((0, 1), repeat=4):
        assert SPACE.seconds(choice) == pytest.approx(evaluate(problem, list(choice)).cost)
    assert SPACE.sent_bytes((0, 0, 3, 3)) < SPACE.sent_bytes((0, 0, 0, 0))


def test_alternatives_choose_a_function_and_its_communication():
    functions = {
        "whole": lambda x: lax.psum(x @ jnp.ones((WIDTH, WIDTH)) / 4, "model"),
        "half": lambda x: 0.5 * x,
    }

    def mixer(params, batch):
        return jnp.square(alternatives("mixer", functions, batch[0] @ params["head"])).mean()

    params = {"head": PARAMS["head"]}
    space = small_space(mixer, params, specs={"head": P()})
    a = next(g for g, group in enumerate(space.groups) if group.names == ("whole", "half"))
    selections = {"whole": 0, "half": 1, "mixed": jnp.array([0.25, 0.75])}
    found = {}
    for name, chosen in selections.items():
        choice = space.exact_choice()
        found[name] = space.loss(params, BATCH, [chosen if g == a else c for g, c in enumerate(choice)], KEY)
    x = BATCH[0] @ params["head"]
    whole, half = x @ jnp.ones((WIDTH, WIDTH)), 0.5 * x
    expected = {"whole": whole, "half": half, "mixed": 0.25 * whole + 0.75 * half}
    for name, y in expected.items():
        assert float(found[name]) == pytest.approx(float(jnp.square(y).mean()), rel=1e-5)
    validate(space.problem)
    exact = space.exact_choice()
    without = [1 if g == a else c for g, c in enumerate(exact)]
    gradient_only = sum(space.problem.node_cost[g][c] for g, c in enumerate(exact))
    assert space.seconds(without) == pytest.approx(gradient_only)
    assert space.seconds(without) < space.seconds(exact)
    first, second = jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))(params)[a]
    assert first == 0 < second


def test_damages_of_sites_in_other_branches_are_those_of_a_loss_that_runs_them():
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
        found = jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))({"head": PARAMS["head"]})
        names = [group.name.rpartition("/")[2] for group in space.groups]
        return {name: row for name, row in zip(names, found, strict=True) if name.startswith("all_reduce ")}

    direct, inside = loss_increases("direct"), loss_increases("nested")
    assert list(direct) == list(inside) == ["all_reduce forward", "all_reduce backward"]
    for name, row in direct.items():
        assert row[1] > 0
        np.testing.assert_allclose(inside[name], row, rtol=1e-5)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_damages_pass_functions_with_a_way_back_of_their_own(clip):
    """Also in a loop, where the function counts its calls in an integer; the way back is theirs, not the derivative.

    One that clips where nothing is large is as one that does not.
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

    for found, expected in zip(loss_increases(steep), loss_increases(thrice), strict=True):
        assert expected[1] > 0
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie": "all"}, "`tie` must be 'type' or None, not 'all'"),
        ({"strategies": {"sideways": (Exact(),)}}, "`strategies` has a direction 'sideways'"),
        ({"strategies": {"forward": ["int8"]}}, r"has \['int8'\]; give strategies"),
        ({"strategies": {"forward": ()}}, r"`strategies\['forward'\]` must be at least one"),
        ({"strategies": {"forward": (EveryK(2),)}}, "which keep residuals; these are for gradients only"),
        ({"strategies": {"gradient": (ErrorFeedback(INT8),) * 2}}, "each with its own name"),
        ({"specs": {**SPECS, "head": P("rows")}}, "`params` 'head' has an axis 'rows'"),
        ({"specs": {**SPECS, "head": P("model", "model")}}, "'model' splits two"),
        ({"specs": {**SPECS, "head": P(None, None, "model")}}, "with 3 dimensions"),
        ({"specs": {"head": P()}}, "The specs of `params` must be"),
        ({"batch_specs": P(("data", "model"), "data")}, "'data' splits two"),
        ({"params": {**PARAMS, "head": jnp.ones((WIDTH, 16), int)}}, "'head' is int32; parameters must be floating"),
        ({"fn": lambda params, batch: batch[0]}, "`loss_fn` must return one floating-point scalar"),
        (
            {"fn": lambda params, batch: lax.psum(batch[0].sum(), "model", axis_index_groups=[[0, 1], [2, 3]])},
            "a psum with `axis_index_groups` in the function",
        ),
        ({"hardware": "h1000"}, "`hardware` 'h1000' is unknown"),
        (
            {"fn": lambda params, batch: lax.psum(1.0 * batch[0].sum(), "modle")},
            "uses a mesh axis 'modle', but `mesh_axes` has",
        ),
        ({"batch": (jnp.ones((3, WIDTH)), jnp.ones((3, WIDTH)))}, r"Dimension 0 of `batch` '0' is 3"),
    ],
)
def test_spaces_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small_space(**options)


def test_choices_and_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one entry for each of 4 groups, got 1"):
        SPACE.loss(PARAMS, BATCH, [0], KEY)
    with pytest.raises(ValueError, match="must be 0 to 1, not 2"):
        SPACE.seconds([2, 0, 0, 0])
    with pytest.raises(ValueError, match="must be an integer or 2 weights"):
        SPACE.loss(PARAMS, BATCH, [jnp.ones(3), 0, 0, 0], KEY)
    with pytest.raises(ValueError, match="`hardware` is None"):
        _ = small_space(hardware=None).problem
    with pytest.raises(ValueError, match="have no exact strategy"):
        small_space(strategies={"forward": (Encode(INT8),)}).exact_choice()
    with pytest.raises(ValueError, match="`mesh` has axes"):
        SPACE.on_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)))
    with pytest.raises(ValueError, match="`k` must be at least 2, not 1"):
        EveryK(1)
    with pytest.raises(ValueError, match="`switch_step` must lie between 0 and `num_steps`"):
        Schedule(Exact(), Encode(INT8), 0, 10)
    for functions in ({"only": lambda x: x}, [jnp.sin, jnp.cos], {"one": jnp.sin, "other": 1}):
        with pytest.raises(ValueError, match="must be a dict of at least two functions by label"):
            alternatives("one", functions, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as raised:
        alternatives("mixer", {"sum": jnp.sum, "same": lambda x: x}, jnp.ones(3))
    assert "alternatives 'mixer' of sum, same" in "".join(raised.value.__notes__)


def test_sites_of_a_type_over_different_axes_choose_apart():
    """Their links differ in speed."""

    def loss(params, batch):
        with jax.named_scope("mean"):
            x = lax.psum(batch[0] @ params["head"], "model")
            return jnp.square(lax.pmean(x, "data")).mean()

    space = small_space(loss, {"head": PARAMS["head"]}, specs={"head": P()})
    forward = [group for group in space.groups if group.name.startswith("mean/all_reduce forward")]
    assert [group.name for group in forward] == ["mean/all_reduce forward", "mean/all_reduce forward 2"]
    assert [space.sites[group.sites[0]].axes for group in forward] == [("model",), ("data",)]


def test_an_explanation_has_one_part_for_each_group():
    for choice in itertools.product((0, 1), repeat=4):
        parts = SPACE.explain(choice)
        assert [part.name for part in parts] == list(SPACE.node_names)
        assert [part.node for part in parts] == [0, 1, 2, 3]
        assert sum(part.seconds for part in parts) == pytest.approx(evaluate(SPACE.problem, choice).cost)
        traffic = [part.traffic for part in parts if part.traffic is not None]
        assert [t.direction for t in traffic] == ["forward", "backward", "gradient", "gradient"]
        assert [t.count for t in traffic] == [2, 2, 1, 1]  # two layers; gradients of a group travel as one vector
        assert sum(t.sent_bytes for t in traffic) == pytest.approx(SPACE.sent_bytes(choice))
    with pytest.raises(ValueError, match="must be a strategy's index"):
        SPACE.explain([jnp.ones(2), 0, 0, 0])  # type: ignore[list-item]


def test_what_lies_in_a_branch_that_does_not_run_is_not_executed():
    def mixer(params, batch):
        def summed(x):
            return alternatives("inner", {"plain": jnp.tanh, "summed": lambda x: lax.psum(x, "model")}, x)

        return jnp.square(alternatives("outer", {"plain": jnp.cos, "in": summed}, batch[0] @ params["head"])).mean()

    space = small_space(mixer, {"head": PARAMS["head"]}, specs={"head": P()})
    nodes = {name: v for v, name in enumerate(space.node_names)}
    outer, inner = (
        next(v for name, v in nodes.items() if f"{label}/alternatives" in name) for label in ("outer", "inner")
    )
    counts = {}
    for chosen in itertools.product((0, 1), repeat=2):
        choice = [dict(zip((outer, inner), chosen, strict=True)).get(v, 0) for v in nodes.values()]
        traffic = {part.name: part.traffic for part in space.explain(choice) if part.traffic}
        counts[chosen] = [t.count for name, t in traffic.items() if "all_reduce forward" in name]
    assert counts == {(0, 0): [0], (0, 1): [0], (1, 0): [0], (1, 1): [1]}


def test_hardware_may_be_the_name_of_a_preset():
    assert small_space(hardware="h100").seconds([0, 0, 0, 0]) > 0
