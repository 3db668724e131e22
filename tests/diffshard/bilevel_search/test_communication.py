"""The search on the space of communication strategies: a tensor- and data-parallel layer pair over slow links."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import diffshard
from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, Exact

AXES = {"data": 2, "model": 2}
HARDWARE = diffshard.Hardware("slow links", 1e15, np.inf, np.inf, {axis: diffshard.Link(0.0, 1e-9) for axis in AXES})
STRATEGIES = {
    "forward": (Exact(), Encode(INT8), Encode(INT4)),
    "backward": (Exact(), Encode(INT8)),
    "gradient": (Exact(), Encode(INT8), ErrorFeedback(INT4)),
}
WIDTH, HIDDEN, TOKENS = 256, 512, 8


def _loss(params, batch):
    """One device's loss: the first matrix split by columns, the second by rows, tokens over `data`."""
    inputs, targets = batch
    with jax.named_scope("mlp"):
        hidden = jax.nn.gelu(inputs @ params["up"])
        outputs = jax.lax.psum(hidden @ params["down"], "model")
    return jnp.mean((outputs - targets) ** 2)


def _params():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def _batch(seed: int):
    inputs = jax.random.normal(jax.random.key(100 + seed), (TOKENS, WIDTH))
    return inputs, jnp.sin(3 * inputs)


def _search(mesh, most: float, loss=_loss) -> diffshard.formats.BilevelSearch:
    split = PartitionSpec("data", None)
    space = functools.partial(
        CommunicationSpace,
        param_specs={"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)},
        batch_specs=(split, split),
        strategies=STRATEGIES,
        hardware=HARDWARE,
    )
    return diffshard.bilevel(
        loss,
        mesh,
        space=space,
        weights_optimizer=optax.adam(1e-3),
        choice_optimizer=optax.adam(0.05),
        max_loss_increase=most,
    )


def _run(search: diffshard.formats.BilevelSearch, steps: int):
    """The state and the last step's metrics after one step or more."""
    state = search.init(jax.random.key(1), _params(), _batch(0))
    for step in range(steps - 1):
        state, _ = search.update(state, _batch(2 * step), _batch(2 * step + 1))
    return search.update(state, _batch(2 * steps), _batch(2 * steps + 1))


def test_it_is_searched():
    search = _search(jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES)), 0.05)
    state, metrics = _run(search, 3)
    assert not metrics.refused
    assert state.num_refused == 0
    assert 0 < metrics.cost_ratio < 1
    plan, params = search.finish(state)
    assert plan.feasible
    assert plan.cost_ratio <= 1
    assert len(plan.strategies) == len(search.space.node_names)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, _params())


def test_a_mesh_of_one_device_leaves_nothing_to_choose():
    search = _search(jax.sharding.AbstractMesh((1, 1), tuple(AXES)), 0.05)
    with pytest.raises(
        ValueError, match=r"`mesh` is of one device, .* nothing is communicated, so there is nothing to"
    ):
        search.init(jax.random.key(1), _params(), _batch(0))


def _without_sum(params, batch):
    inputs, targets = batch
    return jnp.mean((jax.nn.gelu(inputs @ params["up"]) @ params["down"] - targets) ** 2)


def test_a_loss_without_its_sum_is_refused_before_anything_trains():
    search = _search(jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES)), 0.05, loss=_without_sum)
    with pytest.raises(ValueError, match=r"so that another model would train.*`jax\.lax\.psum\(x, 'model'\)`"):
        search.init(jax.random.key(1), _params(), _batch(0))
    shapes = jax.eval_shape(search.init, jax.random.key(1), _params(), _batch(0))
    assert jax.tree.map(jnp.shape, shapes.params) == jax.tree.map(jnp.shape, _params())
    with pytest.raises(ValueError, match="another model would train"):  # shapes alone have shown nothing
        search.init(jax.random.key(1), _params(), _batch(0))


def test_a_mesh_of_devices_gives_the_simulations_numbers():
    abstract = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES))
    real = jax.make_mesh(
        tuple(AXES.values()), tuple(AXES), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    seen = [_run(_search(mesh, 0.05), 2) for mesh in (abstract, real)]
    for one, other in zip(jax.tree.leaves(seen[0][0].logits), jax.tree.leaves(seen[1][0].logits), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert seen[0][1].train_loss == pytest.approx(float(seen[1][1].train_loss), rel=1e-5)


def test_candidates_with_residuals_and_schedules_are_trained():
    search = _search(jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES)), 1.0)
    state, _ = _run(search, 2)
    data = diffshard.formats.CandidatesData(
        _params(),
        [_batch(1000 + i) for i in range(8)],
        [_batch(2000)],
        jax.random.key(5),
        rungs=(2, 6),
        num_candidates=5,
    )
    plan, _ = search.finish(state, candidates_data=data)
    assert plan.validation is not None
    assert plan.loss_increase <= 1.0
    assert plan.cost_ratio < 0.8
    losses = [tried.loss for tried in plan.validation.table]
    assert np.isfinite(losses).all()
    assert len({round(loss, 7) for loss in losses}) > 2  # strategies do change training
