"""Starts side by side: equal to one after the other, the best returned, every step counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.initialisation import InitRecord, kaiming, loss_unless_diverged, orthogonal, xavier
from diffshard.successive_halving import Halving, HalvingRecord

RUNGS = (2, 3)
OPTIMIZER = optax.sgd(0.05)


def _init(key):
    a, b = jax.random.split(key)
    return {
        "up": jax.random.normal(a, (4, 16)),
        "bias": jnp.zeros(16),
        "scale": jnp.ones(16),
        "down": 0.3 * jax.random.normal(b, (16, 1)),
    }


def _loss(params, batch):
    inputs, targets = batch
    hidden = jax.nn.relu(inputs @ params["up"] * params["scale"] + params["bias"])
    return jnp.mean(((hidden @ params["down"])[:, 0] - targets) ** 2)


def _batches(count: int = sum(RUNGS) + 1):
    inputs = jax.random.normal(jax.random.key(9), (count, 8, 4))
    return inputs, jnp.sin(inputs.sum(axis=-1))


def _keys(count: int):
    return jax.random.split(jax.random.key(3), count)


def _alone(key, rungs=RUNGS):
    """The last loss of one start, trained by itself."""
    params, batches = _init(key), _batches()
    opt_state = OPTIMIZER.init(params)
    for step in range(sum(rungs)):
        gradients = _gradients(params, jax.tree.map(lambda leaf, step=step: leaf[step], batches))
        updates, opt_state = OPTIMIZER.update(gradients, opt_state)
        params = optax.apply_updates(params, updates)
    return float(_loss(params, jax.tree.map(lambda leaf: leaf[-1], batches)))


_gradients = jax.jit(jax.grad(_loss))


@pytest.mark.parametrize("mesh", [None, (8,), (2, 2)])
def test_starts_side_by_side_are_those_one_after_the_other(mesh):
    """On one device, on more devices than starts are left, and on a mesh of two axes."""
    if mesh is not None:
        mesh = jax.make_mesh(
            mesh,
            ("data", "model")[: len(mesh)],
            (jax.sharding.AxisType.Auto,) * len(mesh),
            devices=jax.devices()[: np.prod(mesh)],
        )
    params, record = diffshard.initialisation.init_search(
        _init, _loss, _keys(5), _batches(), optimizer=OPTIMIZER, rungs=RUNGS, mesh=mesh
    )
    early = [_alone(key, RUNGS[:1]) for key in _keys(5)]
    assert sorted(range(5), key=lambda i: early[i]) == sorted(
        range(5), key=lambda i: next(row.scores[0] for row in record.first.table if row.name == str(i))
    )
    left = sorted(range(5), key=lambda i: early[i])[:3]
    late = [_alone(_keys(5)[i]) for i in left]
    assert record.loss == pytest.approx(min(late), rel=1e-4)
    assert record.first.position == left[int(np.argmin(late))]
    assert record.loss == pytest.approx(float(_loss(params, jax.tree.map(lambda leaf: leaf[-1], _batches()))))
    assert record.steps == 5 * 2 + 3 * 3
    assert record.finer is None


def test_a_finer_sample_lies_around_the_survivors_and_wins_only_if_it_is_better():
    options = {"optimizer": OPTIMIZER, "rungs": RUNGS}
    _, coarse = diffshard.initialisation.init_search(_init, _loss, _keys(4), _batches(), **options)
    params, record = diffshard.initialisation.init_search(
        _init, _loss, _keys(4), _batches(), num_finer=6, spread=0.2, **options
    )
    assert record.first.table == coarse.first.table
    assert record.finer is not None
    assert record.loss <= coarse.loss
    assert record.loss == pytest.approx(min(coarse.loss, record.finer.table[0].scores[-1]), rel=1e-5)
    assert record.steps == coarse.steps + 6 * 2 + 3 * 3
    assert np.isfinite(jax.tree.leaves(params)[0]).all()
    survivors = [np.asarray(start.initial["up"]) for start in coarse.first.trained[:2]]
    for start in record.finer.trained:
        near = max(np.corrcoef(np.asarray(start.initial["up"]).ravel(), s.ravel())[0, 1] for s in survivors)
        assert near > 0.9
        assert np.asarray(start.initial["up"]).std() == pytest.approx(1.0, abs=0.25)
        np.testing.assert_array_equal(start.initial["scale"], np.ones(16))
        np.testing.assert_array_equal(start.initial["bias"], np.zeros(16))


def test_the_dead_and_the_diverged_lose():
    assert loss_unless_diverged(jnp.float32(0.1), jnp.float32(0.0)) == np.inf
    assert loss_unless_diverged(jnp.float32(0.1), jnp.float32(np.nan)) == np.inf
    assert loss_unless_diverged(jnp.float32(0.1), jnp.float32(2.0)) == np.float32(0.1)
    with pytest.raises(ValueError, match="no start that can be trained"):
        diffshard.initialisation.init_search(_init, _loss, _keys(2), _batches(), optimizer=optax.sgd(1e30), rungs=RUNGS)


def test_families_draw_matrices_and_leave_vectors():
    key = jax.random.key(0)

    def wide(key):
        return {"w": jnp.zeros((200, 100)), "kernel": jnp.zeros((3, 3, 16, 32)), "scale": jnp.ones(5)}

    for family, variance, of_kernel in [(xavier, 2 / 300, 2 / (9 * 48)), (kaiming, 2 / 200, 2 / (9 * 16))]:
        params = family(wide)(key)
        assert float(params["w"].var()) == pytest.approx(variance, rel=0.05)
        assert float(params["kernel"].var()) == pytest.approx(of_kernel, rel=0.1)
        np.testing.assert_array_equal(params["scale"], np.ones(5))
    columns = np.asarray(orthogonal(wide)(key)["w"])
    np.testing.assert_allclose(columns.T @ columns, np.eye(100), atol=1e-4)
    different = xavier(wide)(jax.random.key(1))["w"]
    assert not np.allclose(different, xavier(wide)(key)["w"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": jnp.concatenate([_keys(2), _keys(2)])}, "`keys` must all differ, but of 4 only 2 do"),
        ({"keys": jnp.zeros((3, 2), jnp.uint32)}, "`keys` must be an array"),
        ({"batches": _batches(5)}, r"leading axis of 6.*got \[5\]"),
        ({"spread": 0.0}, "`spread` be above 0"),
        ({"num_finer": -1}, "`num_finer` must not be negative"),
        ({"keep": 2.0}, "`keep` must be a share"),
        ({"rungs": 35}, r"`rungs` must be a sequence of positive whole numbers of steps, .* got 35"),
    ],
)
def test_what_is_wrong_is_said(changes, message: str):
    arguments = {"keys": _keys(2), "batches": _batches(), "rungs": RUNGS, **changes}
    with pytest.raises(ValueError, match=message):
        diffshard.initialisation.init_search(_init, _loss, **arguments)


def test_a_record_is_shown_without_arrays():
    record = HalvingRecord("0", (1.0,), 3)
    halved = Halving({"w": jnp.zeros(1000)}, 0, (record,), ({"w": jnp.zeros(1000)},), 3)
    assert repr(InitRecord(halved, None, 0.5, 3)) == "InitRecord(loss=0.5, steps=3, starts=[1])"


def test_finer_starts_are_near_all_survivors_in_turn():
    _, record = diffshard.initialisation.init_search(
        _init, _loss, _keys(4), _batches(), optimizer=OPTIMIZER, rungs=RUNGS, num_finer=5, spread=0.05
    )
    assert record.finer is not None
    survivors = [s.initial for s, row in zip(record.first.trained, record.first.table, strict=True) if row.steps == 5]
    assert len(survivors) == 2

    def nearest(params):
        return min(range(2), key=lambda i: float(jnp.abs(params["up"] - survivors[i]["up"]).max()))

    starts = {row.name: start for row, start in zip(record.finer.table, record.finer.trained, strict=True)}
    assert [nearest(starts[str(i)].initial) for i in range(5)] == [0, 1, 0, 1, 0]
    assert not any(np.array_equal(start.initial["up"], s["up"]) for start in starts.values() for s in survivors)
