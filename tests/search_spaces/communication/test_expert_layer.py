"""The expert layer: routed as by hand, on a mesh as simulated, and priced by the capacity that is chosen."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cost.evaluation import evaluate
from cost.validation import validate
from search_spaces.communication.two_layers import balance_loss, expert_layer
from tests.search_spaces.communication.small_communication import MESH, mesh, seconds, sent_bytes, small_space

KEY = jax.random.key(0)
TOKENS, EXPERTS, WIDTH = 12, 4, 8  # tokens on each of eight devices
FACTORS = (2.0, 1.25, 0.5)
SPLIT = P(("data", "model"))
SPECS = {"scale": P(), "gate": P(), "w": P("model")}


def _expert(w, x):
    return jnp.tanh(x @ w)


def _layer(params, x, num_chosen=2, factors=FACTORS):
    logits = x @ params["gate"]
    return expert_layer(
        "experts", x, logits, _expert, params["w"], "model", num_chosen=num_chosen, capacity_factors=factors
    )


def _loss(params, batch):
    x = params["scale"] * batch[0]
    return jnp.square(x + _layer(params, x) - batch[1]).mean()


def _arguments():
    keys = jax.random.split(KEY, 4)
    params = {
        "scale": jnp.linspace(0.5, 1.5, WIDTH),
        "gate": jax.random.normal(keys[0], (WIDTH, EXPERTS)),
        "w": jax.random.normal(keys[1], (EXPERTS, WIDTH, WIDTH)) * WIDTH**-0.5,
    }
    shape = (8 * TOKENS, WIDTH)
    return params, (jax.random.normal(keys[2], shape), jax.random.normal(keys[3], shape))


PARAMS, BATCH = _arguments()
SPACE = small_space(_loss, PARAMS, BATCH, SPECS, SPLIT)
CAPACITY = next(g for g, group in enumerate(SPACE.groups) if not group.strategies)


def _by_hand(params, x, num_chosen, factor):
    """One device's tokens through all experts, one token after the other."""
    capacity = math.ceil(factor * len(x) * num_chosen / EXPERTS)
    gates = np.asarray(jax.nn.softmax(x @ params["gate"]))
    order = np.argsort(-gates, axis=1)[:, :num_chosen]
    taken, y, num_dropped = np.zeros(EXPERTS, int), np.zeros(x.shape), 0
    for k in range(num_chosen):
        for t, e in enumerate(order[:, k]):
            if taken[e] == capacity:
                num_dropped += 1
                continue
            taken[e] += 1
            gate = gates[t, e] / (gates[t, order[t]].sum() if num_chosen > 1 else 1)
            y[t] += gate * np.tanh(np.asarray(x[t]) @ np.asarray(params["w"][e]))
    return y, num_dropped


@pytest.mark.parametrize("num_chosen", [1, 2])
@pytest.mark.parametrize("factor", [8.0, 1.0, 0.5])
def test_tokens_find_their_experts_or_no_room(num_chosen, factor):
    run = jax.shard_map(
        lambda params, x: _layer(params, x, num_chosen, (factor,)),
        mesh=mesh(),
        in_specs=(SPECS, SPLIT),
        out_specs=SPLIT,
        check_vma=False,
    )
    groups = [_by_hand(PARAMS, x, num_chosen, factor) for x in BATCH[0].reshape(8, TOKENS, WIDTH)]
    np.testing.assert_allclose(jax.jit(run)(PARAMS, BATCH[0]), np.concatenate([y for y, _ in groups]), atol=1e-5)
    assert (sum(dropped for _, dropped in groups) > 0) == (factor < 8)


def _choice(capacity, lossy=0):
    return [capacity if g == CAPACITY else lossy for g in range(len(SPACE.groups))]


def _plain_loss(params, batch, factor):
    """The same on one device that holds all experts, each device's tokens apart."""

    def group(x):
        return jax.vmap(lambda x: _layer(params, x, 2, (factor,)), axis_name="model")(x[None])[0]

    x = params["scale"] * batch[0]
    y = jax.vmap(group)(x.reshape(8, TOKENS, WIDTH)).reshape(x.shape)
    return jnp.square(x + y - batch[1]).mean()


@pytest.mark.parametrize("on_mesh", [False, True])
def test_each_capacity_has_the_gradients_of_one_device(on_mesh):
    space = SPACE.on_mesh(mesh()) if on_mesh else SPACE
    run = jax.jit(lambda c, p: space.loss_and_gradients(p, BATCH, _choice(c), space.init_residuals(p), KEY)[:2])
    losses = []
    for number, factor in enumerate(FACTORS):
        results = run(jnp.int32(number), PARAMS)
        expected = jax.jit(jax.value_and_grad(_plain_loss), static_argnums=2)(PARAMS, BATCH, factor)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), results, expected)
        assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(results))
        losses.append(float(results[0]))
    assert len({round(loss, 5) for loss in losses}) == 3


