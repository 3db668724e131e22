"""Training with a plan: simulated, on a mesh, through a searched sharding plan, and over a saved state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from cost.base import Problem
from diffshard.base import PlanError
from diffshard.bilevel_search.objective import MaxLossIncrease
from diffshard.bilevel_search.plans.base import Candidate
from diffshard.bilevel_search.plans.plan import lossy_plan
from diffshard.bilevel_search.plans.training import Training, TrainingState
from diffshard.bilevel_search.relaxation import best_of
from diffshard.bilevel_search.validation_runs import CandidatesData, validate
from search_spaces.communication.space import CommunicationSpace
from search_spaces.numbered import NumberedSpace
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, start
from tests.diffshard.bilevel_search.plans.small_bilevel_plan import named_choice, proposed_plan
from tests.search_spaces.communication.small_communication import (
    HARDWARE,
    MESH,
    SPECS,
    STRATEGIES,
    arguments,
    loss_fn,
    small_space,
)

OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def _trained(
    training: Training, step, num_steps: int, state: TrainingState | None = None
) -> tuple[TrainingState, list[float]]:
    params, batch = jax.tree.map(np.asarray, arguments())  # JAX's may have the mesh of another test in their types
    now, losses = state or training.init(params, jax.random.key(3)), []
    for _ in range(num_steps):
        now, loss = step(now, batch)
        losses.append(float(loss))
    return now, losses


def _assert_close(one: TrainingState, other: TrainingState, *, rtol: float, atol: float, strays: float = 0.0):
    """All leaves are equal, but for a share of each's elements."""
    flat = [jax.tree.leaves(state._replace(key=jax.random.key_data(state.key))) for state in (one, other)]
    for x, y in zip(*flat, strict=True):
        assert np.mean(~np.isclose(x, y, rtol=rtol, atol=atol)) <= strays


@pytest.mark.filterwarnings("ignore::diffshard.plans.WholeWorkWarning")  # explicit reshards have no rule
@pytest.mark.parametrize(("exact_share", "axis_type"), [(0.0, AxisType.Auto), (0.5, AxisType.Explicit)])
def test_a_mesh_and_a_searched_step_give_the_simulations_numbers(exact_share, axis_type):
    plan, mesh = proposed_plan()._replace(exact_share=exact_share), jax.make_mesh((2, 4), tuple(MESH), (axis_type,) * 2)
    simulated = plan.training(small_space(), OPTIMIZER, num_steps=4)
    placed = plan.training(small_space().on_mesh(mesh), OPTIMIZER, num_steps=4)
    searched = diffshard.search(placed.step, mesh, hardware=HARDWARE)
    state, losses = _trained(simulated, jax.jit(simulated.step), 4)
    on_mesh, mesh_losses = _trained(placed, jax.jit(placed.step), 4)
    through_search, search_losses = _trained(placed, searched, 4)
    # A code of int8 rounds to the other side here and there, where a sum differs in its last bit.
    np.testing.assert_allclose(mesh_losses, losses, rtol=1e-4)
    _assert_close(on_mesh, state, rtol=1e-3, atol=1e-4, strays=0.05)
    np.testing.assert_allclose(search_losses, mesh_losses, rtol=1e-6)
    _assert_close(through_search, on_mesh, rtol=1e-5, atol=1e-6)
    # The optimiser's state is split as the parameters are inside the region, so the search has seen its specs.
    found = {tensor.path: tensor.spec for tensor in searched.plan(state, arguments()[1]).arguments}
    assert found["state.params['layers']['up']"] == ((), (), ("model",))
    assert found["state.optimizer_state[0].trace['layers']['up']"] == ((), (), ("model",))
    assert {axis for axes in found["state.residuals['head']"] for axis in axes} == {"data", "model"}


def test_the_plan_changes_numbers_and_a_schedule_does_so_late():
    space = small_space()
    training = proposed_plan().training(space, OPTIMIZER)
    exact_plan = proposed_plan()._replace(
        nodes=tuple(group._replace(strategy="exact") for group in proposed_plan().nodes)
    )
    exact = exact_plan.training(space, OPTIMIZER)
    late = proposed_plan()._replace(exact_share=0.5).training(space, OPTIMIZER, num_steps=5)
    _, losses = _trained(training, jax.jit(training.step), 5)
    _, exact_losses = _trained(exact, jax.jit(exact.step), 5)
    _, late_losses = _trained(late, jax.jit(late.step), 5)
    assert losses[0] != exact_losses[0]
    assert late_losses[:3] == exact_losses[:3]  # half of five steps, rounded up
    assert late_losses[3] != exact_losses[3]


