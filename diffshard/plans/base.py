"""The vocabulary of plans: how a function is parallelised on a mesh, what that costs, how far from optimal it can be.

Plans are data. Text, pages and files are made by functions of this folder that take them; what a user does with a plan
is `diffshard.sharding_search.plan.Plan`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware
from cost.real_numbers import Amount, AnyNumber, Count, FiniteNumber, Index, Limit, LowerBound
from diffshard.host_memory import HOST_MEMORY
from diffshard.plans.comparison import Comparison
from diffshard.plans.plan_record import Certified, History
from diffshard.plans.sections import (
    Advice,
    DelayedScale,
    MemoryProfile,
    PlannedFormats,
    PredictedComputing,
    Rematerialisation,
    WholeWork,
)
from diffshard.plans.timeline import PredictedTimeline
from search_spaces.partition_specs import NamedSpec, partition_spec

Executor = Literal["constraints", "program", "propagation"]
"""How a planned function runs.

"constraints": XLA partitions it, told by a sharding constraint at every place that the plan names. "program": every
device runs an explicit program, whose collectives are the plan's. "propagation": XLA partitions it and is told the
shardings of arguments and results only.
"""

LogicalAxes = tuple[str | tuple[str, ...] | None, ...]
"""A name for each dimension of an array in flax's metadata: of a logical axis, or of mesh axes; None without one."""

LogicalAxisRules = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs of a logical axis, as flax's names for dimensions, and the mesh axes that split it; empty for none."""


