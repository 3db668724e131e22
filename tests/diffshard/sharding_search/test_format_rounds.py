"""Formats are measured again where they are chosen, judged by validation runs, and held against simple rules."""

import dataclasses
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.plans.sections import FormatTrial, PlannedFormats
from diffshard.plans.text import noise_words
from diffshard.sharding_search import format_rounds
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.format_losses import Increase, MeasuredLosses
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.number_formats import groups_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from tests.diffshard.sharding_search.test_formats import (
    ROWS,
    UNLIMITED,
    WIDTH,
    arguments,
    fast_links,
    mesh_of,
    search,
    train_step,
)


def calls_of(seed, count, rows=ROWS, width=WIDTH):
    params, _ = arguments(rows, width)
    keys = jax.random.split(jax.random.key(seed), 2 * count)
    batches = [tuple(jax.random.normal(key, (rows, width)) for key in keys[2 * i : 2 * i + 2]) for i in range(count)]
    return [(params, batch) for batch in batches]


def traced(fn, args):
    mesh = mesh_of(1)
    options = Options(fn=fn, mesh=mesh, hardware=fast_links(mesh), memory_limit_bytes=1e15)
    traced_function = trace_function(options, args)
    return options, traced_function, space_of(options, traced_function)


def losses_of(formats, fn=train_step):
    options, traced_function, space = traced(fn, formats.calls[0])
    types = array_types(traced_function.call.arrays)
    return MeasuredLosses(formats, space, options, types, traced_function.out_paths)


def trained(products, calls):
    """Trains by the program of a plan that has these groups in float8; returns the losses."""
    step = search(mesh_of(1), UNLIMITED, increases=dict.fromkeys(products, 0.0))
    state, losses = calls[0][0], []
    for _, batch in calls:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


class _KnownLosses:
    """Losses of a function by a formula: a group alone does little, and each pair of groups more."""

    measured_by, takes_looks, overflows = "a formula", True, ()

    def __init__(self, request):
        self.graph = request.traced_function.graph
        self.groups = {group.name: group for group in groups_of(self.graph)}
        self.numbers = {v.index: n for n, group in enumerate(self.groups.values()) for v in group.vertices}

    def increase_of(self, products):
        count = len({self.numbers[product] for product, _ in products})
        return Increase(0.1 * count + 0.15 * count * (count - 1) / 2, None)

    def increases_at(self, products, groups):
        current = frozenset(products)
        members = [group.members for group in groups]
        return [self.increase_of(current | m).mean - self.increase_of(current - m).mean for m in members]


def test_what_is_chosen_changes_what_is_measured(monkeypatch):
    monkeypatch.setattr(format_rounds, "measured_losses", _KnownLosses)
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    limit = 0.85
    plan = search(mesh, limit, hardware=hardware, calls=[args] * 20, rounds=5).plan(*args)
    assert plan.formats is not None
    first, *others = plan.formats.trials
    assert first.predicted_increase <= limit < first.measured_increase  # alone they seem harmless
    assert {"nothing", "all but the head"} <= {trial.name for trial in others}
    assert plan.formats.measured_increase is not None
    assert plan.formats.measured_increase <= limit
    within = [trial.step_s for trial in plan.formats.trials if trial.measured_increase <= limit]
    assert plan.step_s == min(within)
    names = [group.name for group in plan.formats.groups]
    table = _KnownLosses(type("request", (), {"traced_function": traced(train_step, args)[1]}))
    members = [table.groups[name].members for name in names]
    best_s = plan.step_s
    for inside in itertools.combinations(range(len(names)), 3):  # four are beyond the limit
        assert table.increase_of({m for n in inside for m in members[n]}).mean <= limit
        offered = dict.fromkeys([names[n] for n in inside], 0.0)
        best_s = min(best_s, search(mesh, 1.0, hardware=hardware, increases=offered).plan(*args).step_s)
    assert plan.step_s <= best_s * (1 + 1e-6)


class _NoisyLosses(_KnownLosses):
    """The same losses, known from runs that differ."""

    error = 0.3

    def increase_of(self, products):
        return Increase(super().increase_of(products).mean, self.error if products else 0.0)


