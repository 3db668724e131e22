"""Looks ahead: their derivatives, what they count, and that what is measured is the function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from diffshard.sharding_search.format_losses import MeasuredLosses
from tests.diffshard.sharding_search.test_format_rounds import calls_of, losses_of
from tests.diffshard.sharding_search.test_formats import WIDTH, mesh_of, search


def slopes_and_losses(fn, calls, weight, step):
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=len(calls)), fn)
    rows = len(losses.groups)

    def late(weights):
        return np.mean(losses.look.run(np.asarray(weights, np.float32), {}, calls_flat(losses))[1][-2:])

    own = np.full((rows, 1), weight, np.float32)
    slopes = losses.look.slopes(own, {}, calls_flat(losses))
    differences = [(late(own + step * row) - late(own)) / step for row in np.eye(rows)[:, :, None]]
    return slopes[:, 0], np.array(differences)


def calls_flat(losses: MeasuredLosses):
    return losses._calls


def unrolled_step(params, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch[0] @ params["head"]) - batch[1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss


def test_slopes_go_through_the_updates_as_finite_differences_do():
    calls = [({"head": params["head"]}, batch) for params, batch in calls_of(3, 4)]
    slopes, differences = slopes_and_losses(unrolled_step, calls, 0.001, 0.02)
    assert np.max(np.abs(differences)) > 1e-5
    np.testing.assert_allclose(slopes, differences, rtol=0.05, atol=0.05 * np.max(np.abs(differences)))


def test_half_way_the_slope_of_a_square_is_the_difference_of_its_ends():
    """With residuals of 0 rounding adds the mean square of its error, to which the exact choice's slope is blind."""
    (params, (x, _)), *_ = calls_of(3, 1)
    calls = [({"head": params["head"]}, (x, x @ params["head"]))] * 2

    def step(params, batch):
        def loss_of(params):
            return jnp.mean((batch[0] @ params["head"] - batch[1]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 1e-9 * g, params, gradients), loss

    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=2, factor=1.0), step)
    forward, backward = losses.groups.values()
    added = losses.increase_of(forward.members).mean
    assert added > 1e-5
    assert losses.increases_by_gradients(frozenset(), [forward, backward])[0] == pytest.approx(added, rel=1e-3)
    near_exact = losses.look.slopes(np.full((2, 1), 1e-3, np.float32), {}, calls_flat(losses))
    assert abs(near_exact[0, 0]) < 0.01 * added


def test_gradients_price_what_a_search_chooses():
    calls = [({"head": params["head"]}, batch) for params, batch in calls_of(3, 8)]
    formats = diffshard.formats.Formats(1.0, calls=calls, steps=4, increases_by="gradients")
    losses = losses_of(formats, unrolled_step)
    groups = list(losses.groups.values())
    assert losses.increases_at(frozenset(), groups) == losses.increases_by_gradients(frozenset(), groups)
    plan = search(mesh_of(1), 1.0, unrolled_step, calls=calls, steps=4, increases_by="gradients", rounds=0)
    found = plan.plan(*calls[0]).formats
    assert found is not None
    named = dict(zip(losses.groups, losses.increases_at(frozenset(), groups), strict=True))
    assert found.increases == pytest.approx({name: named[name] for name in found.increases})


def test_slopes_that_are_not_finite_forbid_the_group():
    calls = [({"head": params["head"]}, (batch[0].at[0].set(jnp.inf), batch[1])) for params, batch in calls_of(3, 2)]
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=2, increases_by="gradients"), masked_step)
    groups = list(losses.groups.values())
    assert np.inf in losses.increases_at(frozenset(), groups)


def looping_step(params, batch):
    """Counts in a loop whose length is not known, which JAX does not differentiate backward."""
    params, loss = unrolled_step(params, batch)
    doubled = jax.lax.while_loop(lambda x: jnp.max(x) < 1, lambda x: 2 * x, jnp.abs(params["head"]) + 0.6)
    return {"head": params["head"] + 1e-3 * doubled}, loss


def test_what_cannot_be_differentiated_again_is_an_error_that_names_the_other_way():
    calls = [({"head": params["head"]}, batch) for params, batch in calls_of(3, 2)]
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=2, increases_by="gradients"), looping_step)
    with pytest.raises(ValueError, match=r'increases_by` = "gradients" and `bilevel` need. Take "looks"'):
        losses.increases_at(frozenset(), list(losses.groups.values()))


def masked_step(params, batch):
    """Multiplies a row of infinities that is masked afterwards; it has no gradient."""
    fixed = jax.lax.stop_gradient(batch[0]) @ jnp.ones((WIDTH, WIDTH))
    hidden = fixed.at[0].set(0.0)

    def loss_of(params):
        return jnp.mean((hidden @ params["head"] - batch[1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), loss


def test_operands_without_a_scale_are_counted_and_warned_of():
    calls = [({"head": p["head"]}, (batch[0].at[0].set(jnp.inf), batch[1])) for p, batch in calls_of(3, 4)]
    with pytest.warns(UserWarning, match=r"operands had numbers that are not finite.*while formats were measured"):
        plan = search(mesh_of(2), 1e9, masked_step, calls=calls, steps=2).plan(*calls[0])
    assert plan.formats is not None
    assert sorted(np.isinf(list(plan.formats.increases.values()))) == [False, False, True]
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls, steps=2), masked_step)
    first, *others = losses.groups.values()
    losses.increases_at(frozenset(), [first, *others])
    assert losses.overflows == {first.name: 4}  # one operand in each of two steps, of two looks


def test_another_exact_loss_is_an_error_with_both_numbers():
    losses = losses_of(diffshard.formats.Formats(1.0, calls=calls_of(3, 2), steps=2))

    def other(*arguments):
        return [1.5 * result for result in exact(*arguments)]

    def exact(*arguments):
        return losses.look.mixed(jnp.zeros((len(losses.groups), 1)), {}, *arguments)[0]

    losses.check_exact(exact)
    words = r"loss of the first call is 1\.78\d+, but .* make it 1\.19\d+\. This is a fault"
    with pytest.raises(ValueError, match=words):
        losses.check_exact(other)
