"""Every estimator keeps the rules of `diffshard.bilevel_search.base.Estimator`; a new one is found by its `EXAMPLE`."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.base import num_strategies
from diffshard.bilevel_search import estimators
from diffshard.bilevel_search.base import Estimator, TrainingProgress
from diffshard.bilevel_search.relaxation import one_hot
from diffshard.bilevel_search.search import estimator_names
from tests.conformance.discovery import examples
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, start

KEY = jax.random.key(0)
MODULES = examples(estimators)
PROGRESS = TrainingProgress(jnp.int32(3), {"w": 0.1 * jnp.ones(3)})


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


@pytest.fixture(scope="module", params=MODULES, ids=_name)
def estimator(request: pytest.FixtureRequest) -> Estimator:
    return request.param.EXAMPLE()


@pytest.fixture
def space() -> Perturbed:
    return Perturbed(ERRORS, SECONDS)


def _relaxed() -> list[jax.Array]:
    return [jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.4])]


def _value_and_slopes(estimator: Estimator, space: Perturbed) -> Callable[..., Any]:
    """The jitted increase of the relaxed choice with its slopes."""

    @jax.jit
    def value_and_slopes(relaxed: list[jax.Array], key: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def increase(relaxed: list[jax.Array]) -> jax.Array:
            return estimator.increase(space, start(), batch_of(0), relaxed, key, PROGRESS)

        return jax.value_and_grad(increase)(relaxed)

    return value_and_slopes


def _search(space: Perturbed, estimator: Any, **options: Any) -> diffshard.formats.BilevelSearch:
    options = {"weights_optimizer": optax.sgd(0.1), "max_loss_increase": 0.05, "choice_every": 1, **options}
    return diffshard.bilevel(None, space=space, estimator=estimator, **options)


def _searched(search: diffshard.formats.BilevelSearch, num_steps: int) -> tuple[Any, Any]:
    state, metrics = search.init(KEY, start(), batch_of(0)), None
    for step in range(num_steps):
        state, metrics = search.update(state, batch_of(2 * step), batch_of(2 * step + 1))
    return state, metrics


def test_there_are_three_estimators_and_their_names_are_their_files():
    assert len(MODULES) >= 3
    assert sorted(map(_name, MODULES)) == list(estimator_names())


def test_the_increase_is_a_finite_scalar_with_slopes_for_every_strategy(estimator: Estimator, space: Perturbed):
    value, slopes = _value_and_slopes(estimator, space)(_relaxed(), KEY)
    assert value.shape == ()
    assert jnp.isfinite(value)
    assert [slope.shape for slope in slopes] == [(size,) for size in num_strategies(space.problem).tolist()]
    assert all(jnp.isfinite(slope).all() for slope in slopes)
    assert any(slope.any() for slope in slopes)


def test_the_exact_choice_increases_no_loss(estimator: Estimator, space: Perturbed):
    exact = one_hot(space.problem, space.exact_choice())
    for key in jax.random.split(KEY, 3):
        value, _ = _value_and_slopes(estimator, space)(exact, key)
        assert float(value) == pytest.approx(0.0, abs=1e-6)


def test_a_node_whose_strategies_are_all_exact_has_no_slope(estimator: Estimator):
    """Errors of 0 leave the loss as it is, whatever weight they have."""
    space = Perturbed([[0.0, 0.3, 0.7], [0.0, 0.0]], [[2.0, 1.5, 1.0], [3.0, 1.0]])
    _, slopes = _value_and_slopes(estimator, space)(_relaxed(), KEY)
    assert slopes[0].any()
    np.testing.assert_allclose(slopes[1], 0.0, atol=1e-6)


def test_the_second_call_compiles_nothing_and_gives_the_same(estimator: Estimator, space: Perturbed):
    value_and_slopes = _value_and_slopes(estimator, space)
    first = value_and_slopes(_relaxed(), KEY)
    traces = space.traces
    second = value_and_slopes(_relaxed(), KEY)
    assert space.traces == traces
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_training_runs_a_selection_of_the_spaces_strategies(estimator: Estimator, space: Perturbed):
    if estimator.selection is None:
        pytest.skip("training runs the exact choice")
    selection = estimator.selection(_relaxed(), KEY)
    assert len(selection) == len(space.errors)
    for selected, size in zip(selection, num_strategies(space.problem).tolist(), strict=True):
        assert jnp.shape(selected) in ((), (size,))
    loss, gradients, _ = space.loss_and_gradients(start(), batch_of(0), selection, (), KEY)
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradients["w"]).all()


def test_weights_are_on_the_simplex_and_pass_derivatives_on(estimator: Estimator):
    if estimator.relaxed_selection is None:
        pytest.skip("training does not depend on the choice")
    weigh = estimator.relaxed_selection
    for weights in weigh(_relaxed(), KEY):
        assert float(weights.sum()) == pytest.approx(1.0)
    slopes = jax.grad(lambda relaxed: sum(w @ jnp.arange(w.size) for w in weigh(relaxed, KEY)))(_relaxed())
    assert all(jnp.isfinite(slope).all() and slope.any() for slope in slopes)


@pytest.mark.parametrize("order", [1, 2])
def test_a_search_takes_steps_consumes_its_key_and_compiles_once(estimator: Estimator, space: Perturbed, order: int):
    if order == 2 and estimator.relaxed_selection is None:
        with pytest.raises(ValueError, match="`order` 2 needs an estimator under which training depends"):
            _search(space, estimator, order=2)
        return
    search = _search(space, estimator, order=order)
    first, metrics = _searched(search, 1)
    traces = space.traces
    last, later_metrics = _searched(search, 2)
    assert space.traces == traces
    assert not metrics.refused
    assert not later_metrics.refused
    keys = [jax.random.key_data(key).tolist() for key in (KEY, first.key, last.key)]
    assert len(set(map(tuple, keys))) == 3
    assert all(jnp.isfinite(logits).all() for logits in last.logits)


def test_a_function_of_the_user_trains_the_exact_choice(estimator: Estimator, space: Perturbed):
    """Parameters move as by plain descent on the exact loss, whatever the function says of the choice."""
    state, _ = _searched(_search(space, estimator.increase), 2)
    params, exact = start(), space.exact_choice()
    for step in range(2):
        gradients = jax.grad(space.loss)(params, batch_of(2 * step), exact, KEY)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)
    assert any(slope.any() for slope in state.slopes)
