"""What the repository predicts for a published run: its own layout, completed by the search, and the plan it finds."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from cost.base import Hardware
from experiments.long_context import attention_split_by
from experiments.published.decoder import Split, abstract_state, loss_function, specs_of, training_step
from experiments.published.runs import Run
from search_spaces.sharding.opaque.cudnn import planned_without_cudnn

KINDS: tuple[str, ...] = ("products", "attention", "memory", "stacks", "links")
"""What a step's seconds are divided into."""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step.

    Attributes:
      seconds: of the step.
      parts: seconds by `KINDS`: products, fused attention, all other arithmetic, copies into the stacked arrays that a
        scan over layers makes, and links that the step waits for.
      peak_bytes: of a device.
      fits: whether the peak is within the device's memory.
    """

    seconds: float
    parts: dict[str, float]
    peak_bytes: float
    fits: bool

    @property
    def dominant(self) -> str:
        """The largest part beside products, or "products" where that takes less than a tenth of the step."""
        others = {kind: self.parts[kind] for kind in KINDS[1:]}
        largest = max(others, key=lambda kind: others[kind])
        return largest if others[largest] > 0.1 * self.seconds else "products"


def predict(run: Run, hardware: Hardware, *, time_limit_s: float = 10.0) -> Prediction:
    """Predicts a run in its published layout."""
    return described(plan_of(run, hardware, time_limit_s=time_limit_s), run, hardware)


def plan_of(
    run: Run,
    hardware: Hardware,
    *,
    split: Split | None = None,
    is_free: bool = False,
    memory_limit_bytes: float = math.inf,
    time_limit_s: float = 10.0,
) -> diffshard.Plan:
    """Plans a run's training step.

    Args:
      run: rebuilt from its row.
      hardware: with links for the run's mesh.
      split: the layout of activations and state; None is the published one.
      is_free: leaves all layouts to the search.
      memory_limit_bytes: of a device.
      time_limit_s: of the solver.
    """
    split = run.split if split is None else split
    mesh = AbstractMesh(
        tuple(run.mesh_axes.values()), tuple(run.mesh_axes), axis_types=(AxisType.Auto,) * len(run.mesh_axes)
    )
    # No published run here splits attention over sequences. A ring is traced with as many rounds as the axis has
    # devices, which takes half a minute for 512.
    with planned_without_cudnn(), attention_split_by(None if is_free else "heads"):
        loss = loss_function(run.sizes, None if is_free else split, mesh, run.remat, run.attention)
        pinned = None if is_free else NamedSharding(mesh, P(split.batch))
        gathered = None
        if not is_free and split.gathers_once:
            specs = specs_of(run.sizes, dataclasses.replace(split, state=()), run.mesh_axes)
            gathered = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        step = training_step(loss, run.accumulation, pinned, gathered)
        state = abstract_state(run.sizes)
        tokens = jax.ShapeDtypeStruct((run.batch, run.sizes.sequence + 1), jnp.int32)
        given = None if is_free else (state_specs(run, split, state[1]), P(split.batch))
        search = diffshard.search(
            step,
            mesh,
            hardware=hardware,
            in_shardings=given,
            donate_argnums=0,
            time_limit_s=time_limit_s,
            memory_limit_bytes=memory_limit_bytes,
        )
        return search.plan(state, tokens)


def state_specs(run: Run, split: Split, optimizer_state: Any) -> Any:
    """Returns the `PartitionSpec` of parameters and of the optimiser's state, which is split as they are."""
    specs = specs_of(run.sizes, split, run.mesh_axes)
    moments = optax.tree_map_params(  # pyright: ignore[reportAttributeAccessIssue]
        optax.adamw(1e-4), lambda _, spec: spec, optimizer_state, specs, transform_non_params=lambda _: P()
    )
    return specs, moments


def described(plan: diffshard.Plan, run: Run, hardware: Hardware) -> Prediction:
    """Divides a plan's seconds; a run whose layers are not scanned makes no stacked arrays, and pays for none."""
    parts = dict.fromkeys(KINDS, 0.0)
    for operation in plan.operations:
        parts[_kind(operation.signature)] += operation.compute_s
    parts["links"] = plan.step_s - plan.compute_s
    if not run.is_scanned:
        parts["stacks"] = 0.0
    return Prediction(sum(parts.values()), parts, plan.peak_bytes, plan.peak_bytes <= hardware.memory_bytes)


def _kind(signature: str) -> str:
    if "dot_product_attention" in signature:
        return "attention"
    if "dot_general" in signature:
        return "products"
    return "stacks" if signature.startswith("stack(") else "memory"