def test_a_mixture_of_capacities_with_lossy_sites_on_a_mesh():
    weights = [jnp.array([0.5, 0.3, 0.2]) if g == CAPACITY else jnp.eye(len(group.names))[1]
               for g, group in enumerate(SPACE.groups)]  # fmt: skip
    simulated, real = (
        jax.jit(jax.value_and_grad(lambda w, space=space: space.loss(PARAMS, BATCH, w, KEY)))(weights)
        for space in (SPACE, SPACE.on_mesh(mesh()))
    )
    assert float(simulated[0]) == pytest.approx(float(real[0]), rel=1e-5)
    np.testing.assert_allclose(simulated[1][CAPACITY], real[1][CAPACITY], rtol=1e-3)
    assert len(set(np.asarray(simulated[1][CAPACITY]).tolist())) == 3


def test_each_capacity_sends_its_own_bytes():
    assert SPACE.strategy_names(CAPACITY) == ("capacity 2", "capacity 1.25", "capacity 0.5")
    operations = [operation for operation in SPACE.operations if operation.branch is not None]
    results = [
        (operation.branch and operation.branch[1], operation.direction, operation.name.split("/")[-2])
        for operation in operations
    ]
    ways = itertools.product(range(3), ("forward", "backward"), ("dispatch", "combine"))
    assert sorted(results) == sorted(ways)
    groups = [group for group in SPACE.groups if SPACE.operations[group.operations[0]].branch is not None]
    assert [len(group.operations) for group in groups] == [3] * 4  # a precision for each way, whatever the capacity
    problem = SPACE.problem
    validate(problem)
    assert [edge.shape for edge in problem.edge_cost] == [(3, 2)] * 4
    assert all((np.diff(edge, axis=0) < 0).all() for edge in problem.edge_cost)
    for choice in itertools.product(range(3), (0, 1)):
        assert seconds(SPACE, _choice(*choice)) == pytest.approx(evaluate(problem, _choice(*choice)).cost)
    sent = [sent_bytes(SPACE, _choice(number)) for number in range(3)]
    row = (
        4 * EXPERTS * WIDTH * 4 * 3 / 4
    )  # a token's float32s for each expert, of which a fourth stays, at four operations
    assert np.diff(sent) == pytest.approx(row * np.diff([12, 8, 3]))  # of 12 tokens with two choices, four experts
    assert sent_bytes(SPACE, _choice(2, 1)) < 0.5 * sent[2]


def test_smaller_capacities_raise_the_loss():
    loss_increases = jax.jit(lambda p: SPACE.loss_increases(p, BATCH, KEY))(PARAMS)
    assert loss_increases[CAPACITY][0] == 0
    assert 0 <= loss_increases[CAPACITY][1] < loss_increases[CAPACITY][2]
    assert all(row[1] > 0 for g, row in enumerate(loss_increases) if g != CAPACITY)  # every precision is measured


def test_balance_is_one_for_even_gates_and_the_number_of_experts_for_one_expert():
    even = 20 * jnp.tile(jnp.eye(EXPERTS), (3, 1))
    assert float(balance_loss(even)) == pytest.approx(1)
    assert float(balance_loss(20 * jnp.tile(jnp.eye(EXPERTS)[0], (5, 1)))) == pytest.approx(EXPERTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": jnp.ones((2, 3, 4))}, r"`tokens` must be \[T, M\] and `logits` \[T, E\]"),
        ({"logits": jnp.ones((6, 7))}, "`logits` are of 7 experts; the 4 devices of 'model' must divide it"),
        ({"params": {"up": jnp.ones((3, 5, 5))}}, "`params` 'up' must begin with this device's 2 experts"),
        ({"num_chosen": 9}, "`num_chosen` must be from 1 to the 8 experts, not 9"),
        ({"capacity_factors": (1.0, 0.0)}, "`capacity_factors` must be at least one, positive and distinct"),
        ({"capacity_factors": (1.0, math.nan)}, "`capacity_factors` must be at least one, positive and distinct"),
        ({"capacity_factors": (1.0, 1.0000001)}, "`capacity_factors` must be .* distinct to six digits"),
        ({"capacity_factors": ()}, "`capacity_factors` must be at least one, positive and distinct"),
    ],
)
def test_layers_that_do_not_fit_are_refused(options, message):
    arguments = {"tokens": jnp.ones((6, 5)), "logits": jnp.ones((6, 8)), "params": {"up": jnp.ones((2, 5, 5))}}
    arguments = {"name": "experts", "expert": lambda w, x: x @ w["up"], "axis": "model", **arguments, **options}
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(lambda: expert_layer(**arguments), axis_env=list(MESH.items()))()