@dataclass(frozen=True)
class Tensor:
    """An array among the arguments or results of a function.

    Attributes:
      path: its place in the arguments or in the result, as `jax.tree_util.keystr` writes it.
      shape, dtype: of the whole array.
      spec: how it is split.
      given: whether the user fixed the spec.
      next_best_spec: the next best spec if everything else is unchanged; None if there is no other.
      next_best_s: seconds that the next best spec would add to the step.
      logical_axes: names of its dimensions in flax's metadata, "" for those without; None without any.
      on_host: whether it is in pinned memory of the host between steps, each device's part.
    """

    path: str
    shape: tuple[Index, ...]
    dtype: str
    spec: NamedSpec
    given: bool = False
    next_best_spec: NamedSpec | None = None
    next_best_s: AnyNumber = 0.0
    logical_axes: tuple[str, ...] | None = None
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        # The dtypes of random keys are written as `key<fry>`; a key takes two words of 4 bytes.
        itemsize = jax.numpy.dtype(self.dtype).itemsize if "<" not in self.dtype else 8
        return itemsize * math.prod(self.shape)

    def is_of(self, parameter: str) -> bool:
        """Returns whether it is, or is a part of, the argument of a parameter such as `state` or `rest[0]`."""
        return re.match(rf"{re.escape(parameter)}(?!\w)", self.path) is not None

    @property
    def partition_spec(self) -> PartitionSpec:
        """`spec` as a JAX `PartitionSpec`."""
        return partition_spec(self.spec)

    def sharding_on(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """Returns where it is on a mesh, and in which memory."""
        sharding = NamedSharding(mesh, self.partition_spec)
        return sharding.with_memory_kind(HOST_MEMORY) if self.on_host else sharding


@dataclass(frozen=True)
class Operation:
    """A vertex of the function's graph with its strategy, from which the sharding constraints in the function follow.

    Attributes:
      kind: "operation", or another origin of an array: "input", "constant", "carry", "slice", "stack", "join".
      signature: primitive and types; by these a plan recognises the function for which it was made.
      source: file and line of the user's code.
      scope: JAX's name stack, of modules and transformations.
      operands: the spec of each operand when the operation reads it.
      unreduced: the spec of each result before it is gathered or its reduction is finished.
      results: the spec of each result when the operation is done.
      value_specs: the spec in which each result is kept for the operations that read it.
      count: executions in one step.
      compute_s: seconds of arithmetic and memory traffic in one step.
      next_best_spec: the next best spec of the first result if everything else is unchanged; None if there is no other.
      next_best_s: seconds that the next best spec would add to the step.
      reductions: for each result of an operation the collectives that finish its partial results, as (kind, mesh axis)
        in order; empty for other origins.
      format: the name of the format to which a product's operands are rounded before they are multiplied, such as
        "float8"; "" for what runs as it was traced.
      sent_in: the format of the codes in which partial sums are sent, such as "int8"; "" for the result's own type.
      kept_in: the same for the codes as which the result is kept for the backward pass.
      exchanged_in: the same for the codes as which the result is exchanged between devices.
    """

    kind: Literal["operation", "input", "constant", "carry", "slice", "stack", "join"]
    signature: str
    source: str
    scope: str
    operands: tuple[NamedSpec, ...]
    unreduced: tuple[NamedSpec, ...]
    results: tuple[NamedSpec, ...]
    value_specs: tuple[NamedSpec, ...]
    count: Amount
    compute_s: Amount
    next_best_spec: NamedSpec | None = None
    next_best_s: AnyNumber = 0.0
    reductions: tuple[tuple[tuple[str, str], ...], ...] = ()
    format: str = ""
    sent_in: str = ""
    kept_in: str = ""
    exchanged_in: str = ""


@dataclass(frozen=True)
class PredictedCollective:
    """A collective that one operation needs.

    Attributes:
      kind, axis: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "collective_permute" along a mesh axis.
      num_bytes: size of the whole array that one group of devices along the axis gathers, scatters or reduces.
      count: executions in one step.
      seconds: that the step waits for all executions.
      operation: index into `PlanData.operations`.
      link_s: that all executions keep their link busy, more than `seconds` where they overlap with arithmetic.
      made_by: index into `PlanData.operations` of the operation, or argument, whose result it moves.
      read_by: index of the operation that reads what it leaves, the first of several, or of the argument that this
        replaces in the next call; None where nothing reads it.
    """

    kind: str
    axis: str
    num_bytes: Amount
    count: Amount
    seconds: Amount
    operation: Index
    link_s: Amount
    made_by: Index
    read_by: Index | None


@dataclass(frozen=True)
class PlannedObjective:
    """A user's objective for which a plan was searched, in the user's unit.

    Attributes:
      name: of the function.
      value: of the plan.
      lower_bound: no plan in the search space has a lower value; -inf where the objective turned out not to be convex,
        or where a shape of the mesh was not tried.
    """

    name: str
    value: FiniteNumber
    lower_bound: LowerBound

    @property
    def gap(self) -> float:
        """How much lower the value of another plan can be at most, relative to this one's."""
        return max(self.value - self.lower_bound, 0.0) / abs(self.value) if self.value else 0.0


@dataclass(frozen=True)
class TriedShape:
    """A shape of the mesh that a search over devices has looked at.

    Attributes:
      mesh_axes: devices along each axis, in order.
      step_s: predicted seconds of the best plan that was found for it; None where none was, and for
        another objective.
      lower_bound_s: no plan on this mesh is predicted to take less; inf where none fits the memory.
      search_s: seconds that it took.
      status: how its search ended, as `PlanData.status`; "cut off" where its bound showed that it cannot be better,
        "infeasible" where nothing fits the memory, "no plan" where the solver found none that fits, and "not tried"
        where the time was over.
      objective: of the best plan, where the search is for another objective than seconds; None where none was found.
    """

    mesh_axes: Mapping[str, Count]
    step_s: Amount | None
    lower_bound_s: AnyNumber
    search_s: Amount
    status: str
    objective: PlannedObjective | None = None


@dataclass(frozen=True)
class PlanData(Certified):
    """How a function runs on a mesh, and the predictions for it.

    Attributes:
      function: the function's name.
      mesh_axes: devices along each mesh axis, in order.
      hardware: the hardware for which the predictions are made.
      memory_limit_bytes: of each device; inf if there is no limit.
      arguments, outputs: the flat arguments and results.
      operations: every vertex of the function's graph.
      compute_s: predicted seconds of arithmetic and memory traffic in one step.
      collectives: predicted communication; the predicted step takes `step_s` = `compute_s` + their seconds.
      peak_bytes: predicted peak memory of a device.
      lower_bound_s: no plan in the search space is predicted to take less, on no mesh of `shapes`; 0 where another
        objective was searched for.
      status: how the search ended: "optimal", "finished", "time limit" or "interrupted".
      solver: name of the solver.
      search_s: seconds that tracing and searching took.
      history: (seconds, cost, lower bound) at each improvement of the solver.
      notes: what a reader should know, such as operations without a sharding rule or loops of unknown length.
      static_argnums, donate_argnums, static_argnames, donate_argnames: as in `jax.jit`; names are of arguments that are
        taken by keyword only.
      parameters: the names of the arguments in order.
      executor: how the function runs with this plan.
      logical_axis_rules: what flax's logical names of activations mean while the function is traced; a baseline's plan
        has them.
      comparison: the compiled programs of this plan and of others, where the search was asked to judge by these.
      memory: where in the step how much memory is in use.
      remat: what is kept from forward to backward and what is computed again; None where the search did not choose it.
      objective: what was made small in place of the seconds of a step; None for these.
      whole_work: arithmetic that several devices repeat because it cannot be split, the most expensive first, without
        what takes less than a hundredth of `compute_s`.
      function_digest: a hash of the traced function, its arguments' types, and the versions of JAX and diffshard.
      shapes: the shapes of the mesh that were tried, the best first; empty where the mesh was given.
      formats: number formats that were searched together with the shardings, and what they do to the loss; None where
        the function keeps its own.
      residuals: what devices have not sent yet of the sums that are sent with error feedback, and the maxima of delayed
        scales, as arrays beside the argument in whose path they are; empty where there are neither.
      delayed_scales: the operands that the rows of these maxima are of, in order, also of products that are not in the
        format; empty where there are none.
      stored_in: the file of a store of plans from which it was taken instead of a search; "" if it was searched.
      timeline: the step as a program for each device, played in its own order; None for other executors, where
        collectives hold arithmetic.
      computing: `compute_s` divided into products and memory traffic.
      advice: what would make the step faster or smaller, what gains most first; empty where nothing would, and in plans
        that no search made.
      offloads_state: whether arrays of the state could be placed in the host's memory; the steps of the function behind
        its last product then run as early as they can.
      mesh: the mesh; after loading it is abstract, unless `load` was given one.
      structures: the structures of the arguments and of the result (`diffshard.sharding_search.call.Structure`); None
        after loading.
    """

    function: str
    mesh_axes: Mapping[str, Count]
    hardware: Hardware
    memory_limit_bytes: Limit
    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    compute_s: Amount
    collectives: tuple[PredictedCollective, ...]
    peak_bytes: Amount
    lower_bound_s: LowerBound
    status: str
    solver: str
    search_s: Amount
    history: History
    notes: tuple[str, ...]
    parameters: tuple[str, ...]
    memory: MemoryProfile
    computing: PredictedComputing
    function_digest: str = field(compare=False)
    static_argnums: tuple[Index, ...] = ()
    donate_argnums: tuple[Index, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    executor: Executor = "constraints"
    logical_axis_rules: LogicalAxisRules = ()
    comparison: Comparison | None = None
    remat: Rematerialisation | None = None
    objective: PlannedObjective | None = None
    whole_work: tuple[WholeWork, ...] = ()
    shapes: tuple[TriedShape, ...] = ()
    formats: PlannedFormats | None = None
    residuals: tuple[Tensor, ...] = ()
    delayed_scales: tuple[DelayedScale, ...] = ()
    stored_in: str = field(default="", compare=False)
    timeline: PredictedTimeline | None = None
    advice: tuple[Advice, ...] = ()
    offloads_state: bool = False
    mesh: Mesh | AbstractMesh | None = field(default=None, compare=False, repr=False)
    structures: Any = field(default=None, compare=False, repr=False)

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.compute_s + sum(c.seconds for c in self.collectives)

    @property
    def gap(self) -> float:
        """How much better the best possible plan can be, relative to this one: in seconds, or by `objective`."""
        return super().gap if self.objective is None else self.objective.gap

    @property
    def whole_share(self) -> float:
        """The share of the predicted computing that devices repeat because it cannot be split among them."""
        return sum(work.seconds for work in self.whole_work) / self.compute_s if self.whole_work else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the steps of the traced function that run again in the backward pass."""
        return () if self.remat is None else self.remat.recomputed

    @property
    def offloaded(self) -> tuple[tuple[int, int, int], ...]:
        """Arrays that wait for the backward pass in the host's memory, as `Rematerialisation.offloaded`."""
        return () if self.remat is None else self.remat.offloaded

    @property
    def host_bytes(self) -> float:
        """Bytes of the state that each device has in the host's memory between steps."""
        parts = [(t, math.prod(self.mesh_axes[axis] for axes in t.spec for axis in axes)) for t in self.arguments]
        return sum(tensor.num_bytes / count for tensor, count in parts if tensor.on_host)

    @property
    def host_s(self) -> float:
        """Predicted seconds that a step waits for the copies of this state; a part of `compute_s`."""
        return sum(operation.compute_s for operation in self.operations if operation.kind == "input")

    @property
    def collective_bytes(self) -> dict[tuple[str, str], float]:
        """Predicted bytes of one step, by kind and axis."""
        total: dict[tuple[str, str], float] = {}
        for c in self.collectives:
            total[c.kind, c.axis] = total.get((c.kind, c.axis), 0.0) + c.num_bytes * c.count
        return total
