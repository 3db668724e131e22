"""The bilevel experiments on tiny settings: pairing, controls, selection, verdicts, equal compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from cost.evaluation import evaluate
from diffshard.bilevel_search.base import TrainingProgress
from experiments import (
    bilevel,
    bilevel_estimators,
    bilevel_initialisation,
    bilevel_loss,
    bilevel_overhead,
    bilevel_relaxation,
    bilevel_searches,
)
from experiments import bilevel_training as task
from search_spaces.communication.base import INT4

KEY = jax.random.key(0)
PROGRESS = TrainingProgress(jnp.int32(0), None)


@pytest.fixture(scope="module")
def space():
    return task.space(task.QUICK, "slow")


def _first(batches):
    return np.asarray(jax.tree.leaves(batches)[0])


@pytest.mark.parametrize("name", list(task.SETTINGS))
def test_parts_of_the_data_are_disjoint_and_seeds_are_paired(name: str):
    work = task.SETTINGS[name].task()
    windows = [_first(work.evaluated(part)) for part in ("train", "search", "validation", "test")]
    rows = [{row.tobytes() for row in part.reshape(-1, *part.shape[2:])} for part in windows]
    for i, own in enumerate(rows):
        assert len(own) > 0.9 * windows[i].shape[0] * windows[i].shape[1]
        assert not any(own & other for other in rows[:i])
    drawn = [
        _first(task.batches(work, part, seed, 2))
        for part, seed in [("train", 3), ("train", 3), ("train", 4), ("test", 3)]
    ]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()
    assert (drawn[0] != drawn[3]).any()


def test_spaces_hold_schedules_for_what_goes_back_and_alternatives_for_experts():
    names = {
        name: [set(group.names) for group in task.space(task.SETTINGS[name], "slow").groups]
        for name in ("gpt", "experts")
    }
    late = "int8, int4 with error feedback from step 500"
    assert late in set().union(*names["gpt"])
    assert {"capacity 2", "capacity 1.25", "capacity 1"} in names["experts"]
    assert {"whole", "2 blocks", "1 block"} in names["experts"]


def test_the_loss_table_and_its_controls(space, tmp_path, capsys):
    options = ["loss", "--quick", "--records", str(tmp_path)]
    rows = {row.method: row for row in bilevel.main(options)}
    exact, int4, cut = rows["uniform exact"], rows["uniform int4"], rows["A, loss gradient cut"]
    assert exact.test.tolist() == [0.0]
    assert int4.milliseconds < 0.5 * exact.milliseconds
    assert abs(int4.test[0]) > 1e-4  # strategies do change training
    cheapest = tuple(int(np.argmin(cost)) for cost in space.problem.node_cost)
    assert cut.runs[0].choice == cheapest  # nothing else reaches A
    assert rows["random, same time"].milliseconds <= rows["A, curvature"].milliseconds * (1 + 1e-6)
    schedule = rows["runs: best exact first"]
    assert schedule.runs[0].exact_share == 0.5
    late = 0.5 * (_seconds(space, exact.runs[0].choice) + _seconds(space, schedule.runs[0].choice))
    assert schedule.milliseconds == pytest.approx(1e3 * late)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = bilevel.main(options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert [row.test.tolist() for row in again] == [row.test.tolist() for row in rows.values()]
    assert "slow links" in capsys.readouterr().out


def test_shuffled_slopes_are_the_same_ones_at_other_lossy_strategies(space):
    sizes = [len(group.names) for group in space.groups]
    rng = np.random.default_rng(0)
    loss_increases = [jnp.asarray(rng.normal(size=size)) for size in sizes]

    def linear(space, params, batch, relaxed, key, progress):
        return sum((row @ increase for row, increase in zip(relaxed, loss_increases, strict=True)), jnp.zeros(()))

    estimator = bilevel_searches.shuffled(linear, space, seed=0)
    rows = [jnp.full(size, 1 / size) for size in sizes]
    value, slopes = jax.value_and_grad(lambda rows: estimator(space, {}, None, rows, KEY, PROGRESS))(rows)
    assert float(value) == pytest.approx(float(linear(space, {}, None, rows, KEY, PROGRESS)))
    over = [d - d[int(group.exact.argmax())] for d, group in zip(loss_increases, space.groups, strict=True)]
    is_exact = np.concatenate([group.exact for group in space.groups])
    before, after = np.concatenate(over), np.concatenate(slopes)
    assert not after[is_exact].any()
    np.testing.assert_allclose(np.sort(after), np.sort(before), rtol=1e-6)
    assert not np.allclose(after, before)


def _seconds(space, choice):
    return evaluate(space.problem, choice).cost


def test_random_choices_keep_the_time(space):
    seconds = _seconds(space, task.uniform(space, "int4")) * 1.5
    choices = {bilevel_loss.random_within(space, seconds, seed) for seed in range(8)}
    assert len(choices) > 1
    assert all(_seconds(space, choice) <= seconds * (1 + 1e-6) for choice in choices)
    with pytest.raises(ValueError, match="`most_s` is 1e-12 s"):
        bilevel_loss.random_within(space, 1e-12, 0)


def test_verdicts_need_the_whole_interval_on_one_side():
    margin = bilevel_loss.MARGIN
    assert bilevel_loss.verdict(np.zeros(3)) == "yes"
    assert bilevel_loss.verdict(margin + np.array([-0.004, -0.0041, -0.0039])) == "yes"
    assert bilevel_loss.verdict(margin + np.array([0.004, 0.0041, 0.0039])) == "no"
    assert bilevel_loss.verdict(margin + np.array([-0.1, 0.09, 0.0])) == "open"
    assert bilevel_loss.verdict(np.array([1.0])) == "open"


def test_estimators_are_held_against_training():
    found = bilevel_estimators.main(task.QUICK, seeds=1)
    space = task.space(task.QUICK, "slow")
    num_lossy = sum(int((~group.exact).sum()) for group in space.groups)
    assert found["measured"].shape == found["curvature"].shape == (1, num_lossy)
    assert found["measured"].any()
    forward = bilevel_estimators.lossy(space).direction == "forward"
    assert 0 < forward.sum() < num_lossy
    assert found["met"][0, forward].all()
    np.testing.assert_allclose(found["met"][0, ~forward], 0, atol=1e-6)  # they change no loss where nothing is trained
    assert (found["curvature"] >= 0).all()


def test_overhead_of_a_search_step():
    alone, searching = bilevel_overhead.main(task.QUICK, 2)
    assert searching.temporary_bytes > alone.temporary_bytes > 0
    assert min(alone.seconds, searching.seconds) > 0


def test_the_gradient_decides_where_nothing_is_lossy():
    costs = {row.method: row.cost for row in bilevel.main(["relaxation", "--quick"])}
    (make,) = bilevel_relaxation.problems(True).values()
    problem = make()
    assert problem is not None
    optimum = diffshard.solve(problem, solver="exact")
    assert optimum.status == "optimal"
    assert min(costs.values()) >= optimum.cost * (1 - 1e-9)
    assert costs["softmax, temperature 0.1, 16 starts"] < costs["softmax cut, 16 starts"]
    assert costs["dual-guided, temperature 0.1, 16 starts"] <= costs["dual-guided cut, 16 starts"]


def test_starts_are_compared_at_equal_compute():
    case = bilevel_initialisation.phase_retrieval(True)
    rows = bilevel_initialisation.compare_methods(case, 1, (2, 2), 4)
    assert {row.steps for row in rows[:4]} == {12}
    assert rows[4].steps == 4
    assert all(np.isfinite(row.losses).all() for row in rows)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="`--steps` a positive multiple of 4; got 1 and 6"):
        bilevel.main(["loss", "--seeds", "1", "--steps", "6"])


def test_settings_name_their_strategies():
    assert task.SETTINGS["gpt"].uniform == ("exact", "bfloat16", "int8", "int4")
    assert task.QUICK.narrow == (INT4,)