@pytest.mark.parametrize(("error", "hides"), [(0.3, False), (0.6, True)])
def test_noise_that_hides_the_limit_is_told_with_how_many_more_runs_would_not(monkeypatch, error, hides):
    monkeypatch.setattr(format_rounds, "measured_losses", _NoisyLosses)
    monkeypatch.setattr(_NoisyLosses, "error", error)
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.eval_shape(lambda: arguments(8192, 8192))
    limit = 0.85
    step = search(mesh, limit, hardware=diffshard.preset("h100", dict(mesh.shape)), calls=[args] * 20, rounds=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = step.plan(*args)
    said = [str(warning.message) for warning in caught if "Noise hides the limit" in str(warning.message)]
    assert len(said) == hides
    assert plan.formats is not None
    assert plan.formats.measured_error == pytest.approx(error)
    assert plan.formats.more_runs == pytest.approx((2 * error / limit) ** 2)
    words = " ".join(str(plan).split())
    assert ("0.85 may be added. What is within it is partly chance. About 2 times as much measuring" in words) == hides
    assert ("Noise hides the limit" in plan.html()) == hides


def test_a_single_run_whose_noise_nobody_knows_is_told():
    trial = FormatTrial("all products", 1.0, 3, 0.1, 0.1)
    formats = PlannedFormats(0.1, 0.1, (), 0.1, "a validation run", (trial,))
    assert formats.measured_error is None
    assert "A single validation run does not tell" in noise_words(formats)
    assert noise_words(dataclasses.replace(formats, measured_by="2 validation runs")) == ""


def test_validation_runs_have_the_losses_of_the_program_and_no_rule_within_the_limit_is_faster():
    runs = [calls_of(1, 10), calls_of(2, 10)]
    formats = diffshard.formats.Formats(0.01, calls=calls_of(3, 8), steps=4, validation_runs=runs)
    losses = losses_of(formats)
    inside = list(losses.groups)[1:4]
    products = {m for name in inside for m in losses.groups[name].members}
    late = [np.mean(trained(inside, run)[-2:]) - np.mean(trained((), run)[-2:]) for run in runs]
    mean, error = losses.increase_of(products)
    np.testing.assert_allclose(mean, np.mean(late), atol=1e-6)
    assert error == pytest.approx(abs(late[0] - late[1]) / 2, abs=1e-6)
    assert losses.increase_of(frozenset()).mean == 0
    step = search(mesh_of(2), 0.01, calls=formats.calls, steps=4, validation_runs=runs)
    plan = step.plan(*arguments())
    assert plan.formats is not None
    assert plan.formats.measured_by == "2 validation runs"
    rules = {trial.name for trial in plan.formats.trials if "round" not in trial.name}
    assert rules == {"nothing", "all products", "all but the head", "all but first and last layers"}
    assert all(plan.step_s <= t.step_s for t in plan.formats.trials if t.measured_increase <= 0.01)
    assert "measured together by 2 validation runs" in " ".join(str(plan).split())
    assert "all but the head" in plan.html()


def test_looks_at_chosen_formats_by_hand():
    calls = calls_of(3, 11)
    formats = diffshard.formats.Formats(1.0, calls=calls, steps=4, looks=2, factor=2.0)
    assert formats.look_starts == [0, 7]
    losses = losses_of(formats)
    groups = list(losses.groups.values())
    inside, other = [groups[0], groups[3]], groups[2]
    current = {m for group in inside for m in group.members}
    expected = {}
    state = calls[0][0]
    names = [group.name for group in inside]
    for start in (0, 7):
        window = [(state, batch) for _, batch in calls[start : start + 4]]
        base = np.mean(trained(names, window)[-2:])
        for name, with_it, without in (
            (groups[0].name, base, np.mean(trained(names[1:], window)[-2:])),
            (other.name, np.mean(trained([*names, other.name], window)[-2:]), base),
        ):
            expected[name] = expected.get(name, 0) + 2.0 * (with_it - without) / 2
        step = search(mesh_of(1), UNLIMITED, increases=dict.fromkeys(names, 0.0))
        for _, batch in calls[:7]:
            state, _ = step(state, batch)
    increases = losses.increases_at(current, [groups[0], other])
    np.testing.assert_allclose(increases, np.maximum(list(expected.values()), 0), atol=1e-6)


def test_a_narrower_function_is_measured_in_place_of_the_searched_one():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    wide = jax.eval_shape(lambda: arguments(8192, 8192))
    measured = {"calls": calls_of(3, 8), "steps": 4, "measured_fn": train_step}
    plan = search(mesh, UNLIMITED, hardware=hardware, **measured).plan(*wide)
    assert plan.formats is not None
    losses = losses_of(diffshard.formats.Formats(UNLIMITED, **measured))
    products = {m for group in losses.groups.values() for m in group.members}
    assert plan.formats.measured_increase == losses.increase_of(products).mean
    with pytest.raises(ValueError, match=r"calls\[0\]` has other arrays"):
        search(mesh, 1.0, hardware=hardware, calls=calls_of(3, 8), steps=4).plan(*wide)


def test_where_no_product_gains_by_a_format_the_step_stays_as_it_is():
    def small_step(weights, x):  # its products take as long as any kernel does
        loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((x @ weights) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    calls = [(jnp.ones((64, 64)), jnp.full((64, 64), number)) for number in (1.0, 2.0)]
    formats = diffshard.formats.Formats(0.1, calls=calls, steps=2)
    plan = diffshard.search(small_step, mesh, hardware="h100", formats=formats).plan(*calls[0])
    assert plan.formats is not None
    assert plan.formats.groups == ()
    assert "all numbers stay as they are" in str(plan)


def test_rules_by_hand():
    def layers_step(params, batch):
        def loss_of(params):
            x = jnp.tanh(batch @ params["first"])
            for weights in params["middle"]:
                x = jnp.tanh(x @ weights)
            return jnp.mean((x @ params["last"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    square = jnp.ones((4, 4))
    params = {"first": square, "middle": [square] * 4, "last": square}
    groups = groups_of(traced(layers_step, (params, square))[2].graph)
    counts = [len(group.vertices) for group in groups]
    assert counts == [1, 4, 1, 1, 1, 4, 4, 1]
    rules = {name: len(products) for name, products in simple_rules(groups).items()}
    # Forward 1 + 4 + 1, backward 1 (first: no gradient for the batch) + 2 x 4 + 2.
    assert rules == {"all products": 17, "all but the head": 14, "all but first and last layers": 6}


def test_batches_that_the_looks_have_seen_are_warned_of():
    calls = calls_of(3, 8)
    formats = diffshard.formats.Formats(
        1.0, calls=calls, steps=4, validation_runs=[calls_of(4, 3), [*calls_of(5, 3), calls[2]]]
    )
    with pytest.warns(UserWarning, match=r"1 of the 7 calls of `Formats.validation_runs` have batches"):
        losses_of(formats)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=4, validation_runs=[calls_of(4, 3)]))


def test_steps_that_train_nothing():
    def gives_no_state(params, batch):
        return train_step(params, batch)[1]

    def takes_no_gradients(params, batch):
        x = batch[0] @ params["head"]
        return jax.tree.map(lambda p: 0.9 * p, params), jnp.mean((x - batch[1]) ** 2)

    for fn, what in ((gives_no_state, "no result replaces an argument"), (takes_no_gradients, "no gradients by JAX")):
        with pytest.raises(ValueError, match=rf"{fn.__name__} is none: .*{what}.*increases"):
            losses_of(diffshard.formats.Formats(1.0, calls=calls_of(3, 4), steps=2), fn)


def test_a_loss_for_each_example_is_no_loss():
    def losses_of_examples(params, batch):
        return train_step(params, batch)[0], jnp.mean((batch[0] @ params["head"] - batch[1]) ** 2, axis=1)

    with pytest.raises(ValueError, match=r"none of the results.*result\[1\] is float32\[16\].*mean loss"):
        losses_of(diffshard.formats.Formats(1.0, calls=calls_of(3, 4), steps=2), losses_of_examples)
    with pytest.raises(ValueError, match=r"'result\[1\]'.*but float32\[16\]"):
        losses_of(diffshard.formats.Formats(1.0, calls=calls_of(3, 4), steps=2, loss="result[1]"), losses_of_examples)


def test_formats_that_diverge_are_measured_as_inf():
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls_of(3, 4), steps=2))
    losses.run = lambda state, calls, on: (state, np.full(len(calls), np.inf if on else 1.0))  # pyright: ignore
    groups = list(losses.groups.values())
    assert losses.increase_of({m for group in groups for m in group.members}) == (np.inf, None)
    assert losses.increases_at(set(), groups) == [np.inf] * len(groups)


def test_a_group_with_an_increase_of_inf_stays_as_it_is(tmp_path):
    mesh, args = mesh_of(2), arguments()
    names = [group.name for group in groups_of(traced(train_step, args)[2].graph)]
    plan = search(mesh, 1.0, increases={**dict.fromkeys(names, 0.0), names[0]: np.inf}).plan(*args)
    assert plan.formats is not None
    assert {g.name: g.num_rounded for g in plan.formats.groups} == {name: name != names[0] for name in names}
    plan.save(tmp_path / "plan.json")
    assert diffshard.Plan.load(tmp_path / "plan.json", mesh) == plan


def test_increases_are_fitted_to_what_trials_measured():
    groups = groups_of(traced(train_step, arguments())[2].graph)
    true = dict(zip((group.name for group in groups), (0.3, 0.1, 0.0, 0.2, 0.4, 0.5), strict=True))
    looks = {name: 10 * increase + 0.4 * (-1) ** i for i, (name, increase) in enumerate(true.items()) if increase}

    def trial(inside, measured=None):
        products = frozenset(m for group in inside for m in group.members)
        together = sum(true[group.name] for group in inside) if measured is None else measured
        found: Any = SimpleNamespace(products=products)
        return format_rounds.Trial("", found, {}, 0.0, together, None)

    def error(fitted):
        return sum(abs(fitted[name] - true[name]) for name in looks)

    fitted = [
        format_rounds.fitted_increases(groups, looks, trials, 0.1)
        for trials in (
            [trial(groups)],
            [trial(groups), trial(groups, np.inf), trial(groups[:2])],
            [trial(groups), *(trial([group]) for group in groups)],
        )
    ]
    errors = [error(own) for own in (looks, *fitted)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1
    assert all(own.keys() == looks.keys() for own in fitted)  # what has no increase gets none
    diverging = {**looks, groups[0].name: np.inf}
    assert format_rounds.fitted_increases(groups, diverging, [trial(groups[1:])], 0.1)[groups[0].name] == np.inf


def test_a_plan_is_taken_again_where_its_increases_came_in_the_same_way():
    mesh, measured = mesh_of(2), {"calls": calls_of(3, 2), "steps": 2, "rounds": 0}
    plan = search(mesh, UNLIMITED, **measured).plan(*arguments())
    assert plan.formats is not None
    assert plan.formats.increases_by == "looks"

    def again(**formats):
        limits = diffshard.formats.Formats(UNLIMITED, **measured, **formats)
        step = diffshard.search(train_step, mesh, hardware=fast_links(mesh), formats=limits, start=plan)
        found = step.plan(*arguments()).formats
        assert found is not None
        return found

    assert again() == plan.formats
    assert again(increases_by="gradients").increases_by == "gradients"
    assert again(increases=plan.formats.increases).increases_by == ""


def test_a_plan_with_formats_is_not_taken_again_by_a_search_without_formats():
    mesh = mesh_of(2)
    names = [group.name for group in groups_of(traced(train_step, arguments())[2].graph)]
    plan = search(mesh, UNLIMITED, increases=dict.fromkeys(names, 0.0)).plan(*arguments())
    assert any(operation.format for operation in plan.operations)
    exact = diffshard.search(train_step, mesh, hardware=fast_links(mesh), start=plan).plan(*arguments())
    assert exact.formats is None
    assert not any(operation.format for operation in exact.operations)


def test_known_increases_begin_the_rounds_and_name_what_may_be_rounded():
    names = [group.name for group in groups_of(traced(train_step, arguments())[2].graph)]
    increases = dict.fromkeys(names[:2], 0.0)
    plan = search(mesh_of(2), 1.0, increases=increases, calls=calls_of(3, 4), steps=2).plan(*arguments())
    assert plan.formats is not None
    assert {group.name for group in plan.formats.groups if group.num_rounded} == set(names[:2])
    assert plan.formats.trials[0].predicted_increase == 0
    assert plan.formats.measured_by == "looks ahead"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"increases": {"nobody": 0.0}}, ValueError, "names 'nobody', which is no group of products"),
        ({"increases": [1]}, TypeError, "must be a dictionary"),
        ({"increases_by": "slopes"}, ValueError, '`Formats.increases_by` must be "looks" or "gradients", not .slopes'),
        ({"increases": {"nobody": float("nan")}}, ValueError, "must be a number, zero or more, not nan"),
        ({"calls": iter(())}, TypeError, "`Formats.calls` must be a list or tuple"),
        ({"calls": ((),), "steps": 2}, ValueError, "has 1 call, fewer than the 2 of 1 look ahead with `steps` = 2"),
    ],
)
def test_what_cannot_be_measured_is_named(options, error, words):
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def plan():
        formats = diffshard.formats.Formats(0.01, **options)
        return diffshard.search(train_step, mesh, hardware="h100", formats=formats).plan(*calls_of(0, 1)[0])

    with pytest.raises(error, match=words):
        plan()
