"""Training decides between candidates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.objective import CostWeight, MaxLossIncrease
from diffshard.bilevel_search.plans.base import Candidate
from diffshard.bilevel_search.validation_runs import validate
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed, batch_of, start

KEY = jax.random.key(0)
RUNGS = (4, 8)


def _data(**changes) -> diffshard.formats.CandidatesData:
    fields = {
        "params": start(),
        "train_batches": [batch_of(100 + i) for i in range(sum(RUNGS))],
        "test_batches": [batch_of(200), batch_of(201)],
        "key": KEY,
        "rungs": RUNGS,
        **changes,
    }
    return diffshard.formats.CandidatesData(**fields)


def _trained(space: Perturbed, data, choices) -> float:
    """The loss of the last choice after a plain loop over a choice for each step."""
    params = data.params
    for batch, choice in zip(data.train_batches, choices, strict=True):
        gradients = jax.grad(space.loss)(params, batch, choice, KEY, 0)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return float(np.mean([space.loss(params, batch, choices[-1], KEY, 0) for batch in data.test_batches]))


@pytest.mark.parametrize("most", [0.02, 10.0])
def test_training_decides_and_equals_a_plain_loop(most: float):
    space, data = Perturbed(ERRORS, SECONDS), _data()
    candidates = [Candidate("rough", (1, 1)), Candidate("late", (1, 1), 0.5), Candidate("rougher", (2, 1))]
    validation = validate(space, candidates, data, optimizer=optax.sgd(0.1), objective=MaxLossIncrease(most))
    exact = _trained(space, data, [(0, 0)] * 12)
    assert validation.exact_losses[-1] == pytest.approx(exact, rel=1e-5)
    tried = {t.name: t for t in validation.table}
    assert validation.winner.name == ("exact" if most == 0.02 else "rougher")
    assert validation.winner.loss == pytest.approx(_trained(space, data, [validation.winner.choice] * 12), rel=1e-5)
    assert validation.winner.loss_increase == pytest.approx(validation.winner.loss - exact, abs=1e-6)
    assert tried["late"].seconds == (5.0 + 2.5) / 2
    assert validation.steps == 12 + sum(t.record.steps for t in validation.table if t.name != "exact")
    assert {point.name for point in validation.points()} == {
        t.name for t in validation.table if len(t.record.scores) == 2
    }
    assert diffshard.formats.pareto(validation.points()).front
    assert len(str(validation).splitlines()) == 5


def test_candidates_that_end_early_are_compared_with_the_exact_choice_after_as_many_steps():
    space, data = Perturbed(ERRORS, SECONDS), _data()
    candidates = [Candidate("rough", (1, 0)), Candidate("rougher", (2, 0)), Candidate("roughest", (2, 1))]
    validation = validate(space, candidates, data, optimizer=optax.sgd(0.1), objective=CostWeight(0.0))
    first, last = RUNGS[0], sum(RUNGS)
    early = _data(train_batches=data.train_batches[:first], rungs=(first,))
    exact = _trained(space, early, [(0, 0)] * first), _trained(space, data, [(0, 0)] * last)
    assert validation.exact_losses == pytest.approx(exact, rel=1e-5)
    assert exact[0] > 1.5 * exact[1]  # or it would make no difference which of them is taken
    assert {t.name: len(t.record.scores) for t in validation.table} == {
        "exact": 2,
        "rough": 2,
        "rougher": 2,
        "roughest": 1,
    }
    for tried in validation.table[:-1]:
        assert tried.loss_increase == pytest.approx(tried.loss - exact[1], abs=1e-6)
    dropped = validation.table[-1]
    assert dropped.loss == pytest.approx(_trained(space, early, [(2, 1)] * first), rel=1e-5)
    assert dropped.loss_increase == pytest.approx(dropped.loss - exact[0], abs=1e-6)
    assert dropped.record.scores == (pytest.approx(dropped.loss_increase),)


def test_losses_of_several_trainings_are_means_over_orders_of_the_batches():
    space, data = Perturbed(ERRORS, SECONDS), _data(num_repeats=3)
    options = {"optimizer": optax.sgd(0.1), "objective": MaxLossIncrease(10.0)}
    validation = validate(space, [Candidate("rough", (1, 1))], data, **options)
    found = {tried.name: tried for tried in validation.table}
    assert validation.steps == 3 * 2 * 12
    for name, choice in [("rough", (1, 1)), ("exact", (0, 0))]:
        orders = [[*data.train_batches[4 * r :], *data.train_batches[: 4 * r]] for r in range(3)]
        losses = [_trained(space, _data(train_batches=order), [choice] * 12) for order in orders]
        assert len(set(losses)) == 3
        assert found[name].loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["rough"].loss_increase == pytest.approx(found["rough"].loss - found["exact"].loss, abs=1e-6)


def test_a_schedule_runs_the_exact_choice_first():
    space, data = Perturbed(ERRORS, SECONDS), _data()
    late = [Candidate("late", (2, 1), 0.5)]
    validation = validate(space, late, data, optimizer=optax.sgd(0.1), objective=MaxLossIncrease(10.0))
    found = next(tried for tried in validation.table if tried.name == "late")
    assert found.loss == pytest.approx(_trained(space, data, [(0, 0)] * 6 + [(2, 1)] * 6), rel=1e-5)


def test_a_weight_of_the_cost_trades_one_for_the_other():
    """The exact choice costs 1, (2, 1) 0.4, for an increase of about 0.37."""
    space, candidates = Perturbed(ERRORS, SECONDS), [Candidate("rougher", (2, 1))]
    for weight, winner in [(0.1, "exact"), (3.0, "rougher")]:
        validation = validate(space, candidates, _data(), optimizer=optax.sgd(0.1), objective=CostWeight(weight))
        assert validation.winner.name == winner
        assert validation.winner.record.scores[-1] == pytest.approx(
            validation.winner.loss_increase + weight * validation.winner.seconds / 5.0, rel=1e-5
        )


@pytest.mark.parametrize("objective", [MaxLossIncrease(0.2), CostWeight(1.0)])
def test_predictions_that_are_ten_times_too_small_are_refined_by_what_was_measured(objective):
    """Node 0 adds up to 0.245, node 1 up to 0.125 to the loss; the prediction says a tenth of it."""
    space, data = Perturbed(ERRORS, SECONDS), _data()
    low = LossPrediction(0.0, [0.1 * np.square(errors) / 2 for errors in space.errors])
    tenfold = [Candidate("found", (2, 1))]
    options = {"optimizer": optax.sgd(0.1), "objective": objective}
    plain = validate(space, tenfold, data, **options)
    validation = validate(space, tenfold, data, prediction=low, **options)
    assert not any("refined" in tried.name for tried in plain.table)
    every = {
        (s, t): validate(space, [Candidate("it", (s, t))], data, **options)
        for s in range(3)
        for t in range(2)
        if s or t
    }
    best = min(min(p.table, key=lambda tried: tried.record.scores[-1]).record.scores[-1] for p in every.values())
    assert validation.winner.record.scores[-1] == best
    assert validation.winner.name.startswith("refined, ")
    assert validation.steps == sum(tried.record.steps for tried in validation.table)


@pytest.mark.parametrize("objective", [MaxLossIncrease(0.5), CostWeight(3.0)])
def test_candidates_that_diverge_lose_to_the_exact_choice_which_may_not_diverge_itself(objective):
    space, candidates = Perturbed([[0.0, 1e30]], [[2.0, 1.0]]), [Candidate("rough", (1,))]
    validation = validate(space, candidates, _data(), optimizer=optax.sgd(0.1), objective=objective)
    assert validation.winner.name == "exact"
    assert validation.winner.loss_increase == 0.0
    inputs, targets = batch_of(0)
    data = _data(test_batches=[(inputs, targets * jnp.nan)])
    with pytest.raises(ValueError, match="the exact choice's loss is nan after 4 steps"):
        validate(space, candidates, data, optimizer=optax.sgd(0.1), objective=objective)


def test_finish_with_data_returns_the_winner_with_its_table():
    space = Perturbed(ERRORS, SECONDS)
    search = diffshard.bilevel(None, space=space, weights_optimizer=optax.sgd(0.1), max_loss_increase=0.5)
    state = search.init(KEY, start(), batch_of(0))
    for step in range(3):
        state, _ = search.update(state, batch_of(2 * step), batch_of(2 * step + 1))
    plan, params = search.finish(state, candidates_data=_data(num_candidates=6))
    assert plan.validation is not None
    assert plan.choice == plan.validation.winner.choice
    assert plan.loss_increase == pytest.approx(plan.validation.winner.loss_increase)
    assert plan.loss_increase <= 0.5
    last = [tried for tried in plan.validation.table if len(tried.record.scores) == 2 and tried.loss_increase <= 0.5]
    assert plan.seconds == min(tried.seconds for tried in last) < 5.0
    assert len(plan.validation.table) == 7
    assert jnp.all(params["w"] == state.params["w"])


def test_what_is_wrong_is_said():
    for keep in (0.0, 2.0):
        with pytest.raises(ValueError, match=f"`keep` must be a share between 0 and 1, got {keep}"):
            _data(keep=keep)
    with pytest.raises(ValueError, match=r"`train_batches` must be a sequence, .* got generator"):
        _data(train_batches=(batch_of(i) for i in range(12)))
    search = diffshard.bilevel(
        None, space=Perturbed(ERRORS, SECONDS), weights_optimizer=optax.sgd(0.1), max_loss_increase=0.5
    )
    with pytest.raises(ValueError, match="`candidates_data` must be a CandidatesData or None, got 5"):
        search.finish(search.init(KEY, start(), batch_of(0)), candidates_data=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one for each of the 12 steps of `rungs`, got 11"):
        _data(train_batches=[batch_of(0)] * 11)
    with pytest.raises(ValueError, match="`test_batches` must hold at least one"):
        _data(test_batches=[])
    with pytest.raises(ValueError, match="`num_candidates` must be a whole number of at least 1, got 0"):
        _data(num_candidates=0)
    with pytest.raises(ValueError, match="`num_candidates` must be a whole number of at least 1, got True"):
        _data(num_candidates=True)
    with pytest.raises(ValueError, match=r"`num_repeats` must be a whole number of at least 1, got 1\.5"):
        _data(num_repeats=1.5)
    with pytest.raises(ValueError, match="`num_refinements` must be a whole number of at least 0, got -1"):
        _data(num_refinements=-1)
    with pytest.raises(ValueError, match=r"`key` must be a random key, as .* got 0"):
        _data(key=0)
    state = search.init(KEY, start(), batch_of(0))
    for changes, message in [
        ({"train_batches": [jax.tree.map(lambda x: x[:4], batch_of(0))] * 12}, r"`train_batches\[0\]` must have"),
        ({"test_batches": [batch_of(0), (batch_of(0)[0],)]}, r"`test_batches\[1\]` must have the shapes"),
        ({"params": {"w": jnp.zeros(5)}}, "`candidates_data.params` must have the shapes"),
    ]:
        with pytest.raises(ValueError, match=message):
            search.finish(state, candidates_data=_data(**changes))
