"""Data and models as every device computes them: the numbers of one device on many, and they learn."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from experiments.models import device_images, digits, text
from search_spaces.communication.space import CommunicationSpace

KEY = jax.random.key(0)
MESH = {"data": 2, "model": 4}
ALONE = {"data": 1, "model": 1}


def test_the_longer_text_is_the_language_reference():
    tokens = text.load("python_reference")
    assert tokens.dtype == np.int32
    assert len(tokens) > 400_000
    assert 'The "assert" statement' in text.decode(tokens)
    assert "�" not in text.decode(tokens)
    np.testing.assert_array_equal(text.load(), text.load("alice"))
    with pytest.raises(ValueError, match=r"`name` must be one of .* not 'bob'"):
        text.load("bob")  # type: ignore[arg-type]


def test_digits_are_images_and_their_numbers():
    images, numbers = digits.load()
    assert images.shape == (1797, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert set(numbers) == set(range(digits.CLASSES))
    assert np.bincount(numbers).min() > 170
    near = np.square(images[:-1] - images[-1]).sum(axis=(1, 2)).argmin()
    assert numbers[near] == numbers[-1]


def _images(mesh_axes: dict[str, int]) -> tuple[CommunicationSpace, Any, Any]:
    images, numbers = digits.load()
    params, batch = device_images.init(KEY, device_images.ImageSizes(width=16)), (images[:32], numbers[:32])
    specs = device_images.SPECS, device_images.BATCH_SPEC
    return CommunicationSpace(device_images.loss_fn, mesh_axes, params, batch, *specs), params, batch


MODELS = {"images": _images}


def _gradients(space: CommunicationSpace, params: Any, batch: Any) -> Any:
    choice = space.lossless_choice()
    return jax.jit(lambda p: space.loss_and_gradients(p, batch, choice, space.state(p), KEY)[:2])(params)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_many_devices_compute_what_one_does(make: Callable):
    space, params, batch = make(MESH)
    mesh = jax.make_mesh((2, 4), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    expected = _gradients(*make(ALONE))
    assert not space.notes
    for run in (space, space.on_mesh(mesh)):
        found = _gradients(run, params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found, expected)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_lowers_the_loss(make: Callable):
    space, params, batch = make({"data": 2, "model": 2})
    optimizer, choice = optax.adam(1e-2), space.lossless_choice()

    def step(carried: Any, _: None) -> Any:
        params, state = carried
        loss, gradients, _ = space.loss_and_gradients(params, batch, choice, space.state(params), KEY)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    losses = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=20)[1])(params)
    assert jnp.isfinite(losses).all()
    assert float(losses[-1]) < 0.7 * float(losses[0])
