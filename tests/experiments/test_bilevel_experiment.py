"""The bilevel experiments on tiny settings: pairing, controls, selection, verdicts, equal compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from diffshard.bilevel.estimators import Estimator
from experiments import (
    bilevel,
    bilevel_estimators,
    bilevel_initialisation,
    bilevel_loss,
    bilevel_overhead,
    bilevel_relaxation,
)
from experiments import bilevel_training as task
from search_spaces.communication.precision import INT4

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def space():
    return task.space(task.QUICK, "slow")


def test_parts_of_the_text_are_disjoint_and_seeds_are_paired():
    parts = [task.part(name) for name in ("train", "search", "validation", "test")]
    whole = task.text.load()
    assert np.array_equal(np.concatenate(parts), whole)
    assert min(map(len, parts)) > 10 * task.FULL.sizes.sequence
    sizes = task.QUICK.sizes
    assert (task.batches("train", 3, 2, sizes) == task.batches("train", 3, 2, sizes)).all()
    assert (task.batches("train", 3, 2, sizes) != task.batches("train", 4, 2, sizes)).any()
    assert (task.batches("train", 3, 2, sizes) != task.batches("search", 3, 2, sizes)).any()


def test_the_loss_table_and_its_controls(space, tmp_path, capsys):
    options = ["loss", "--quick", "--records", str(tmp_path)]
    rows = {row.method: row for row in bilevel.main(options)}
    exact, int4, cut = rows["uniform exact"], rows["uniform int4"], rows["A, loss gradient cut"]
    assert exact.test.tolist() == [0.0]
    assert int4.milliseconds < 0.5 * exact.milliseconds
    assert abs(int4.test[0]) > 1e-4  # strategies do change training
    cheapest = tuple(int(np.argmin(cost)) for cost in space.problem().node_cost)
    assert cut.runs[0].choice == cheapest  # nothing else reaches A
    assert rows["random, same time"].milliseconds <= rows["A, curvature"].milliseconds * (1 + 1e-6)
    schedule = rows["prove: best schedule"]
    assert schedule.runs[0].exact_share == 0.5
    late = 0.5 * (space.seconds(exact.runs[0].choice) + space.seconds(schedule.runs[0].choice))
    assert schedule.milliseconds == pytest.approx(1e3 * late)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = bilevel.main(options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert [row.test.tolist() for row in again] == [row.test.tolist() for row in rows.values()]
    assert "slow links" in capsys.readouterr().out


def test_shuffled_slopes_are_the_same_ones_at_other_lossy_strategies(space, monkeypatch):
    sizes = [len(group.names) for group in space.groups]
    rng = np.random.default_rng(0)
    damages = [jnp.asarray(rng.normal(size=size)) for size in sizes]

    def linear(space, params, batch, rows, key):
        return sum((row @ damage for row, damage in zip(rows, damages, strict=True)), jnp.zeros(()))

    monkeypatch.setattr(bilevel_loss, "resolve", lambda name: Estimator(linear))
    estimator = bilevel_loss.shuffled("linear", space, seed=0)
    rows = [jnp.full(size, 1 / size) for size in sizes]
    value, slopes = jax.value_and_grad(lambda rows: estimator.increase(space, {}, None, rows, KEY))(rows)
    assert float(value) == pytest.approx(float(linear(space, {}, None, rows, KEY)))
    over = [d - d[int(group.lossless.argmax())] for d, group in zip(damages, space.groups, strict=True)]
    lossless = np.concatenate([group.lossless for group in space.groups])
    before, after = np.concatenate(over), np.concatenate(slopes)
    assert not after[lossless].any()
    np.testing.assert_allclose(np.sort(after), np.sort(before), rtol=1e-6)
    assert not np.allclose(after, before)


def test_random_choices_keep_the_time(space):
    seconds = space.seconds(task.uniform(space, "int4")) * 1.5
    choices = {bilevel_loss.random_within(space, seconds, seed) for seed in range(8)}
    assert len(choices) > 1
    assert all(space.seconds(choice) <= seconds * (1 + 1e-6) for choice in choices)
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
    found = bilevel_estimators.main(task.QUICK, seeds=1, steps=4, search_steps=2, estimators=("curvature",))
    num_lossy = sum(int((~group.lossless).sum()) for group in task.space(task.QUICK, "slow").groups)
    assert found["measured"].shape == found["curvature"].shape == (1, num_lossy)
    assert found["measured"].any()
    assert (found["curvature"] >= 0).all()


def test_overhead_of_a_search_step():
    alone, searching = bilevel_overhead.main(task.QUICK, 2, [("curvature", 1)])
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
    assert costs["softmax, temperature 0.1, 16 starts"] < costs["cut, 16 starts"]


def test_starts_are_compared_at_equal_compute():
    case = bilevel_initialisation.phase_retrieval(True)
    rows = bilevel_initialisation.compared(case, 1, (2, 2), 4)
    assert {row.steps for row in rows[:4]} == {12}
    assert rows[4].steps == 4
    assert all(np.isfinite(row.losses).all() for row in rows)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="`--steps` a positive multiple of 4; got 1, 1 and 6"):
        bilevel.main(["loss", "--seeds", "1", "--search-steps", "1", "--steps", "6"])


def test_settings_name_their_strategies():
    assert task.FULL.uniform == ("exact", "bfloat16", "int8", "int4")
    assert task.QUICK.narrow == (INT4,)
