"""Layers of experts on eight host devices compute what a loop over tokens computes on one, forward and backward."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import diffshard
from diffshard.checks.collectives import hlo_collectives
from diffshard.experts.expert_moves import ExpertMoves, edge_colours
from diffshard.experts.layout import ExpertLayout
from experiments.models.placed_experts import EXPERT_NAMES, training
from tests.diffshard.experts.small_layouts import NUM_EXPERTS, small_layout

TOKENS, WIDTH, HIDDEN = 32, 4, 5
KEYS = jax.random.split(jax.random.key(0), 5)
GATE = jax.random.normal(KEYS[2], (WIDTH, NUM_EXPERTS))
X = jax.random.normal(KEYS[3], (TOKENS, WIDTH))
PARAMS = {
    "up": jax.random.normal(KEYS[0], (NUM_EXPERTS, WIDTH, HIDDEN)),
    "bias": jax.random.normal(KEYS[4], (NUM_EXPERTS, HIDDEN)),
    "down": jax.random.normal(KEYS[1], (NUM_EXPERTS, HIDDEN, WIDTH)),
}


def expert(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def dense_loss(params, gate, x, factor):
    """All experts of all tokens, of which each token takes its two; the tokens of each of eight devices apart."""
    capacity = min(math.ceil(factor * TOKENS / 8 * 2 / NUM_EXPERTS), TOKENS // 8)

    def block(x):
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ gate), 2)
        gates = gates / gates.sum(axis=1, keepdims=True)
        everything = jax.vmap(lambda w: expert(w, x))(params)
        y, taken, dropped = jnp.zeros_like(x), jnp.zeros(NUM_EXPERTS, int), jnp.int32(0)
        for k in range(2):
            for t in range(len(x)):
                has_room = taken[chosen[t, k]] < capacity
                y = y.at[t].add(jnp.where(has_room, gates[t, k], 0) * everything[chosen[t, k], t])
                taken, dropped = taken.at[chosen[t, k]].add(1), dropped + ~has_room
        return y, taken, dropped

    y, taken, dropped = jax.vmap(block)(x.reshape(8, -1, WIDTH))
    return jnp.square(x + y.reshape(x.shape)).mean(), (taken.sum(axis=0), dropped.sum())


@pytest.fixture(scope="module")
def dense():
    function = jax.value_and_grad(partial(dense_loss, factor=1.0), argnums=(0, 1, 2), has_aux=True)
    return jax.jit(function)(PARAMS, GATE, X)


@pytest.mark.parametrize("name", ["rectangle", "equal groups", "unequal groups"])
def test_results_gradients_and_dropped_tokens_are_those_of_a_loop_over_tokens(name, dense):
    layout = small_layout(name)

    def loss(arrays, gate, x):
        routed = layout.apply(expert, arrays, x, x @ gate, capacity_factor=1.0)
        return jnp.square(x + routed.results).mean(), (routed.num_chosen, routed.num_dropped)

    arrays = layout.shard(PARAMS)
    assert arrays["up"].sharding.spec == PartitionSpec("expert")
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(arrays, GATE, X).compile()
    (value, (num_chosen, num_dropped)), gradients = step(arrays, GATE, X)
    (expected, (taken, dropped)), expected_gradients = dense
    assert int(num_dropped) == int(dropped) > 0
    np.testing.assert_array_equal(num_chosen, taken)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    held = (layout.hold(expected_gradients[0]), *expected_gradients[1:])  # each copy has the sum, empty slots zeros
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, held)
    jax.tree.map(np.testing.assert_array_equal, layout.unshard(arrays), PARAMS)
    collectives = hlo_collectives(step.as_text() or "", dict(layout.mesh.shape))
    kinds = {c.kind for c in collectives if "dispatch" in c.source or "combine" in c.source}
    assert kinds == ({"collective_permute"} if name == "unequal groups" else {"all_to_all"})


@pytest.fixture(scope="module")
def trained_alone():
    return _trained(small_layout("one device"), lambda step, state, batch: jax.jit(step))


def _trained(layout, planned):
    batch = jax.random.normal(KEYS[0], (TOKENS, WIDTH)), jax.random.normal(KEYS[1], (TOKENS, WIDTH))
    init, step = training(layout, HIDDEN, optax.sgd(0.1, momentum=0.9), capacity_factor=NUM_EXPERTS)
    state = jax.jit(init)(KEYS[2], batch[0])
    run = planned(step, state, batch)
    results = []
    for _ in range(2):
        state, result = run(state, batch)
        results.append(result)
    return _whole(layout, state), results


def _whole(layout, state):
    """Returns a state with all experts in their order, on the host."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: np.asarray(
            layout.unshard(x) if {str(getattr(key, "key", "")) for key in path} & set(EXPERT_NAMES) else x
        ),
        state,
    )


