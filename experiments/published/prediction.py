"""What the repository predicts for a published run: its own layout, completed by the search, and the plan it finds."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import norm

import diffshard
from cost.base import Hardware
from cost.collectives import collective_s
from cost.networks import links_of
from cost.pipeline_schedules import graph_of
from cost.pipeline_times import StageTimes, simulate
from experiments.long_context import attention_split_by
from experiments.published.decoder import Split, abstract_state, loss_function, specs_of, training_step
from experiments.published.hardware import device_of, hardware_of
from experiments.published.runs import Run
from search_spaces.sharding.custom_calls.cudnn import planned_without_cudnn

DEVICE_DEVIATION = 0.02
"""Standard deviation of the seconds that GPUs of one kind take for the same kernels. They differ by 8% on average, that
is plus and minus two deviations. Source: Sinha et al., Not All GPUs Are Created Equal (arXiv:2208.11035). Of
0 to 8% in steps of one it also ranks the fitted runs best."""
KINDS: tuple[str, ...] = ("products", "attention", "memory", "stacks", "links")
"""What a step's seconds are divided into."""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step.

    Attributes:
      seconds: of the step.
      parts: seconds by `KINDS`: products, fused attention, all other arithmetic, copies into the stacked arrays that a
        scan over layers makes, and links and other devices that the step waits for.
      peak_bytes: of a device.
      fits: whether the peak is within the device's memory.
    """

    seconds: float
    parts: dict[str, float]
    peak_bytes: float
    fits: bool

    def with_slowest_of(self, num_devices: int, deviation: float = DEVICE_DEVIATION) -> "Prediction":
        """Returns the same where all devices wait for the slowest of them, as those of a synchronous step do.

        The slowest of n draws from a normal distribution is expected at its quantile (n - 3/8) / (n + 1/4). Source:
        Blom, Statistical Estimates and Transformed Beta-Variables (1958).

        Args:
          num_devices: of the run.
          deviation: standard deviation of what devices take, relative to their mean.
        """
        quantile = norm.ppf((num_devices - 0.375) / (num_devices + 0.25))
        waits_s = self.seconds * deviation * float(quantile)
        parts = {**self.parts, "links": self.parts["links"] + waits_s}
        return dataclasses.replace(self, seconds=self.seconds + waits_s, parts=parts)

    @property
    def dominant(self) -> str:
        """The largest part beside products, or "products" where that takes less than a tenth of the step."""
        others = {kind: self.parts[kind] for kind in KINDS[1:]}
        largest = max(others, key=lambda kind: others[kind])
        return largest if others[largest] > 0.1 * self.seconds else "products"


def predict(run: Run, hardware: Hardware, *, time_limit_s: float = 10.0) -> Prediction:
    """Predicts a run in its published layout."""
    if run.stages > 1:
        return _predict_pipeline(run, hardware, time_limit_s)
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
        step, state, tokens = step_of(run, None if is_free else split, mesh)
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


def step_of(
    run: Run, split: Split | None, mesh: Mesh | AbstractMesh, *, is_unrolled: bool = False
) -> tuple[Callable[..., Any], Any, jax.ShapeDtypeStruct]:
    """Returns a run's training step, its state and its tokens; a split of None leaves all layouts open."""
    loss = loss_function(run.sizes, split, mesh, run.remat, run.attention, is_unrolled)
    pinned = None if split is None else NamedSharding(mesh, P(split.batch))
    gathered = None
    if split is not None and split.gathers_once:
        specs = specs_of(run.sizes, dataclasses.replace(split, state=()), run.mesh_axes)
        gathered = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    step = training_step(loss, run.accumulation, pinned, gathered)
    tokens = jax.ShapeDtypeStruct((run.batch, run.sizes.sequence + 1), jnp.int32)
    return step, abstract_state(run.sizes), tokens


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


def _predict_pipeline(run: Run, hardware: Hardware, time_limit_s: float) -> Prediction:
    """Predicts a pipeline by the 1F1B schedule: its last stage, which also has the head, and stages of layers alone.

    A stage's micro-batch is what a second one adds to a step of one replica, and layers alone what more of them add to
    that. Replicas reduce their gradients once, after the last micro-batch.
    """
    layers, count, tensor = run.sizes.layers // run.stages, run.accumulation, run.mesh_axes["tensor"]
    sequences = run.batch // (count * run.mesh_axes["data"])

    def stage(num_layers: int, micro_batches: int) -> Prediction:
        part = dataclasses.replace(
            run,
            stages=1,
            sizes=dataclasses.replace(run.sizes, layers=num_layers),
            split=Split((), "tensor", gathers_once=True),
            mesh_axes={"tensor": tensor},
            batch=sequences * micro_batches,
            accumulation=micro_batches,
        )
        return predict(part, hardware_of(part), time_limit_s=time_limit_s)

    one, two = stage(layers, 1), stage(layers, 2)
    last_s = two.seconds - one.seconds
    layers_s = stage(2 * layers, 2).seconds - stage(2 * layers, 1).seconds - last_s
    # Each device of a stage sends its part of what is between stages over the network.
    boundary_bytes = 2 * sequences * run.sizes.sequence * run.sizes.width
    links = links_of(device_of(run)[1], {"stage": run.stages, **run.mesh_axes})
    send_s = links["stage"].latency_s / run.stages + boundary_bytes / tensor * links["stage"].s_per_byte
    micro_batch_s = np.array([layers_s] * (run.stages - 1) + [last_s])
    forward = 1 / (4 if run.remat == "full" else 3)
    sends_s = [send_s] * (run.stages - 1)
    times = StageTimes(forward * micro_batch_s, (1 - forward) * micro_batch_s, sends_s, sends_s)
    gradient_bytes = 2 * 12 * layers * run.sizes.width**2 / tensor
    reduction_s = float(collective_s("all_reduce", gradient_bytes, run.mesh_axes["data"], hardware.links["data"]))
    update_s = one.seconds - last_s
    seconds = update_s + reduction_s + simulate(times, graph_of("1f1b", run.stages, count)).step_s
    parts = {kind: one.parts[kind] + (count - 1) * (two.parts[kind] - one.parts[kind]) for kind in KINDS}
    parts["links"] = seconds - sum(seconds for kind, seconds in parts.items() if kind != "links")
    peak_bytes = one.peak_bytes + (run.stages - 1) * layers * boundary_bytes
    return Prediction(seconds, parts, peak_bytes, peak_bytes <= hardware.memory_bytes)


def _kind(signature: str) -> str:
    if "dot_product_attention" in signature:
        return "attention"
    if "dot_general" in signature:
        return "products"
    return "stacks" if signature.startswith("stack(") else "memory"
