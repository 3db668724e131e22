"""Runs a model of the zoo on one device and with a plan, and says how far apart the two runs are."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import diffshard
from diffshard import Hardware, Plan
from experiments.equal_results import RunDifference, compare
from experiments.zoo.base import TrainingStep, ZooModel

SLOWER = 1000.0
"""By how much the slow devices are slower than H100s: small models are then split as large ones are on H100s."""


class ZooRun(NamedTuple):
    """A model with a plan, beside one device.

    Attributes:
      plan: the plan.
      planning_s: seconds of tracing and searching.
      num_state: how many of the flat arguments are state; they come first.
      difference: of losses and state after some steps.
    """

    plan: Plan
    planning_s: float
    num_state: int
    difference: RunDifference


def slow_devices(fast: Hardware) -> Hardware:
    """Returns hardware whose devices compute and read memory `SLOWER` times slower, with the links as they are."""
    rates = fast.flops_per_s
    slow_rates = (
        {dtype: rate / SLOWER for dtype, rate in rates.items()} if isinstance(rates, Mapping) else rates / SLOWER
    )
    return dataclasses.replace(
        fast,
        name=f"{fast.name}, {SLOWER:,.0f} times slower",
        flops_per_s=slow_rates,
        memory_bytes_per_s=fast.memory_bytes_per_s / SLOWER,
    )


def run(model: ZooModel, mesh: Mesh, hardware: Hardware, *, steps: int, time_limit_s: float) -> ZooRun:
    """Trains a model for some steps on one device, and again with a plan; compares losses and state.

    Raises:
      ImportError: a package of the model is not installed.
    """
    single, planned = model.make(), model.make()
    search = diffshard.nnx.search if single.in_place else diffshard.search
    reference = _train(single.jit(single.function), single, steps)
    function: Any = search(planned.function, mesh, hardware=hardware, time_limit_s=time_limit_s)
    start = time.perf_counter()
    plan = function.plan(*planned.state, *planned.batch)
    planning_s = time.perf_counter() - start
    if planned.in_place:
        function.shard(*planned.state, *planned.batch)
    else:
        placed = plan.shard(*planned.state, *planned.batch)
        placed = placed if len(planned.state) + len(planned.batch) > 1 else (placed,)
        planned = planned._replace(state=placed[: len(planned.state)], batch=placed[len(planned.state) :])
    num_state = sum(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(planned.state))
    return ZooRun(plan, planning_s, num_state, compare(reference, _train(function, planned, steps)))


def _train(function: Any, training: TrainingStep, steps: int) -> tuple[Any, list[Any]]:
    """Returns the state after some steps, as numbers, and the losses."""
    state, losses = training.state, []
    for _ in range(steps):
        if training.in_place:
            loss = function(*state, *training.batch)
        else:
            *state, loss = function(*state, *training.batch)
        losses.append(np.asarray(loss))
    if training.in_place:
        state = [nnx.to_pure_dict(nnx.state(module)) for module in state]
    return [_numbers(leaf) for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array | np.ndarray)], losses


def _numbers(leaf: Any) -> np.ndarray:
    """Returns an array, or a random key's data, on the host."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def state_share(plan: Plan, num_state: int) -> float:
    """Returns which part of the bytes of the first flat arguments a device holds: 1 if nothing is split."""
    state = plan.arguments[:num_state]
    whole = sum(tensor.num_bytes for tensor in state)
    held = sum(tensor.num_bytes / _parts(tensor.spec, plan) for tensor in state)
    return held / whole if whole else 1.0


def work_share(plan: Plan) -> float:
    """Returns which part of the work of one device each device does: 1/8 if 8 devices split everything evenly."""
    each = sum(operation.compute_s for operation in plan.operations)
    whole = sum(
        operation.compute_s * max([_parts(spec, plan) for spec in (*operation.operands, *operation.unreduced)] or [1])
        for operation in plan.operations
    )
    return each / whole if whole else 1.0


def _parts(spec: Sequence[Sequence[str]], plan: Plan) -> int:
    return prod(plan.mesh_axes[axis] for axes in spec for axis in axes)