@pytest.mark.parametrize(("name", "executor"), [("rectangle", "program"), ("unequal groups", "constraints")])
def test_search_keeps_the_layout_and_plans_the_rest_of_the_step(name, executor, trained_alone):
    layout, plans = small_layout(name), []

    def planned(step, state, batch):
        search = diffshard.search(step, layout.mesh, hardware="h100", executor=executor)
        plans.append(search.plan(state, batch))
        return search

    state, results = _trained(layout, planned)
    shardings = {a.path: a.partition_spec[0] for a in plans[0].arguments if a.shape[1:]}
    assert shardings["state[0]['experts']['up']"] == "expert"
    assert shardings["batch[0]"] == (("data", "expert") if name == "rectangle" else "expert")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, trained_alone[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), results, trained_alone[1])


@pytest.mark.parametrize("name", ["rectangle", "unequal groups"])
def test_experts_and_their_moments_move_to_another_layout(name):
    layout = small_layout(name)
    target = layout.with_experts(
        ((4,), (1, 5), (0,), (2, 3))
        if name == "rectangle"
        else ((3, 4, 5, 1), (3, 5, 0), (1,), (4, 1), (0, 2), (2,), (4, 3), (5, 2, 0))
    )
    state = {"experts": PARAMS, "moments": {"up": 2 * PARAMS["up"]}}
    held = {"gate": GATE, **jax.tree.map(layout.shard, state)}
    moved = layout.move(held, target, names=("up", "bias", "down"))
    assert moved["gate"] is GATE
    expected = jax.tree.map(target.shard, state)
    jax.tree.map(np.testing.assert_array_equal, {k: moved[k] for k in expected}, expected)
    assert moved["experts"]["up"].sharding == expected["experts"]["up"].sharding


def test_moves_are_made_in_as_few_rounds_as_the_busiest_device_has_moves():
    rng = np.random.default_rng(0)
    for _ in range(20):
        edges = rng.integers(0, 6, (25, 2)).tolist()
        colours = edge_colours([(a, b) for a, b in edges], 6)
        degrees = [np.bincount([edge[side] for edge in edges]).max() for side in range(2)]
        assert set(colours) == set(range(max(degrees)))
        for side in range(2):
            assert len({(edge[side], c) for edge, c in zip(edges, colours, strict=True)}) == len(edges)
    layout = small_layout("unequal groups")
    moves = [move for row in layout.places for move in zip(row, row, strict=True)]
    assert not ExpertMoves(8, moves, 3).rounds  # what stays is not sent


def test_plans_give_meshes_and_layouts_of_their_groups():
    plan = diffshard.experts.GroupPlan(
        groups=((3, 0), (1, 2)), expert_workers=((3, 0, 3), (1, 2, 1)), computing_s=(1.0, 1.0),
        exchanging_s=(1.0, 1.0), all_reduce_s=1.0, merging_s=3.0, lower_bound_s=3.0,
        status="optimal", search_s=0.0,
    )  # fmt: skip
    devices = jax.devices()
    layout = plan.layout(devices[4:])
    assert dict(layout.mesh.shape) == {"data": 2, "expert": 2}
    assert np.array(layout.mesh.devices).tolist() == [[devices[7], devices[4]], [devices[5], devices[6]]]
    assert layout.experts == ((0, 2), (1,))
    other = dataclasses.replace(plan, expert_workers=((3, 0, 3), (2, 2, 1))).layout()
    assert dict(other.mesh.shape) == {"expert": 4}
    assert np.array(other.mesh.devices).tolist() == [devices[w] for w in (3, 0, 1, 2)]
    assert other.groups == ((0, 1), (2, 3))
    assert other.experts == ((0, 2), (1,), (2,), (0, 1))
    for wrong, message in (([1, 2], "list of JAX devices"), (devices[:1] * 4, "each device once; .*several times")):
        with pytest.raises(diffshard.PlanError, match=message):
            plan.mesh(wrong)
    with pytest.raises(diffshard.PlanError, match="`axes` must be a tuple of two different names, got 'ab'"):
        plan.mesh(axes="ab")  # pyright: ignore[reportArgumentType]
    with pytest.raises(diffshard.PlanError, match="`devices` must be 4, one for each worker of the plan; there are 3"):
        plan.mesh(devices[:3])
    assignment = diffshard.experts.assign_experts([1.0] * 4, [1.0, 2.0], 4)
    on_mesh = assignment.layout(AbstractMesh((2, 2), ("data", "model")), "model")
    assert on_mesh.experts == assignment.experts
    with pytest.raises(diffshard.PlanError, match=r"must have an axis 'data' of 2 devices.*'data': 3"):
        assignment.layout(AbstractMesh((3, 2), ("data", "model")), "data")


