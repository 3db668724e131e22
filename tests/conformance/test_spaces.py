"""Every search space keeps the rules of `search_spaces.base`; a new one is found by its `EXAMPLE`."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import search_spaces
from cost.base import is_forbidden, num_strategies
from cost.evaluation import evaluate
from cost.validation import validate
from diffshard.solving.solve import solve
from search_spaces.base import LossySpace, Part
from tests.conformance.discovery import examples

SPACES = examples(search_spaces)
KEY = jax.random.key(0)


def _name(module: ModuleType) -> str:
    return module.__name__.removeprefix("search_spaces.")


@pytest.fixture(scope="module", params=SPACES, ids=_name)
def space(request: pytest.FixtureRequest) -> Any:
    return request.param.EXAMPLE()


@pytest.fixture(scope="module")
def lossy(space: Any) -> Any:
    if not isinstance(space, LossySpace):
        pytest.skip("the loss does not depend on the choice")
    return space


def _choices(space: Any, count: int) -> list[list[int]]:
    """The solver's choice, and some that are drawn."""
    rng = np.random.default_rng(0)
    sizes = num_strategies(space.problem)
    best = solve(space.problem, time_limit_s=2.0).choice
    return [best.tolist(), *(rng.integers(sizes).tolist() for _ in range(count))]


def test_there_are_at_least_three_spaces():
    assert len(SPACES) >= 3


def test_the_problem_keeps_the_rules_and_is_built_once(space: Any):
    validate(space.problem)
    assert space.problem is space.problem
    assert num_strategies(space.problem).max() > 1, "an example must leave something to choose"


def test_every_node_and_strategy_has_a_name(space: Any):
    sizes = num_strategies(space.problem).tolist()
    assert len(space.node_names) == len(sizes)
    assert all(space.node_names)
    for node, size in enumerate(sizes):
        names = space.strategy_names(node)
        assert len(names) == size
        assert len(set(names)) == size, f"strategies of {space.node_names[node]} share a name: {names}"
        assert all(names)


def test_parts_add_up_to_the_cost(space: Any):
    for choice in _choices(space, 5):
        evaluation = evaluate(space.problem, choice)
        parts = space.explain(choice)
        if is_forbidden(np.asarray(evaluation.cost)):
            continue  # a forbidden choice has no price that could be taken apart
        assert sum(part.seconds for part in parts) == pytest.approx(evaluation.cost, rel=1e-9)


def test_parts_name_their_nodes_and_what_they_send(space: Any):
    best = _choices(space, 0)[0]
    for part in space.explain(best):
        assert isinstance(part, Part)
        assert part.name
        assert part.kind
        assert part.node is None or 0 <= part.node < len(space.node_names)
        if part.traffic is not None:
            assert part.traffic.sent_bytes >= 0
            assert part.traffic.count >= 0


def test_a_choice_that_does_not_fit_is_refused(space: Any):
    sizes = num_strategies(space.problem).tolist()
    for wrong in ([0] * (len(sizes) + 1), [*sizes]):
        with pytest.raises(ValueError, match=r"choice"):
            space.decode(wrong)
        with pytest.raises(ValueError, match=r"choice"):
            space.explain(wrong)


def test_decoding_is_a_function_of_the_choice(space: Any):
    best = _choices(space, 0)[0]
    first, second = space.decode(best), space.decode(tuple(best))
    assert type(first) is type(second)
    assert first is not None


def test_the_exact_choice_increases_no_loss(lossy: Any):
    params, batch = _arrays(lossy)
    exact = lossy.exact_choice()
    increases = lossy.loss_increases(params, batch, KEY)
    assert [row.shape for row in increases] == [(size,) for size in num_strategies(lossy.problem).tolist()]
    for row, strategy in zip(increases, exact, strict=True):
        assert row[strategy] == 0
        assert jnp.isfinite(row).all()


def test_a_one_hot_relaxed_choice_is_the_choice(lossy: Any):
    params, batch = _arrays(lossy)
    exact = lossy.exact_choice()
    one_hot = [jax.nn.one_hot(s, n) for s, n in zip(exact, num_strategies(lossy.problem).tolist(), strict=True)]
    by_index, by_weights = (lossy.loss(params, batch, selection, KEY) for selection in (exact, one_hot))
    np.testing.assert_allclose(by_weights, by_index, rtol=1e-5)


def test_the_decoded_choice_runs_a_training_step(lossy: Any):
    params, batch = _arrays(lossy)
    choice, residuals = lossy.exact_choice(), lossy.init_residuals(params)
    expected = lossy.loss_and_gradients(params, batch, choice, residuals, KEY, 0)
    result = jax.jit(lossy.decode(choice))(params, batch, residuals, KEY, 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), result, expected)
    assert jax.tree.structure(result[1]) == jax.tree.structure(params)


def test_gradients_are_those_of_the_exact_loss(lossy: Any):
    params, batch = _arrays(lossy)
    exact = lossy.exact_choice()
    _, gradients, _ = lossy.loss_and_gradients(params, batch, exact, lossy.init_residuals(params), KEY, 0)
    expected = jax.grad(lambda p: lossy.loss(p, batch, exact, KEY))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, expected)


def _arrays(space: Any) -> tuple[Any, Any]:
    """Random parameters and a batch of the shapes that a space was built for."""
    leaves, structure = jax.tree.flatten(space.arguments)
    keys = jax.random.split(KEY, len(leaves))
    arrays = [
        0.5 * jax.random.normal(key, leaf.shape).astype(leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)
    ]
    params, batch = jax.tree.unflatten(structure, arrays)
    return params, batch
