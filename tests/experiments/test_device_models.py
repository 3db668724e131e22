"""Data and models as every device computes them: the numbers of one device on many, and they learn."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from experiments.models import device_images, device_moe, digits, text
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


MOE = device_moe.MoeSizes(layers=2, width=16, heads=2, experts=4, sequence=16)
AMPLE = partial(device_moe.loss_fn, capacity_factors=(2.0, 1.0))  # two choices among four experts: all find room


def _moe(mesh_axes: dict[str, int], loss_fn: Callable = AMPLE) -> tuple[CommunicationSpace, Any, Any]:
    params = device_moe.init(KEY, MOE)
    tokens = text.sample(text.load("python_reference"), KEY, 4, MOE.sequence)
    specs = device_moe.SPECS, device_moe.BATCH_SPEC
    return CommunicationSpace(loss_fn, mesh_axes, params, tokens, *specs, hardware="h100"), params, tokens


MODELS = {"images": _images, "experts": partial(_moe, loss_fn=partial(AMPLE, balance_weight=0.0))}


def _gradients(space: CommunicationSpace, params: Any, batch: Any) -> Any:
    choice = space.exact_choice()
    return jax.jit(lambda p: space.loss_and_gradients(p, batch, choice, space.init_residuals(p), KEY)[:2])(params)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_many_devices_compute_what_one_does(make: Callable):
    space, params, batch = make(MESH)
    mesh = jax.make_mesh((2, 4), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    expected = _gradients(*make(ALONE))
    assert not space.notes
    for run in (space, space.on_mesh(mesh)):
        result = _gradients(run, params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), result, expected)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_lowers_the_loss(make: Callable):
    space, params, batch = make({"data": 2, "model": 2})
    optimizer, choice = optax.adam(1e-2), space.exact_choice()

    def step(carried: Any, _: None) -> Any:
        params, state = carried
        loss, gradients, _ = space.loss_and_gradients(params, batch, choice, space.init_residuals(params), KEY)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    losses = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=20)[1])(params)
    assert jnp.isfinite(losses).all()
    assert float(losses[-1]) < 0.7 * float(losses[0])


def test_the_experts_balance_is_a_gradient_and_no_value():
    """It is per device: on one device the whole batch's."""
    (loss, result), (plain_loss, plain) = (
        _gradients(*_moe(ALONE, partial(AMPLE, balance_weight=weight))) for weight in (0.1, 0.0)
    )
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)
    difference = jnp.abs(result["layers"]["gate"] - plain["layers"]["gate"]).max(axis=(1, 2))
    assert (difference > 1e-4).all()
    np.testing.assert_allclose(result["layers"]["up"][-1], plain["layers"]["up"][-1], atol=1e-6)


def test_windows_and_capacities_are_choices_that_change_the_loss_and_send_less():
    space, params, tokens = _moe(MESH, device_moe.loss_fn)
    choices = {group.names: g for g, group in enumerate(space.groups) if not group.strategies}
    assert set(choices) == {("whole", "2 blocks", "1 block"), ("capacity 2", "capacity 1.25", "capacity 1")}
    narrow = _moe({"data": 1, "model": 2}, device_moe.loss_fn)[0]  # where two blocks are the whole
    assert next(group.names for group in narrow.groups if not group.strategies) == ("whole", "1 block")
    run = jax.jit(lambda choice: space.loss(params, tokens, list(choice), KEY))
    for g in choices.values():
        rows = [[s if h == g else 0 for h in range(len(space.groups))] for s in range(3)]
        losses = [float(run(jnp.array(row))) for row in rows]
        assert len({round(loss, 6) for loss in losses}) == 3
        parts = [space.explain(row) for row in rows]
        assert (np.diff([sum(part.traffic.sent_bytes for part in row if part.traffic) for row in parts]) < 0).all()


def test_sequences_that_devices_do_not_divide_are_refused():
    params, tokens = device_moe.init(KEY, MOE), jnp.zeros((2, 16), int)
    with pytest.raises(ValueError, match='`tokens` are of 15 places; 4 devices of "model" must divide them'):
        jax.make_jaxpr(device_moe.loss_fn, axis_env=list(MESH.items()))(params, tokens)
