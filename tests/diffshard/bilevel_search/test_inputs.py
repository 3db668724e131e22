"""What users give a search is checked before anything is traced, and errors say what is wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.base import Problem
from search_spaces.numbered import NumberedSpace
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, NothingExact, Perturbed, batch_of, start
from tests.diffshard.bilevel_search.small_search import KEY, plain_loss, run, small_search

TWO = Problem([np.array([1.0, 2.0])], np.zeros((0, 2), int), [])


class _OnlyLoss(NumberedSpace):
    loss = Perturbed.loss


def test_a_space_without_an_exact_choice_is_refused():
    with pytest.raises(ValueError, match="node 0 has no exact strategy"):
        small_search(NothingExact([[1.0, 0.8]], [[2.0, 1.0]]))


def test_an_optimiser_that_needs_the_losss_value_is_refused_and_one_that_keeps_infinities_is_not():
    with pytest.raises(ValueError, match="`weights_optimizer` must take a step from gradients"):
        run(small_search(weights_optimizer=optax.lbfgs(0.1)), 1)

    def init(params):
        del params
        return jnp.array(jnp.inf)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -0.1 * u, updates), state

    _, seen = run(small_search(weights_optimizer=optax.GradientTransformation(init, update)), 3)
    assert not any(metrics.refused for metrics in seen)


def test_a_state_of_another_search_is_refused():
    state, _ = run(small_search(), 1)
    other = small_search(Perturbed([[0.0, 0.3], [0.0, 0.5]], [[2.0, 1.5], [3.0, 1.0]]))
    with pytest.raises(ValueError, match=r"`state` is of another search: its logits have shapes .*\[2, 2\] strategies"):
        other.update(state, batch_of(0), batch_of(1))
    with pytest.raises(ValueError, match="`state` is of another search"):
        other.finish(state)
    with pytest.raises(ValueError, match="what it keeps for `weights_optimizer` is not what this one keeps"):
        small_search(weights_optimizer=optax.adam(0.1)).update(state, batch_of(0), batch_of(1))


def test_what_is_no_state_is_refused():
    search = small_search()
    state: Any = search.init(KEY, start(), batch_of(0))
    both: Any = search.update(state, batch_of(0), batch_of(1))
    with pytest.raises(ValueError, match=r"got a tuple that begins with one; .*`state, metrics = search\.update"):
        search.finish(both)
    with pytest.raises(ValueError, match=r"`state` must be a BilevelState, .* comes before batches; got tuple"):
        search.update(batch_of(0), state, batch_of(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got NoneType"):
        search.relaxed_choice(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choice_every": True}, "`choice_every` must be a positive integer, got True"),
        ({"max_loss_increase": True}, r"`max_loss_increase` must be a positive .* of the loss, got True\.$"),
        ({"max_loss_increase": 0}, "got 0; no lossy strategy fits an increase of 0"),
        ({"cost_weight": False}, "`cost_weight` must be a finite number from 0 on, or a schedule; got False"),
        ({"estimator": "curvature"}, "`estimator` must be a function that follows .*Increase`; got 'curvature'"),
        ({"cost_weight": -0.1}, "`cost_weight` must be a finite number from 0 on"),
        ({"cost_weight": lambda step: -1.0}, "`cost_weight` must be a schedule .* at step 0 it is -1.0"),
        ({"cost_weight": "1"}, "`cost_weight` must be a finite number from 0 on, or a schedule; got '1'"),
        ({"max_loss_increase": "0.5"}, "`max_loss_increase` must be a positive finite number .* got '0.5'"),
        ({"weights_optimizer": None}, "`weights_optimizer` must be an optax gradient transformation"),
        ({"max_loss_increase": 0.0}, "`max_loss_increase` must be a positive finite number"),
        ({"max_loss_increase": None}, "give `max_loss_increase` or `cost_weight`: this space trades"),
        ({"space": Perturbed([[0.0], [0.0]], [[1.0], [1.0]])}, "no node with two strategies"),
        ({"space": Perturbed([[0.0, 0.1]], [[1.0, np.inf]])}, "no node with two strategies that are allowed"),
        ({"space": Perturbed(ERRORS, [[0.0, 1.0, 1.0], [0.0, 1.0]])}, "positive finite cost"),
        ({"space": TWO, "max_loss_increase": None}, "`loss_fn` must be given"),
        ({"space": _OnlyLoss(TWO)}, "it lacks arguments, .* loss_and_gradients, "),
        ({"space": _OnlyLoss(TWO), "max_loss_increase": None}, "it has loss of `search_spaces.base.LossySpace`"),
        ({"space": object()}, "got object, which lacks decode, explain, node_names, problem, strategy_names"),
        ({"space": "sharding"}, "`space` must be a Problem"),
        ({"mesh": {"data": 2}}, "`mesh` must be a Mesh or an AbstractMesh, got {'data': 2}"),
        ({"choice_optimizer": 3}, "`choice_optimizer` must be an optax gradient transformation"),
        ({"weights_optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, "of MultiSteps take its"),
        ({"space": Perturbed}, "needs `fn` and `mesh`"),
        (
            {
                "space": Problem(
                    [np.ones(2), np.ones(2)], np.array([[0, 1]]), [np.array([[0.0, np.inf], [np.inf, 0.0]])]
                ),
                "max_loss_increase": None,
            },
            "forbids pairs",
        ),
    ],
)
def test_what_is_wrong_is_said(options, message: str):
    with pytest.raises(ValueError, match=message):
        small_search(**options)


@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.float32, jnp.bfloat16])
def test_numbers_of_any_library_are_taken(kind):
    search = small_search(max_loss_increase=kind(0.5), choice_every=jnp.int32(2))
    plan, _ = search.finish(search.init(KEY, start(), batch_of(0)))
    assert plan.max_loss_increase == 0.5
    assert isinstance(plan.max_loss_increase, float)


def test_both_a_bound_and_a_weight_are_refused():
    with pytest.raises(ValueError, match="not both"):
        diffshard.bilevel(
            None,
            space=Perturbed(ERRORS, SECONDS),
            weights_optimizer=optax.sgd(0.1),
            max_loss_increase=1.0,
            cost_weight=1.0,
        )


@pytest.mark.parametrize("weighed", [{"max_loss_increase": 1.0}, {"cost_weight": 1.0}])
def test_what_weighs_a_loss_is_refused_where_every_choice_has_the_same(weighed):
    leave_out = "leave out `max_loss_increase` and `cost_weight`"
    with pytest.raises(ValueError, match=f"`space` has no loss of its own .* {leave_out}"):
        diffshard.bilevel(plain_loss, space=TWO, weights_optimizer=optax.sgd(0.1), **weighed)
    with pytest.raises(ValueError, match=f"it lacks arguments, .* loss_and_gradients, .* {leave_out}"):
        diffshard.bilevel(plain_loss, space=_OnlyLoss(TWO), weights_optimizer=optax.sgd(0.1), **weighed)


class _WithoutNotes:
    """A lossy space that lacks one member of `LossySpace`."""

    def __init__(self):
        complete = Perturbed(ERRORS, SECONDS)
        names = {name for name in dir(complete) if not name.startswith("_")} - {"notes"}
        vars(self).update({name: getattr(complete, name) for name in names})


def test_a_lossy_space_that_lacks_a_member_never_trains_as_an_exact_one():
    space: Any = _WithoutNotes()
    options = {"space": space, "weights_optimizer": optax.sgd(0.1)}
    with pytest.raises(ValueError, match=r"give `max_loss_increase` or `cost_weight`: .* check_loss, exact_choice, "):
        diffshard.bilevel(plain_loss, **options)
    with pytest.raises(ValueError, match=r"`space` has no loss of its own \(it lacks notes of"):
        diffshard.bilevel(plain_loss, max_loss_increase=0.1, **options)


def test_a_training_step_is_no_loss():
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] - 0.1 * jax.grad(plain_loss)(state, batch)["w"]}, plain_loss(state, batch)

    wanted = (
        r"`loss_fn` must return one .* scalar.* it returns a tuple of 2 arrays\. .*give the function that it differ"
    )
    problem = diffshard.Problem([np.array([1.0, 2.0])], np.zeros((0, 2), int), [])
    search = diffshard.bilevel(step, space=problem, weights_optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match=wanted):
        search.init(KEY, start(), batch_of(0))

    def unpacked(state: Any, batch: Any) -> Any:
        params, optimizer_state = state
        return (params, optimizer_state), plain_loss(params, batch)

    search = diffshard.bilevel(unpacked, space=problem, weights_optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"not enough values to unpack(.|\n)*`params` the parameters alone"):
        search.init(KEY, start(), batch_of(0))


@pytest.mark.parametrize("key", [0, None, jnp.zeros(2), jax.random.split(KEY)])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match=r"`key` must be a random key, as `jax\.random\.key\(0\)` is; got "):
        small_search().init(key, start(), batch_of(0))


def test_keys_of_the_old_style_are_taken():
    old, new = (small_search().init(key, start(), batch_of(0)) for key in (jax.random.PRNGKey(0), KEY))
    np.testing.assert_array_equal(old.logits[0], new.logits[0])


def test_batches_without_rows_are_refused():
    search, empty = small_search(), jax.tree.map(lambda leaf: leaf[:0], batch_of(0))
    with pytest.raises(ValueError, match=r"`batch` must have at least one row in each of its arrays; got .*\(0, 3\)"):
        search.init(KEY, start(), empty)
    state = search.init(KEY, start(), batch_of(0))
    for name, batches in [("train_batch", (empty, batch_of(0))), ("val_batch", (batch_of(0), empty))]:
        with pytest.raises(ValueError, match=f"`{name}` must have at least one row"):
            search.update(state, *batches)


def test_validation_data_of_other_shapes_are_refused():
    search = small_search()
    state = search.init(KEY, start(), batch_of(0))
    inputs, targets = batch_of(1)
    with pytest.raises(ValueError, match="`val_batch` must have the shapes of `train_batch`"):
        search.update(state, batch_of(0), (inputs[:4], targets[:4]))


def test_batches_of_other_shapes_than_those_of_init_are_refused():
    search = small_search()
    state = search.init(KEY, start(), batch_of(0))
    shorter = jax.tree.map(lambda leaf: leaf[:4], batch_of(0))
    with pytest.raises(ValueError, match="`train_batch` must have the shapes that `init` got"):
        search.update(state, shorter, shorter)
