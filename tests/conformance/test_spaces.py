"""Every search space keeps the rules of `search_spaces.base`; a new one is found by its `EXAMPLE`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import search_spaces
from cost.base import is_forbidden, num_strategies
from cost.evaluation import evaluate
from cost.validation import validate
from diffshard.bilevel_search.inputs import lossy_methods, missing_for_loss
from diffshard.solving.solve import solve
from search_spaces import numbered
from search_spaces.base import Part
from tests.conformance.discovery import examples
from tests.conformance.faulty_spaces import (
    DecodesTheExactChoice,
    ForbidsEverything,
    HasOneMore,
    LosesResiduals,
    PredictsForTheExactChoice,
    PredictsInReverse,
    PredictsNothing,
)
from tests.conformance.meanings import equal, parts_of
from tests.diffshard.bilevel_search import perturbed

SPACES = [*examples(search_spaces), perturbed]
KEY = jax.random.key(0)


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition("search_spaces.")[2].rpartition("bilevel_search.")[2]


@pytest.fixture(scope="module", params=SPACES, ids=_name)
def space(request: pytest.FixtureRequest) -> Any:
    assert callable(request.param.EXAMPLE), "`EXAMPLE` must be a function without arguments that makes a small space"
    return request.param.EXAMPLE()


@pytest.fixture(scope="module")
def lossy(space: Any) -> Any:
    """A space with any method of a lossy space, which must then have all members."""
    if not lossy_methods(space):
        pytest.skip("the loss does not depend on the choice")
    assert missing_for_loss(space) == []
    return space


def _choices(space: Any, count: int) -> list[list[int]]:
    """The solver's choice, and some that are drawn."""
    rng = np.random.default_rng(0)
    sizes = num_strategies(space.problem)
    best = solve(space.problem, time_limit_s=2.0).choice
    return [list(best), *(rng.integers(sizes).tolist() for _ in range(count))]


def test_the_spaces_are_found_by_their_examples():
    assert {_name(module).split(".")[0] for module in SPACES} >= {"sharding", "communication", "placement", "numbered"}


def test_the_problem_keeps_the_rules_and_is_built_once(space: Any):
    validate(space.problem)
    assert space.problem is space.problem, "`problem` is built again each time; make it a `cached_property`"
    assert num_strategies(space.problem).max() > 1, "an example must leave something to choose"
    assert solve(space.problem, time_limit_s=2.0).feasible, "an example must have a choice that is feasible"


def test_every_node_and_strategy_has_a_name(space: Any):
    sizes = num_strategies(space.problem).tolist()
    assert len(space.node_names) == len(sizes), "`node_names` must have one name for each node of the problem"
    assert all(space.node_names), "a name in `node_names` is empty"
    for node, size in enumerate(sizes):
        names = space.strategy_names(node)
        where = f"of {space.node_names[node]} (node {node})"
        assert len(names) == size, f"`strategy_names` {where} must have one name for each strategy, not {names}"
        assert len(set(names)) == size, f"strategies {where} share a name: {names}"
        assert all(names), f"a strategy {where} has an empty name: {names}"


def test_parts_add_up_to_the_cost(space: Any):
    for choice in _choices(space, 5):
        evaluation = evaluate(space.problem, choice)
        parts = space.explain(choice)
        if is_forbidden(np.asarray(evaluation.cost)):
            continue  # a forbidden choice has no price that could be taken apart
        assert sum(part.seconds for part in parts) == pytest.approx(evaluation.cost, rel=1e-9), (
            f"the seconds of the parts that `explain` returns for {choice} are not the cost of that choice: does every "
            "node, every edge and the largest load of each group have its part?"
        )


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
    for wrong in ([0] * (len(sizes) + 1), [*sizes]):  # `checked_choice` of `cost.evaluation` refuses both
        with pytest.raises(ValueError, match=r"choice"):
            space.decode(wrong)
        with pytest.raises(ValueError, match=r"choice"):
            space.explain(wrong)


