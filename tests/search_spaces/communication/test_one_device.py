"""The loss of many devices is that of one, or is refused before anything trains."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.search_spaces.communication.small_communication import (
    BATCH,
    KEY,
    PARAMS,
    ROWS,
    WIDTH,
    loss_fn,
    plain_loss,
    small_space,
)


def without_sums(params, batch):
    """The loss as on one device, which lacks the sums over hidden units on several."""
    return plain_loss(params, batch)


def with_mean_of_parts(params, batch):
    """The mean over some rows, of which devices have unequal numbers."""
    x, target = batch
    counted = jnp.arange(len(x)) + len(x) * lax.axis_index("data") < ROWS // 2 + 1
    return jnp.sum(jnp.square(x @ params["head"] - target).mean(-1) * counted) / (counted.sum() + 1)


def with_sizes(params, batch):
    """The loss with the number of rows of one device's part written out."""
    x, target = batch
    return loss_fn(params, (x.reshape(ROWS // 2, WIDTH), target))


def with_noise_of_devices(params, batch):
    """The loss with random numbers of each device."""
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), batch[0].shape)
    return loss_fn(params, (batch[0] + noise, batch[1]))


def check(fn=loss_fn, params=PARAMS, batch=BATCH, **options):
    small_space(fn, params, batch, **options).check_loss(params, batch, KEY)


def test_a_loss_without_its_sums_is_refused_with_both_numbers_and_the_axis():
    whole = float(plain_loss(PARAMS, BATCH))
    parts = {"up": jnp.split(PARAMS["layers"]["up"], 4, axis=2), "down": jnp.split(PARAMS["layers"]["down"], 4, axis=1)}
    of_devices = [{**PARAMS, "layers": {name: part[i] for name, part in parts.items()}} for i in range(4)]
    mean = sum(float(plain_loss(params, BATCH)) for params in of_devices) / 4
    assert abs(mean - whole) > 0.01
    with pytest.raises(ValueError, match="same loss on many devices as on one") as told:
        check(without_sums)
    message = str(told.value)
    numbers = re.search(r"8 devices \(data 2 x model 4\) is ([\d.]+), .* whole arguments it is ([\d.]+),", message)
    assert numbers is not None
    assert [float(number) for number in numbers.groups()] == pytest.approx([mean, whole], rel=1e-4)
    assert "`layers/down`, `layers/up` are split over 'model'" in message
    assert "`jax.lax.psum(x, 'model')`" in message
    assert "over 'data'" not in message


def test_zeros_among_first_parameters_hide_no_missing_sum():
    zeros = {**PARAMS, "layers": {**PARAMS["layers"], "down": jnp.zeros_like(PARAMS["layers"]["down"])}}
    with pytest.raises(ValueError, match=r"with some noise added to `params`.*psum\(x, 'model'\)"):
        check(without_sums, zeros)
    check(loss_fn, zeros)


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (lambda params, batch: lax.psum(loss_fn(params, batch), "data"), "The batch is split over 'data'.*a mean, not"),
        (with_mean_of_parts, "The batch is split over 'data'.*weights of the whole batch"),
    ],
)
def test_wrong_means_over_the_batch_are_refused(fn, advice):
    with pytest.raises(ValueError, match=advice):
        check(fn)


def test_a_loss_that_depends_on_the_number_of_devices_is_taken_where_that_is_said():
    with pytest.raises(ValueError, match=r"as with random numbers.* give `CommunicationSpace` `one_device_loss=None`"):
        check(with_noise_of_devices)
    check(with_noise_of_devices, one_device_loss=None)


def test_a_loss_that_needs_the_sizes_of_its_mesh_is_compared_with_another_function():
    with pytest.raises(ValueError, match=r"must also run with one device.*raises TypeError.*`jax\.lax\.axis_size`"):
        check(with_sizes)
    check(with_sizes, one_device_loss=plain_loss)
    with pytest.raises(ValueError, match=r"same loss on many devices"):
        check(with_sizes, one_device_loss=lambda params, batch: 2 * plain_loss(params, batch))


def test_rounding_of_short_floats_is_no_difference():
    short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, BATCH))
    check(loss_fn, *short)
    with pytest.raises(ValueError, match="same loss on many devices"):
        check(without_sums, *short)


def test_what_is_no_loss_on_one_device_is_refused():
    with pytest.raises(ValueError, match="`one_device_loss` must be 'loss_fn', a function or None, not 'same'"):
        small_space(one_device_loss="same")
