"""`search(..., remat="offload")` may also copy arrays to the host's memory until the backward pass reads them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard

LAYERS, ROWS, WIDTH, HIDDEN = 4, 512, 32, 128


def layer(x, weights):
    return x + jnp.sin(x @ weights["up"]) @ weights["down"]


def unrolled(x, params):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda stack: stack[i], params))  # noqa: B023
    return x


def scanned(x, params):
    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0]


def train_step(params, x, *, stack):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean(stack(x, params) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    params = {"up": jax.random.normal(keys[0], up) / 6, "down": jax.random.normal(keys[1], down) / 10}
    return params, jax.random.normal(keys[2], (ROWS, WIDTH))


def search(stack, limit_bytes, remat: Any = "offload", **options):
    """Returns a search for hardware whose link to the host is fast beside its arithmetic."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    own = dataclasses.replace(diffshard.preset("gh200", dict(mesh.shape)), flops_per_s=1e12, memory_bytes_per_s=1e11)
    step = functools.partial(train_step, stack=stack)
    return diffshard.search(step, mesh, hardware=own, memory_limit_bytes=limit_bytes, remat=remat, **options)


@functools.cache
def searched(stack):
    """Returns a step that is planned for two thirds of the memory that it takes without a limit."""
    return search(stack, 0.65 * search(stack, 1e12, None).plan(*arguments()).peak_bytes)


@pytest.mark.parametrize("stack", [unrolled, scanned])
def test_what_is_offloaded_makes_room_and_results_stay_equal(stack, tmp_path):
    step, (params, x) = searched(stack), arguments()
    plan = step.plan(params, x)
    assert plan.remat is not None
    assert plan.offloaded
    assert plan.peak_bytes <= plan.memory_limit_bytes
    offloaded = [residual for residual in plan.remat.residuals if residual.how == "offloaded"]
    assert sum(residual.num_bytes for residual in offloaded) == pytest.approx(plan.remat.host_bytes)
    assert "offloaded to the host's memory" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", plan.mesh)
    assert loaded.remat == plan.remat
    wanted, wanted_loss = jax.jit(functools.partial(train_step, stack=stack))(params, x)
    for executor in ("program", "constraints", "propagation"):
        applied = loaded.apply(functools.partial(train_step, stack=stack), executor=executor)
        result, loss = applied(*applied.plan(params, x).shard(params, x))
        np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, wanted)


def test_the_program_copies_to_the_host_and_back():
    step, shapes = searched(unrolled), jax.eval_shape(arguments)
    text = str(jax.make_jaxpr(step)(*shapes))
    count = len(searched(unrolled).plan(*arguments()).offloaded)
    assert text.count("devices=(MemorySpace.Host,)") == count
    assert text.count("devices=(MemorySpace.Device,)") == count


def test_a_slow_link_is_waited_for():
    plan = searched(unrolled).plan(*arguments())
    assert plan.remat is not None
    rate = plan.hardware.host_memory_bytes_per_s
    assert rate is not None
    waits = [residual.seconds for residual in plan.remat.residuals if residual.how == "offloaded"]
    assert sum(waits) == pytest.approx(2 * plan.hardware.exposed_share * plan.remat.host_bytes / rate)


def test_hardware_without_a_rate_of_copies_is_refused_before_tracing():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="does not say how fast its devices copy to memory of their host"):
        diffshard.search(train_step, mesh, hardware="cpu", remat="offload")
