"""The space: gradients as on one device, emulated as on a mesh, residuals, mixtures, costs."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost.collectives import collective_s
from cost.evaluation import evaluate
from cost.validation import validate
from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.costs import coding_s
from search_spaces.communication.places import alternatives
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact, Schedule
from tests.search_spaces.communication.small_communication import (
    HARDWARE,
    SPECS,
    WIDTH,
    arguments,
    loss_fn,
    mesh,
    one_site_space,
    plain_loss,
    seconds,
    sent_bytes,
    small_space,
)

KEY = jax.random.key(7)
PARAMS, BATCH = arguments()
SPACE = small_space()


def _step(space, choice, state=None, step=0):
    run = jax.jit(lambda p, b, s, k, t: space.loss_and_gradients(p, b, choice, s, k, t))
    return run(PARAMS, BATCH, space.init_residuals(PARAMS) if state is None else state, KEY, step)


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
        return SPACE.loss_and_gradients(PARAMS, BATCH, list(choice), SPACE.init_residuals(PARAMS), KEY, 1)

    _close(run(choice), _step(SPACE, choice.tolist(), step=1), 1e-6)
    run(jnp.array([0, 0, 1, 1]))
    assert len(compiled) == 1


@pytest.mark.parametrize("gradients", [1, 2, 3])
def test_what_was_sent_and_what_is_left_make_the_sum_of_gradients(gradients):
    exact = _step(SPACE, (0, 0, 0, 0))[1]
    run = jax.jit(lambda s, t: SPACE.loss_and_gradients(PARAMS, BATCH, (0, 0, gradients, gradients), s, KEY, t)[1:])
    state, sent, sizes = SPACE.init_residuals(PARAMS), [], []
    for step in range(3):
        arrived, state = run(state, step)
        sent.append(np.asarray(arrived["head"]))
        sizes.append(np.abs(sent[-1]).max())
    total, residuals = np.sum(sent, axis=0), np.asarray(state["head"]).sum(axis=0)
    missing = np.abs(total + residuals - 3 * np.asarray(exact["head"])).max()
    if gradients == 1:
        assert not residuals.any()
        assert missing > 1e-4
    else:
        assert missing < 1e-5
        assert np.abs(residuals).max() > 1e-4
    if gradients == 3:
        assert [size > 0 for size in sizes] == [False, True, False]


def test_narrow_gradients_travel_as_they_are_and_residuals_stay_wide():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    space = small_space(params=params, strategies={"gradient": (Exact(), ErrorFeedback(INT4))})
    exact, fed_back = [0] * 4, [0, 0, 1, 1]
    assert sent_bytes(space, exact) < 0.8 * sent_bytes(SPACE, exact)
    run = jax.jit(lambda choice, s: space.loss_and_gradients(params, BATCH, list(choice), s, KEY)[1:])
    plain, residuals = run(jnp.array(exact), space.init_residuals(params))
    assert plain["head"].dtype == jnp.bfloat16
    assert not residuals["head"].any()
    first, residuals = run(jnp.array(fed_back), residuals)
    second, residuals = run(jnp.array(fed_back), residuals)
    assert residuals["head"].dtype == jnp.float32
    total = first["head"].astype(jnp.float32) + second["head"] + residuals["head"].sum(axis=0)
    twice = 2 * plain["head"].astype(jnp.float32)
    rounding = 2**-6 * float(jnp.abs(twice).max())  # of sums of eight in bfloat16
    assert float(jnp.abs(total - twice).max()) < rounding
    assert float(jnp.abs(residuals["head"].sum(axis=0)).max()) > 2 * rounding


def test_a_schedule_switches():
    schedule = Schedule(Exact(), Encode(INT8), 5, 20)
    space = small_space(
        strategies={direction: (Exact(), schedule) for direction in ("forward", "backward", "gradient")}
    )
    lossy = small_space(strategies={direction: (Encode(INT8),) for direction in ("forward", "backward", "gradient")})
    run = jax.jit(lambda step: space.loss(PARAMS, BATCH, [1] * 4, KEY, step))
    assert float(run(4)) == pytest.approx(float(space.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    assert float(run(5)) == pytest.approx(float(lossy.loss(PARAMS, BATCH, [0] * 4, KEY)), rel=1e-6)
    exact_bytes, lossy_bytes = sent_bytes(space, [0] * 4), sent_bytes(lossy, [0] * 4)
    assert sent_bytes(space, [1] * 4) == pytest.approx(0.25 * exact_bytes + 0.75 * lossy_bytes)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_gradients_of_a_mixture(on_mesh):
    space, params, batch = one_site_space(2)
    space = space.on_mesh(mesh()) if on_mesh else space
    weights = [jnp.array([0.3, 0.7]), jnp.array([1.0, 0.0]), jnp.full(4, 0.25)]
    loss = jax.jit(lambda params, weights: space.loss(params, batch, weights, KEY))
    of_weights = jax.jit(jax.grad(loss, 1))(params, weights)
    for j in range(2):
        bump = [1e-2 * jnp.eye(2)[j], jnp.zeros(2), jnp.zeros(4)]
        up, down = (loss(params, jax.tree.map(lambda w, b, s=s: w + s * b, weights, bump)) for s in (1, -1))
        assert float(of_weights[0][j]) == pytest.approx(float(up - down) / 2e-2, rel=1e-3)
    assert not of_weights[1].any()
    assert not of_weights[2].any()


def test_a_mixture_of_exact_strategies_has_the_plain_gradient():
    loss = jax.jit(lambda params, weights: SPACE.loss(params, BATCH, weights, KEY))
    gradients = jax.jit(jax.grad(loss))
    exact = jax.jit(jax.grad(plain_loss))(PARAMS, BATCH)
    pure = [jnp.eye(len(group.names))[0] for group in SPACE.groups]
    even = [jnp.full(len(group.names), 1 / len(group.names)) for group in SPACE.groups]
    _close(gradients(PARAMS, pure), exact, 1e-6)
    assert _largest_difference(gradients(PARAMS, even), exact) > 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_residuals_stay_float32_and_gradients_have_the_parameters_type(dtype):
    """A state of another type after a step would not fit the step's own branches, loops or compiled code."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), arguments())
        space = small_space(params=params, batch=batch)
        choice, state = [1] * len(space.groups), space.init_residuals(params)
        results = jax.eval_shape(lambda p: space.loss_and_gradients(p, batch, choice, state, KEY), params)
        assert {x.dtype for x in jax.tree.leaves(results[1])} == {jnp.dtype(dtype)}
        assert jax.tree.map(lambda x: x.dtype, results[2]) == jax.tree.map(lambda x: x.dtype, state)
        assert state


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
        assert seconds(SPACE, choice) == pytest.approx(evaluate(problem, list(choice)).cost)
    assert sent_bytes(SPACE, (0, 0, 3, 3)) < sent_bytes(SPACE, (0, 0, 0, 0))


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
    results = {}
    for name, chosen in selections.items():
        choice = space.exact_choice()
        results[name] = space.loss(params, BATCH, [chosen if g == a else c for g, c in enumerate(choice)], KEY)
    x = BATCH[0] @ params["head"]
    whole, half = x @ jnp.ones((WIDTH, WIDTH)), 0.5 * x
    expected = {"whole": whole, "half": half, "mixed": 0.25 * whole + 0.75 * half}
    for name, y in expected.items():
        assert float(results[name]) == pytest.approx(float(jnp.square(y).mean()), rel=1e-5)
    validate(space.problem)
    exact = space.exact_choice()
    without = [1 if g == a else c for g, c in enumerate(exact)]
    gradient_only = sum(space.problem.node_cost[g][c] for g, c in enumerate(exact))
    assert seconds(space, without) == pytest.approx(gradient_only)
    assert seconds(space, without) < seconds(space, exact)
    first, second = jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))(params)[a]
    assert first == 0 < second


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
def test_spaces_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small_space(**options)


def test_choices_and_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one entry for each of 4 groups, got 1"):
        SPACE.loss(PARAMS, BATCH, [0], KEY)
    with pytest.raises(ValueError, match="must be 0 to 1, not 2"):
        seconds(SPACE, [2, 0, 0, 0])
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
        assert sum(t.sent_bytes for t in traffic) == pytest.approx(sent_bytes(SPACE, choice))
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
    assert seconds(small_space(hardware="h100"), [0, 0, 0, 0]) > 0


@pytest.mark.parametrize("make", [Exact, partial(Encode, INT8), partial(ErrorFeedback, INT8), partial(EveryK, 2)])
@pytest.mark.parametrize("fact", ["is_exact", "keeps_residual"])
def test_whether_a_strategy_is_exact_is_no_argument(make, fact):
    with pytest.raises(TypeError, match=fact):
        make(**{fact: True})