def test_decoding_is_a_function_of_the_choice(space: Any):
    """Equal choices mean the same, and some choice means something else."""
    best, *others = _choices(space, 2)
    first = _meaning(space, best)
    assert equal(first, _meaning(space, tuple(best))), "`decode` returns another thing for an equal choice"
    assert not all(equal(first, _meaning(space, other)) for other in others if other != best), (
        "`decode` returns the same for every choice; of functions the fields are compared, what a closure keeps, and "
        "what a partial or a method is bound to"
    )


def _meaning(space: Any, choice: Sequence[int]) -> Any:
    """What a choice decodes to, as a pytree: results of a training step, fields of another function, or a value."""
    decoded = space.decode(choice)
    if lossy_methods(space):
        params, batch = _arrays(space)
        return decoded(params, batch, space.init_residuals(params), KEY, 0)
    return parts_of(decoded) if callable(decoded) else decoded


def test_the_exact_choice_computes_the_loss_that_is_meant(lossy: Any):
    lossy.check_loss(*_arrays(lossy), KEY)


def test_the_exact_choice_increases_no_loss_and_others_do(lossy: Any):
    params, batch = _arrays(lossy)
    increases = lossy.loss_increases(params, batch, KEY)
    assert [row.shape for row in increases] == [(size,) for size in num_strategies(lossy.problem).tolist()]
    for row, strategy in zip(increases, lossy.exact_choice(), strict=True):
        assert row[strategy] == 0
        assert jnp.isfinite(row).all()
    assert any((row > 0).any() for row in increases)


def test_predicted_increases_rank_what_strategies_do_to_the_loss(lossy: Any):
    """Over several batches the mean measured change of the loss is larger where more is predicted."""
    exact, predicted, measured = lossy.exact_choice(), [], []
    data = [_arrays(lossy, seed) for seed in range(4)]
    exact_losses = [float(lossy.loss(*arrays, exact, KEY)) for arrays in data]
    increases = [lossy.loss_increases(*arrays, KEY) for arrays in data]
    for v, size in enumerate(num_strategies(lossy.problem).tolist()):
        rows = []
        for s in range(size):
            losses = [float(lossy.loss(*arrays, _with(exact, v, s), KEY)) for arrays in data]
            rows.append(np.mean(np.square(np.subtract(losses, exact_losses))))
        if any(rows):
            predicted.append(np.mean([of_batch[v] for of_batch in increases], axis=0))
            measured.append(rows)
    assert measured, "no strategy of any node changes the loss"
    for row, rows in zip(predicted, measured, strict=True):
        assert np.argmax(row) == np.argmax(rows)
        assert all((p == 0) == (m == 0) for p, m in zip(row, rows, strict=True))


def _with(choice: Sequence[int], node: int, strategy: int) -> list[int]:
    """A choice with another strategy at one node."""
    return [strategy if v == node else s for v, s in enumerate(choice)]


def test_a_one_hot_relaxed_choice_is_the_choice(lossy: Any):
    params, batch = _arrays(lossy)
    for choice in (lossy.exact_choice(), _lossiest(lossy)):
        one_hot = [jax.nn.one_hot(s, n) for s, n in zip(choice, num_strategies(lossy.problem).tolist(), strict=True)]
        by_index, by_weights = (lossy.loss(params, batch, selection, KEY) for selection in (choice, one_hot))
        np.testing.assert_allclose(by_weights, by_index, rtol=1e-5)


def _lossiest(space: Any) -> tuple[int, ...]:
    """The strategies of largest predicted increase."""
    params, batch = _arrays(space)
    return tuple(int(row.argmax()) for row in space.loss_increases(params, batch, KEY))


