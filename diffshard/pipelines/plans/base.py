"""The data of a plan of a pipeline: its stages, what they take, and what was tried."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cost.pipeline_schedules import Schedule
from cost.pipeline_steps import Overlap
from cost.real_numbers import Amount, AmountOrInf, Count, Index, Limit
from diffshard.plans.base import Tensor
from diffshard.plans.json_values import JsonValues
from diffshard.plans.plan_record import Certified, History

GradientReduction = Literal["each_microbatch", "once"]
"""How often gradients are reduced over devices: in each micro-batch, or once, when the step ends."""
BatchMeans = Literal["whole", "each_microbatch"]
"""Which mean over the batch gradients read that need one: that of the whole batch, or of their own micro-batch."""
ResidualUse = Literal["keep", "recompute", "offload"]
"""What becomes of the arrays that a backward pass reads of its forward pass."""


class Decision(NamedTuple):
    """Something that the search for a pipeline decided.

    Attributes:
      what: what it was about, as in "find the shardings of a pipeline's stages".
      content: what was decided.
    """

    what: str
    content: JsonValues


@dataclass(frozen=True)
class ArgumentRoles:
    """Which arguments of a step have the batch, are donated, and are constants: by position and by name.

    Those that have both a position and a name may be in both.
    """

    batch_argnums: tuple[Index, ...] = ()
    batch_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[Index, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[Index, ...] = ()
    static_argnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    Attributes:
      first_layer, last_layer: of the chain of layers, from 0.
      source: where in the user's code it begins.
      hardware: the name of its devices.
      mesh_axes: devices along each axis of its sub-mesh.
      devices: the numbers of its devices in the cluster, kind by kind and host by host.
      forward_s, backward_s: predicted, of one micro-batch.
      end_s: predicted, of the end of the step, such as the optimiser's update.
      weights_s: predicted, of one micro-batch, of the gradients of the weights where a schedule computes them apart;
        they are not in `backward_s` then.
      send_forward_s, send_backward_s: of one micro-batch, to the next stage and back from it; 0 for the last stage.
      in_flight: how many micro-batches it keeps at most.
      peak_bytes: predicted, of each device; of this stage alone where it holds several.
      memory_limit_bytes: of each device; where it holds several stages, an equal part for each of them.
      residual_bytes: of each device, what one micro-batch leaves for its backward pass.
      arguments: those that it keeps, with their shardings.
      recomputed_operations: how many operations of the forward pass run again in the backward pass.
      recomputed_bytes: of the arrays that are made again, rather than kept, in each micro-batch; all devices together.
      num_residuals: arrays that the forward program of a micro-batch leaves for its backward program.
      num_offloaded: those of them that wait in memory of the host.
      offloaded_bytes: of each device, what one micro-batch leaves on the host for its backward pass.
      offload_s: predicted, for the copies of a micro-batch to the host, in `forward_s`; those back, in `backward_s`,
        take as long.
    """

    first_layer: Index
    last_layer: Index
    source: str
    hardware: str
    mesh_axes: Mapping[str, Count]
    devices: tuple[Index, ...]
    forward_s: Amount
    backward_s: Amount
    end_s: Amount
    send_forward_s: Amount
    send_backward_s: Amount
    in_flight: Index
    peak_bytes: Amount
    memory_limit_bytes: Limit
    residual_bytes: Amount
    arguments: tuple[Tensor, ...] = ()
    recomputed_operations: Index = 0
    recomputed_bytes: Amount = 0.0
    num_residuals: Index = 0
    num_offloaded: Index = 0
    offloaded_bytes: Amount = 0.0
    offload_s: Amount = 0.0
    weights_s: Amount = 0.0


@dataclass(frozen=True)
class PlannedReplica:
    """A replica of a pipeline besides the main one: it takes other micro-batches, and keeps no state.

    Attributes:
      num_microbatches: how many it takes.
      stages: from the first to the last, with the layers of those of the main one.
      weights_s: predicted, until it has the weights when a step begins.
      sums_s: predicted, of bringing its sums to the main replica and adding them there.
    """

    num_microbatches: Count
    stages: tuple[PlannedStage, ...]
    weights_s: Amount
    sums_s: Amount


@dataclass(frozen=True)
class PipelinePlanData(Certified):
    """How a training step runs as a pipeline.

    Attributes:
      function: its name.
      cluster: the cluster in words.
      num_devices: of the cluster; stages may leave some idle.
      num_layers: between which the step could be cut.
      num_microbatches: M, of all replicas.
      schedule: when each stage runs what.
      stages: of the main replica, from the first to the last.
      step_s: predicted, by simulation of the schedule, with the end of the step. With the schedule "2bw" that of steps
        that overlap.
      bubble: the share of the stages' time in which they wait.
      lower_bound_s: no choice of micro-batches among those tried, stages, meshes and shardings is predicted faster that
        keeps all residuals. Making cheap ones again may be a little faster, because they need not be written and read.
      search_s: seconds of the search.
      tried: for each number of micro-batches and schedule its predicted step; infinite where nothing fits.
      notes: sentences for the user.
      num_groups: over how many groups of examples gradients are reduced once, when the step ends; 1: they are reduced
        in each micro-batch.
      replicas: the other replicas.
      overlap: with the schedule "2bw" how a step overlaps with the next one (`cost.pipeline_steps.Overlap`).
      predicted_steps: with the schedule "2bw" by how many steps weights are predicted; 0: gradients are of the weights
        of one step ago.
      status: how the search ended, as `PlanData.status`.
      history: empty: each stage has searches of its own.
      roles: of the arguments of the step.
      facts: texts by name about the traced step, by which another function is told from the one that it is for.
      question: a hash of all that was asked for, but a time limit and a plan to begin with.
      decisions: the stages, their shardings and the plans of their programs, from which any process makes the programs
        again; a plan that was made without them can only be shown.
      batch_means: which means over the batch gradients read (`Pipeline.batch_means`).
      stages_per_device: how many stages each device holds.
      stored_in: the file of a store from which it was taken instead of a search; "" if it was searched.
    """

    function: str
    cluster: str
    num_devices: Count
    num_layers: Count
    num_microbatches: Count
    schedule: Schedule
    stages: tuple[PlannedStage, ...]
    step_s: Amount
    bubble: Amount
    lower_bound_s: Amount
    search_s: Amount
    tried: tuple[tuple[Count, Schedule, AmountOrInf], ...] = ()
    notes: tuple[str, ...] = ()
    num_groups: Count = 1
    replicas: tuple[PlannedReplica, ...] = ()
    overlap: Overlap = "none"
    predicted_steps: Amount = 0.0
    status: str = "finished"
    history: History = ()
    roles: ArgumentRoles = ArgumentRoles()
    facts: Mapping[str, str] = field(default_factory=dict)
    question: str = ""
    decisions: tuple[Decision, ...] = ()
    batch_means: BatchMeans = "whole"
    stages_per_device: Count = 1
    stored_in: str = field(default="", compare=False)

    @property
    def gradient_reduction(self) -> GradientReduction:
        """How often gradients are reduced over devices that share the examples of a micro-batch."""
        return "once" if self.num_groups > 1 else "each_microbatch"

    @property
    def main_microbatches(self) -> int:
        """How many micro-batches the main replica takes."""
        return self.num_microbatches - sum(replica.num_microbatches for replica in self.replicas)

    @property
    def all_stages(self) -> tuple[PlannedStage, ...]:
        """The stages of all replicas, those of the main one first."""
        return (*self.stages, *(stage for replica in self.replicas for stage in replica.stages))