def test_a_plan_trains_as_its_candidate_was_trained():
    space, (params, batch) = small_space(), arguments()
    data = CandidatesData(params, [batch] * 4, [batch], jax.random.key(3), rungs=(4,), num_candidates=1)
    candidate = Candidate("found", named_choice(space), 0.5)
    validation = validate(space, [candidate], data, optimizer=OPTIMIZER, objective=MaxLossIncrease(1e9))
    training = proposed_plan()._replace(exact_share=0.5).training(space, OPTIMIZER, num_steps=4)
    state, _ = _trained(training, jax.jit(training.step), 4)
    loss = space.loss(state.params, batch, named_choice(space), state.key, state.step)
    (tried,) = (t for t in validation.table if t.name == "found")
    assert float(loss) == pytest.approx(tried.loss, rel=1e-5)


def test_every_step_has_a_random_key_of_its_own():
    class Noisy(Perturbed):
        """Its loss is a number drawn by the key of the step."""

        def loss_and_gradients(self, params, batch, selection, residuals, key, step=0):
            result = super().loss_and_gradients(params, batch, selection, residuals, key, step)
            return result._replace(loss=jax.random.uniform(key))

    space, key = Noisy(ERRORS, SECONDS), jax.random.key(3)
    plan = lossy_plan(space, best_of(space.problem, {(1, 1): 0.1}, 1.0), 1.0)
    training = plan.training(space, OPTIMIZER)
    state, losses = training.init(start(), key), []
    for number in range(4):
        state, loss = training.step(state, batch_of(number))
        losses.append(float(loss))
    assert losses == [float(jax.random.uniform(jax.random.fold_in(key, n))) for n in range(4)]


def test_residuals_outlive_a_saved_state(tmp_path):
    training = proposed_plan().training(small_space(), OPTIMIZER)
    step = jax.jit(training.step)
    through, _ = _trained(training, step, 4)
    half, _ = _trained(training, step, 2)
    leaves, structure = jax.tree.flatten(half._replace(key=jax.random.key_data(half.key)))
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        restored = jax.tree.unflatten(structure, [jnp.asarray(file[name]) for name in file.files])
    restored = restored._replace(key=jax.random.wrap_key_data(restored.key))
    resumed, _ = _trained(training, step, 2, restored)
    _assert_close(resumed, through, rtol=0, atol=0)
    assert max(float(jnp.abs(x).max()) for x in half.residuals.values()) > 0
    forgotten, _ = _trained(
        training, step, 2, restored._replace(residuals=jax.tree.map(jnp.zeros_like, half.residuals))
    )
    assert not np.array_equal(forgotten.params["head"], through.params["head"])


def test_strategies_are_found_by_name_in_any_order(tmp_path):
    proposed_plan().save(tmp_path / "plan.json")
    plan = diffshard.BilevelPlan.load(tmp_path / "plan.json")
    turned = small_space(
        strategies={direction: listed[::-1] for direction, listed in STRATEGIES.items()}, hardware=None
    )
    assert named_choice(turned) != named_choice(small_space())
    same, other = plan.training(small_space(), OPTIMIZER), plan.training(turned, OPTIMIZER)
    one, two = _trained(same, jax.jit(same.step), 1), _trained(other, jax.jit(other.step), 1)
    assert one[1] == two[1]
    _assert_close(one[0], two[0], rtol=0, atol=0)


def _without(direction: str, name: str):
    return {**STRATEGIES, direction: tuple(s for s in STRATEGIES[direction] if s.name != name)}


def _renamed(params, batch):
    with jax.named_scope("block"):
        return loss_fn(params, batch)


def _on(mesh):
    return CommunicationSpace(loss_fn, mesh, *arguments(), SPECS, P("data"), strategies=STRATEGIES)