def test_the_decoded_choice_runs_training_steps_and_compiles_once(lossy: Any):
    """Two steps, the second with the first one's residuals; an exact choice and a lossy one."""
    params, batch = _arrays(lossy)
    for choice in (lossy.exact_choice(), _lossiest(lossy)):
        residuals, expected_residuals = lossy.init_residuals(params), lossy.init_residuals(params)
        run, traces = _jitted(lossy.decode(choice))
        for step in range(2):
            expected = lossy.loss_and_gradients(params, batch, choice, expected_residuals, KEY, step)
            result = run(params, batch, residuals, KEY, step)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, expected)
            assert jax.tree.structure(result.gradients) == jax.tree.structure(params)
            residuals, expected_residuals = result.residuals, expected.residuals
        assert len(traces) == 1


def _jitted(step: Any) -> tuple[Any, list[int]]:
    """A step under `jit`, and a list that grows with each trace."""
    traces: list[int] = []

    def run(*arguments: Any) -> Any:
        traces.append(1)
        return step(*arguments)

    return jax.jit(run), traces


def test_a_lossy_choice_changes_the_step(lossy: Any):
    params, batch = _arrays(lossy)
    results = [
        lossy.loss_and_gradients(params, batch, choice, lossy.init_residuals(params), KEY, 0)
        for choice in (lossy.exact_choice(), _lossiest(lossy))
    ]
    assert not equal(results[0].gradients, results[1].gradients)


def test_a_mesh_of_devices_gives_the_same_numbers(lossy: Any):
    axes = lossy.mesh_axes
    if not axes:
        pytest.skip("the space has no mesh")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    params, batch = _arrays(lossy)
    choice = _lossiest(lossy)
    on_mesh = lossy.on_mesh(mesh)
    results = [
        jax.jit(space.decode(choice))(params, batch, space.init_residuals(params), KEY, 0) for space in (lossy, on_mesh)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)
    other = jax.make_mesh((1,), ("other",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="mesh"):
        lossy.on_mesh(other)


def test_gradients_are_those_of_the_exact_loss(lossy: Any):
    params, batch = _arrays(lossy)
    exact = lossy.exact_choice()
    _, gradients, _ = lossy.loss_and_gradients(params, batch, exact, lossy.init_residuals(params), KEY, 0)
    expected = jax.grad(lambda p: lossy.loss(p, batch, exact, KEY))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, expected)


_FAULTS = [
    (ForbidsEverything, test_the_problem_keeps_the_rules_and_is_built_once),
    (PredictsNothing, test_the_exact_choice_increases_no_loss_and_others_do),
    (PredictsForTheExactChoice, test_the_exact_choice_increases_no_loss_and_others_do),
    (PredictsInReverse, test_predicted_increases_rank_what_strategies_do_to_the_loss),
    (DecodesTheExactChoice, test_decoding_is_a_function_of_the_choice),
    (DecodesTheExactChoice, test_the_decoded_choice_runs_training_steps_and_compiles_once),
    (LosesResiduals, test_the_decoded_choice_runs_training_steps_and_compiles_once),
]


@pytest.mark.parametrize(("wrong", "rule"), _FAULTS)
def test_the_rules_catch_a_space_that_breaks_them(wrong: Any, rule: Any):
    space = wrong(*perturbed.EXAMPLE.args)
    with pytest.raises((AssertionError, ValueError)):
        rule(space)


def test_a_space_with_one_member_of_a_lossy_one_must_have_all():
    space = HasOneMore(numbered.EXAMPLE().problem)
    assert lossy_methods(space) == ["loss"]
    assert "loss_increases" in missing_for_loss(space)


def _arrays(space: Any, seed: int = 0) -> tuple[Any, Any]:
    """Random parameters, the same for every seed, and a batch, of the shapes that a space was built for."""
    params, batch = (
        _random(shapes, key) for shapes, key in zip(space.arguments, (KEY, jax.random.key(seed + 1)), strict=True)
    )
    return params, batch


def _random(shapes: Any, key: jax.Array) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    arrays = [0.5 * jax.random.normal(k, leaf.shape).astype(leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)