LAYOUT = small_layout("rectangle")
ARRAYS = {"up": jnp.ones((12, 2))}


def abstract_layer(expert):
    return jax.eval_shape(lambda: LAYOUT.apply(expert, ARRAYS, X, X @ GATE))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LAYOUT.hold({"up": X}), "'up' must begin with the 6 experts; its shape is .32, 4."),
        (lambda: LAYOUT.apply(expert, {"up": X}, X, X @ GATE), "'up' must begin with the 12 slots of all devices"),
        (lambda: LAYOUT.apply(expert, ARRAYS, X[:9], X[:9] @ GATE), "multiple of the 8 devices of the mesh, got 9"),
        (lambda: LAYOUT.apply(expert, ARRAYS, X, X), r"`logits` \[T, 6\], got \(32, 4\) and \(32, 4\)"),
        (lambda: LAYOUT.apply(expert, ARRAYS, X, X @ GATE, num_chosen=7), "from 1 to the 6 experts, not 7"),
        (
            lambda: LAYOUT.apply(expert, ARRAYS, X, X @ GATE, capacity_factor=0),
            "`capacity_factor` must be a positive finite number",
        ),
        (lambda: LAYOUT.apply(expert, ARRAYS, X.astype(int), X @ GATE), "`tokens` must be floating point numbers, not"),
        (lambda: abstract_layer(lambda w, x: x.sum()), "one row for each of the 12 tokens"),
        (lambda: abstract_layer(lambda w, x: x > 0), "`expert` must return floating point numbers"),
        (lambda: LAYOUT.with_experts(((0,), (-1,), (3,), ())), "numbered from 0, got -1"),
        (lambda: LAYOUT.move(ARRAYS, LAYOUT, names=("down",)), r"`names` has \['down'\], and no array"),
        (lambda: LAYOUT.move({"up": X}, LAYOUT), "'up' must begin with the 12 slots"),
        (lambda: LAYOUT.move(ARRAYS, small_layout("equal groups")), "`target` has another `mesh`"),
        (lambda: LAYOUT.with_experts(((0,), (1,), (3,), ())), r"missing are \[2\]"),
        (lambda: LAYOUT.with_experts(((0,), (1,), (0,), ())), r"several times there are \[0\]"),
        (lambda: LAYOUT.with_experts(((0, 6), (1, 5), (2, 4), (3,))), "the 6 experts of this layout, not 7"),
        (lambda: LAYOUT.with_experts(((0.5,), (1,), (2,), ())), "a list of whole numbers for each device, not .*0.5"),  # pyright: ignore[reportArgumentType]
        (lambda: LAYOUT.with_experts(3), "a list of whole numbers for each device, not 3"),  # pyright: ignore[reportArgumentType]
        (lambda: LAYOUT.apply(3, ARRAYS, X, X @ GATE), "`expert` must be a function .* not 3"),  # pyright: ignore[reportArgumentType]
        (lambda: abstract_layer(lambda w, x: {"a": x}), "one row for each .* got a dict"),
        (lambda: LAYOUT.with_experts(((0,), (1,))), "entry for each of the 4 devices of 'expert', not 2"),
        (lambda: ExpertLayout(LAYOUT.mesh, "model", (), ()), "`mesh` has no axis 'model'"),
        (
            lambda: dataclasses.replace(LAYOUT, groups=((0, 1), (2,))),
            "must have each of the 4 devices",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