@pytest.mark.parametrize(
    ("make_space", "message"),
    [
        (lambda: small_space(strategies=_without("forward", "int8")), "takes 'int8' for 'mlp/all_reduce forward'"),
        (lambda: small_space(_renamed), "has a node 'mlp/all_reduce forward', which `space` does not have"),
        (
            lambda: small_space(tie=None),
            "has a node 'matrices over data and model gradient', which `space` does not have",
        ),
        (
            lambda: _on({**MESH, "data": 4}),
            r"for a mesh of axes .*'data': 2, 'model': 4.*, and `space` for .*'data': 4",
        ),
        (  # devices have other neighbours, and so other parts of the arrays
            lambda: _on(dict(reversed(MESH.items()))),
            r"for a mesh of axes {'data': 2, 'model': 4} in this order, and `space` for {'model': 4, 'data': 2}",
        ),
    ],
)
def test_a_space_that_does_not_fit_is_refused(make_space, message):
    with pytest.raises(PlanError, match=message):
        proposed_plan().training(make_space(), OPTIMIZER)


def test_a_node_that_the_plan_does_not_know_is_refused():
    plan = proposed_plan()
    fewer = plan._replace(nodes=plan.nodes[1:])
    with pytest.raises(PlanError, match=r"`space` has a node 'mlp/all_reduce forward', which the plan does not choose"):
        fewer.training(small_space(), OPTIMIZER)


def test_arrays_that_the_space_was_not_built_for_are_refused():
    training, (params, (x, target)) = proposed_plan().training(small_space(), OPTIMIZER), arguments()
    state = training.init(jax.tree.map(np.asarray, params), jax.random.key(3))
    with pytest.raises(ValueError, match=r"`params\['head'\]` must be float32\[16, 16\], which .*, got .*8\]"):
        training.init({**params, "head": params["head"][:, :8]}, jax.random.key(3))
    with pytest.raises(ValueError, match=r"`params` must have the structure that `space` was built for"):
        training.init({"head": params["head"]}, jax.random.key(3))
    with pytest.raises(ValueError, match=r"`batch\[1\]` must be float32\[16, 16\], which .*, got float32\[8, 16\]"):
        training.step(state, (x, target[:8]))
    with pytest.raises(ValueError, match=r"`batch\[0\]` must be float32.*, got int32"):
        jax.jit(training.step)(state, (x.astype(jnp.int32), target))


def test_a_search_refuses_what_the_space_was_not_built_for():
    options = {"weights_optimizer": OPTIMIZER, "max_loss_increase": 0.1}
    search, (params, batch) = diffshard.bilevel(None, space=small_space(), **options), arguments()
    state = search.init(jax.random.key(0), params, batch)
    other = {**params, "head": params["head"][:, :8]}
    with pytest.raises(ValueError, match=r"`params\['head'\]` must be float32\[16, 16\]"):
        search.init(jax.random.key(0), other, batch)
    with pytest.raises(ValueError, match=r"`params\['head'\]` must be float32\[16, 16\]"):
        search.update(state._replace(params=other), batch, batch)
    with pytest.raises(ValueError, match=r"`batch\[0\]` must be float32\[16, 16\]"):
        search.init(jax.random.key(0), params, jax.tree.map(lambda leaf: leaf[:8], batch))


def test_what_training_needs():
    plan = proposed_plan()
    with pytest.raises(ValueError, match=r"`num_steps` must be .* first 50% run the exact choice; got None"):
        plan._replace(exact_share=0.5).training(small_space(), OPTIMIZER)
    with pytest.raises(ValueError, match="`optimizer` must be an optax optimiser"):
        plan.training(small_space(), None)  # pyright: ignore[reportArgumentType]
    init, params = proposed_plan().training(small_space(), OPTIMIZER).init, arguments()[0]
    with pytest.raises(ValueError, match=r"`key` must be a random key, as `jax\.random\.key\(0\)` is; got 0"):
        init(params, 0)  # pyright: ignore[reportArgumentType]
    space = NumberedSpace(Problem([np.zeros(2)], np.zeros((0, 2), int), []))
    with pytest.raises(ValueError, match="`space` has no loss"):
        plan.training(space, OPTIMIZER)
