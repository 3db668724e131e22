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
from experiments.equal_results import LOSS_TOLERANCE, RunDifference, compare
from experiments.zoo.base import TrainingStep, ZooModel

SLOWER = 1000.0
"""By how much the slow devices are slower than H100s: small models are then split as large ones are on H100s."""

MOST_NOISES = 5.0
"""By how many times the difference of two runs one rounding apart may be exceeded: every operation rounds, not only the
parameters do."""


class ZooRun(NamedTuple):
    """A model with a plan, beside one device.

    Attributes:
      plan: the plan.
      planning_s: seconds of tracing and searching.
      num_state: how many of the flat arguments are state; they come first.
      difference: of losses and state after some steps.
      noise: the same difference of two runs on one device, whose parameters are one rounding apart.
    """

    plan: Plan
    planning_s: float
    num_state: int
    difference: RunDifference
    noise: RunDifference

    @property
    def verdict(self) -> str:
        """Whether the runs are "equal", differ as by "rounding", or "DIFFER"."""
        if self.difference.equal:
            return "equal"
        pairs = zip(self.difference[:2], self.noise[:2], strict=True)
        return "rounding" if all(a <= max(MOST_NOISES * b, LOSS_TOLERANCE) for a, b in pairs) else "DIFFERS"


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
    on_one_device, nearby = single.jit(single.function), _one_rounding_apart(model.make())
    reference = _train(on_one_device, single, steps)
    noise = compare(reference, _train(on_one_device, nearby, steps))
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
    return ZooRun(plan, planning_s, num_state, compare(reference, _train(function, planned, steps)), noise)


def _one_rounding_apart(training: TrainingStep) -> TrainingStep:
    """Returns the same training with every real number of the state changed by at most one rounding."""
    generator = np.random.default_rng(0)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        factor = 1 + training.rounding * generator.uniform(-1, 1, leaf.shape)
        return (np.asarray(leaf, np.float64) * factor).astype(leaf.dtype)

    if not training.in_place:
        return training._replace(state=jax.tree.map(change, training.state))
    for module in training.state:
        nnx.update(module, jax.tree.map(change, nnx.state(module)))
    return training


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
    """Returns an array on the host: of a random key its data, of complex numbers both parts."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return np.stack([np.real(array), np.imag(array)]) if np.iscomplexobj(array) else array


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
