"""A step that is searched while it trains computes what it would have computed, whatever plans it runs with."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import diffshard
from diffshard.elastic.rates import rate_names, scaled
from diffshard.elastic.replanning import Replanner
from diffshard.elastic.searching_step import SearchingStep, search_while_training
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction
from experiments.host_devices import host_mesh
from experiments.models import mlp
from experiments.models.model import arguments
from tests.diffshard.elastic.small_training import batch_of, init, resumed, train_step

MODEL = mlp.make(layers=2, width=64, batch=32)
MANY_STEPS = 10**7
"""So many that any plan that may be faster is worth a trial."""


def searched(**options) -> PlannedFunction[Plan]:
    """Returns a step that is planned for slow arithmetic and fast links."""
    mesh = host_mesh((2, 4))
    slowness = {name: -np.log(3.0) for name in rate_names(mesh.shape)} | {"arithmetic": np.log(3.0)}
    wrong = scaled(diffshard.preset("cpu", dict(mesh.shape)), slowness)
    options = {"hardware": wrong, "donate_argnums": 0, "progress": "none"} | options
    return diffshard.search(MODEL.step, mesh, **options)


def batches():
    for number in itertools.count():
        yield MODEL.make_batch(jax.random.key(number))


@functools.cache
def expected_losses(num_steps: int) -> list[float]:
    (state, _), step, losses = arguments(MODEL), jax.jit(MODEL.step), []
    for batch in itertools.islice(batches(), num_steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def losses_until_moved(step: SearchingStep, num_moves: int, most_steps: int = 60) -> list[float]:
    """Trains until the state has moved so often, and three steps more."""
    (state, _), losses, steps_after = arguments(MODEL), [], 0
    for batch in itertools.islice(batches(), most_steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
        steps_after += step.num_moves >= num_moves
        if steps_after > 3:
            return losses
        if step._search is not None:  # more steps would be made meanwhile: what is tested does not depend on them
            jax.block_until_ready(state)
            step._search.exception()
    raise AssertionError(f"There were no {num_moves} moves:\n{step}")


def test_losses_are_those_of_one_device_before_and_after_a_move():
    seconds = itertools.count()  # steps that a busy machine makes longer look like a changed environment
    with search_while_training(searched(), MANY_STEPS, window_steps=3, clock=lambda: float(next(seconds))) as step:
        losses = losses_until_moved(step, 1)
    assert step.num_steps == len(losses)
    np.testing.assert_allclose(losses, expected_losses(60)[: len(losses)], rtol=1e-5)
    assert [event.action for event in step.history][:4] == ["begins", "measured", "measured", "tries"]
    assert f"plan {step.history[3].plan}  tries" in str(step)


def test_a_state_goes_back_when_the_tried_plan_is_slower():
    seconds = itertools.count()

    def clock() -> float:  # a step takes ten times as long with any plan but the first
        return next(seconds) * (10.0 if box and box[0].num_moves == 1 else 1.0)

    box: list[SearchingStep] = []
    with search_while_training(searched(), MANY_STEPS, window_steps=3, clock=clock) as step:
        box.append(step)
        losses = losses_until_moved(step, 2)
    np.testing.assert_allclose(losses, expected_losses(60)[: len(losses)], rtol=1e-5)
    assert [(event.action, event.plan) for event in step.history if event.action == "goes back"] == [("goes back", 0)]


def test_a_search_that_fails_leaves_the_training_as_it_is(monkeypatch):
    def fail(*args):
        raise RuntimeError("no plan today")

    monkeypatch.setattr(Replanner, "proposal", fail)
    (state, _), losses, step = arguments(MODEL), [], search_while_training(searched(), MANY_STEPS, window_steps=2)
    assert not step.is_searching
    for batch in itertools.islice(batches(), 3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert step.is_searching
    assert isinstance(step._search.exception(), RuntimeError)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.warns(UserWarning, match="no plan today"):
        state, loss = step(state, next(itertools.islice(batches(), 3, None)))
    losses.append(float(loss))
    np.testing.assert_allclose(losses, expected_losses(60)[:4], rtol=1e-5)
    assert "the search failed: no plan today" in str(step)


def test_a_closed_step_searches_no_more_whatever_was_found():
    step = search_while_training(searched(), MANY_STEPS)
    step._proposal = 1
    assert step.is_searching
    step.close()
    assert not step.is_searching


def test_nothing_is_searched_after_the_last_step():
    state, batch = arguments(MODEL)
    with search_while_training(searched(), 4, window_steps=3) as step:
        for _ in range(6):
            state, _ = step(state, batch)
    assert step.num_moves == 0
    assert step.num_steps == 6


def test_a_training_with_checkpoints_can_be_searched_while_it_trains(tmp_path):
    with resumed(tmp_path, executor=None, hardware="cpu") as training:
        state, losses = training.restore(), []
        assert isinstance(training.step, PlannedFunction)
        with search_while_training(training.step, MANY_STEPS, window_steps=2) as step:
            for number in range(4):
                state, loss = step(state, batch_of(number))
                losses.append(float(loss))
                training.save(number + 1, state)
    uninterrupted, plain = jax.jit(train_step), init()
    for number, loss in enumerate(losses):
        plain, expected = uninterrupted(plain, batch_of(number))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    with resumed(tmp_path, executor=None, hardware="cpu") as training:
        assert training.num_steps == 4
        np.testing.assert_allclose(training.restore()["params"]["up"], plain["params"]["up"], rtol=1e-4, atol=1e-6)


def test_arrays_of_the_host_and_placed_batches_are_taken(recwarn):
    step = searched()
    state, batch = arguments(MODEL)
    first = search_while_training(step, 3)
    _, loss = first(jax.tree.map(jnp.copy, state), jax.tree.map(np.asarray, batch))
    _, other = first(*step.plan(state, batch).shard(state, batch))
    assert float(loss) == float(other)
    assert not [w for w in recwarn if "is moved at every call" in str(w.message)]


def test_a_compiled_step_is_not_compiled_again_when_it_is_called(caplog):
    state, batch = arguments(MODEL)

    def compilations(step: PlannedFunction[Plan]) -> tuple[int, float]:
        caplog.clear()
        with jax.log_compiles(True):
            _, loss = step(state, batch)
        return sum("XLA compilation" in record.getMessage() for record in caplog.records), float(loss)

    plain, compiled = searched(donate_argnums=()), searched(donate_argnums=())
    assert compiled.compile(state, batch) is compiled.compile(state, batch)
    (some, expected), (none, loss) = compilations(plain), compilations(compiled)
    assert (some > 0, none) == (True, 0)
    assert loss == expected


@pytest.mark.parametrize(
    ("step", "options", "error", "message"),
    [
        (lambda: jax.jit(MODEL.step), {}, TypeError, "`step` must be what `diffshard.search` returns"),
        (lambda: searched(objective=lambda step: step.seconds), {}, ValueError, "`objective`"),
        (searched, {"num_steps": 0}, ValueError, "`num_steps` must be a whole number, 1 or more, not 0"),
        (searched, {"window_steps": 2.5}, ValueError, "`window_steps`"),
        (searched, {"time_limit_s": -1}, ValueError, "`time_limit_s`"),
    ],
)
def test_what_cannot_be_searched_while_training_is_refused(step, options, error, message):
    with pytest.raises(error, match=message):
        search_while_training(step(), **({"num_steps": 10} | options))


def test_an_abstract_mesh_is_refused():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    with pytest.raises(ValueError, match="abstract mesh"):
        search_while_training(diffshard.search(MODEL.step, mesh, hardware="h100"), 10)


def test_there_is_no_plan_before_the_first_step():
    with pytest.raises(ValueError, match="before the first step"):
        search_while_training(searched(), 10).plan  # noqa: B018
