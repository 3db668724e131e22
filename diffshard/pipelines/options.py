"""What a search for a pipeline is asked for, checked before anything is traced, and how far the search is.

`SearchProgress` has the deadline of a search and what it shows in a terminal.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cost.clusters import Cluster, Hosts, Submesh
from cost.presets import device_and_network
from cost.real_numbers import Limit, checked_number, whole_number
from diffshard.base import Deadline, Solver
from diffshard.host_memory import check_host_memory
from diffshard.live_progress import LiveLine, ProgressDisplay
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.plans.base import ArgumentRoles, PipelinePlanData, ResidualUse
from diffshard.plans.base import Executor, LogicalAxisRules
from diffshard.plans.printing import format_count, format_s
from diffshard.sharding_search.argument_names import (
    NamedArguments,
    checked_arguments,
    positional_names,
    signature_of,
)
from diffshard.sharding_search.call import are_arrays, split
from diffshard.sharding_search.logical_axes import checked_rules, logical_axes_of, spec_by_rules
from diffshard.sharding_search.options import Remat, check_remat
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest
from diffshard.solving.solve import DEFAULT_SOLVER, check_solver_options
from search_spaces.sharding.given import check_open_prefix, given_specs


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The arguments of a search for a pipeline.

    Attributes:
      memory_limit_bytes: of each device; None takes the memory of its kind.
      static_argnums, static_argnames: arguments that are constants of the step.
      in_shardings: shardings to keep, on the axes "x" and "y" of the stages' meshes; as in `search`.
      logical_axis_rules: pairs of a name in flax's metadata and such axes, by which arguments are given.
      executor: of the programs of the stages; None takes the default one of each.
      key: random key or seed of the solver.
      time_limit_s: for all of the search, as `search` says; None ends by its own rule.
      cache: a folder that keeps what was decided; None keeps nothing.
      start: an earlier plan; the search takes it, or finds nothing slower.
      progress: where the search shows how it goes.
      judge: finds the plans of the stages' programs by a compiler; None takes those of the search.
      judged_by: says which compiler that is, and how.
      checks_numbers: whether the first call is held against one device.
      roles: of the arguments, as the user named them, static ones included.
    """

    fn: Callable[..., Any]
    cluster: Cluster
    pipeline: Pipeline
    memory_limit_bytes: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    in_shardings: Any = None
    logical_axis_rules: LogicalAxisRules | None = None
    executor: Executor | None = None
    solver: str | Solver = DEFAULT_SOLVER
    key: jax.Array | int | None = None
    time_limit_s: float | None = None
    cache: str | None = None
    start: PipelinePlanData | None = None
    progress: ProgressDisplay = "terminal"
    judge: Callable[[PlanRequest], Plan] | None = None
    judged_by: str = ""
    checks_numbers: bool = False
    roles: ArgumentRoles = field(default_factory=ArgumentRoles)

    def __post_init__(self):
        if self.memory_limit_bytes is not None:
            checked_number("memory_limit_bytes", self.memory_limit_bytes, Limit)
        if self.progress not in get_args(ProgressDisplay):
            raise ValueError(f"`progress` must be one of {get_args(ProgressDisplay)}, not {self.progress!r}.")
        if self.executor is not None and self.executor not in get_args(Executor):
            raise ValueError(f"`executor` must be one of {get_args(Executor)}, not {self.executor!r}.")
        check_solver_options(self.solver, self.time_limit_s, self.key)
        check_open_prefix(self.in_shardings, STAGE_AXES, _CHOOSES_MESHES)
        if self.logical_axis_rules is not None:
            object.__setattr__(self, "logical_axis_rules", checked_rules(self.logical_axis_rules, STAGE_AXES))
        if self.start is not None and not isinstance(self.start, PipelinePlanData):
            raise TypeError(
                f"`start` must be a `PipelinePlan` together with `pipeline`, or None, not {type(self.start).__name__}."
            )


def pipeline_options(
    fn: Callable[..., Any], devices: Any, pipeline: Pipeline, hardware: Any, **options: Any
) -> PipelineOptions:
    """Returns the arguments of a search for a pipeline, checked.

    Args:
      devices: a `Cluster`, JAX devices, or their number.
      hardware: the name of a preset; None for clusters, and for that of JAX devices.
      options: further fields of `PipelineOptions`; arguments that have a name may be given by position only.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"`pipeline` must be a diffshard.Pipeline, not {pipeline!r}.")
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
    by_kind = {
        kind: (options.pop(f"{kind}_argnums", ()), options.pop(f"{kind}_argnames", ())) for kind in ("donate", "static")
    }
    donated, static = (_in_both_forms(fn, named) for named in checked_arguments(fn, by_kind).values())
    batch, cluster = pipeline.batch, checked_cluster(devices, hardware)
    if "offload" in pipeline.residuals:
        hardware = [hosts.device for hosts in cluster.kinds]
        devices = [device for kind in cluster.devices for host in kind for device in host]
        check_host_memory('`Pipeline.residuals` has "offload"', hardware, devices, 'Leave "offload" out.')
    return PipelineOptions(
        fn=fn,
        cluster=cluster,
        pipeline=pipeline,
        donate_argnums=donated.argnums,
        donate_argnames=donated.argnames,
        static_argnums=static.argnums,
        static_argnames=static.argnames,
        roles=ArgumentRoles(*batch, *donated, *static),
        **options,
    )


STAGE_AXES = ("x", "y")
"""The axes of the stages' meshes; a mesh without the second one counts as one with a single device along it."""
_CHOOSES_MESHES = "`pipeline` chooses the meshes of its stages. Give a PartitionSpec of their axes 'x' and 'y'."
STAGE_TIME_LIMIT_S = 15.0
"""For the solver, for one stage or program; its bound says what is left."""


def donated_arrays(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """Returns for each flat argument whether it is donated."""
    flags: list[bool] = []
    for name, argument in (*enumerate(args), *((name, kwargs[name]) for name in sorted(kwargs))):
        is_donated = name in (options.donate_argnums if isinstance(name, int) else options.donate_argnames)
        flags += [is_donated] * len(split(argument)[0])
    return flags


def given_arrays(
    options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[PartitionSpec | None, ...]:
    """Returns for each flat argument the sharding that the user gives; None leaves it free.

    Raises:
      ValueError: `in_shardings` is not a prefix of the arguments, or a name in flax's metadata has no rule.
    """
    tree = tuple(args), {name: kwargs[name] for name in sorted(kwargs)}
    specs = given_specs(options.in_shardings, args)
    specs += [None] * (len(jax.tree.leaves(tree)) - len(specs))
    names, paths = logical_axes_of(tree), jax.tree_util.tree_leaves_with_path(tree)
    found: list[Any] = []  # no NamedSharding is let in
    for spec, axes, is_array, (path, _) in zip(specs, names, are_arrays(tree), paths, strict=True):
        if is_array and spec is None and axes is not None and options.logical_axis_rules is not None:
            spec = spec_by_rules(axes, options.logical_axis_rules, STAGE_AXES, jax.tree_util.keystr(path))
        found += [spec] if is_array else []
    return tuple(found)


def mesh_shape(submesh: Submesh) -> dict[str, int]:
    """Returns the mesh over a submesh: hosts and devices, or two axes within a host."""
    x, y = STAGE_AXES
    hosts, devices = submesh.shape if len(submesh.shape) == 2 else (1, submesh.num_devices)
    if hosts > 1:
        return {x: hosts, y: devices}
    return {x: 2, y: devices // 2} if devices >= 4 and devices % 2 == 0 else {x: devices}


def memory_limit_of(options: PipelineOptions, kind: int) -> float:
    """Returns the bytes that a device of a kind may hold."""
    own = options.cluster.kinds[kind].device.memory_bytes
    return own if options.memory_limit_bytes is None else options.memory_limit_bytes


def _in_both_forms(fn: Callable[..., Any], named: NamedArguments) -> NamedArguments:
    """Returns arguments with the names of those that have a position as well, as calls may give them."""
    by_position = positional_names(signature_of(fn))
    names = [by_position[number] for number in named.argnums if number < len(by_position)]
    return NamedArguments(named.argnums, (*named.argnames, *names))


def checked_cluster(devices: Any, hardware: Any) -> Cluster:
    """Returns devices as a cluster."""
    if isinstance(devices, Mesh | AbstractMesh):
        raise TypeError(
            "`mesh` cannot be given together with `pipeline`, which divides devices into meshes itself. Give "
            "`devices=jax.devices()` or a `diffshard.Cluster`."
        )
    if isinstance(devices, Cluster):
        if hardware is not None:
            raise ValueError("`hardware` must be None for a Cluster, which has that of its hosts.")
        return devices
    number = whole_number(devices)
    if number is None:
        return Cluster.from_devices(devices, hardware=hardware)
    if not isinstance(hardware, str):
        raise ValueError("`hardware` must be the name of a preset for a number of devices.")
    in_host = device_and_network(hardware)[1].num_devices or number
    if number < 1 or (number > in_host and number % in_host):
        raise ValueError(f"`devices` must be 1 or more, and fill hosts of {in_host}, not {number}.")
    return Cluster([Hosts(max(number // in_host, 1), min(number, in_host), hardware)])


def with_remat(pipeline: Pipeline, remat: Remat | None) -> Pipeline:
    """Returns a pipeline that may do with residuals what `remat` says, besides what it may do itself."""
    check_remat(remat)
    if remat is None:
        return pipeline
    more: tuple[ResidualUse, ...] = ("recompute",) if remat == "search" else ("recompute", "offload")
    return replace(pipeline, residuals=tuple(dict.fromkeys((*pipeline.residuals, *more))))


SEARCH_SHARE = 0.6
"""The share of the time limit for finding stages; what is left is for bounds, shardings of stages and programs."""
_PROOF_SHARE = 0.75
"""The share of the time limit after which no stage is solved for the sake of a bound."""
_PATIENCE_S = 10.0
"""How long a search may look for a first pipeline that fits when its time is over."""
_MOST_LOAD = 50.0
"""Wall seconds of a busy machine that count as one second of this process at most, so that a search ends."""
_LEAST_TIME_S = 0.1
"""What a solver is given for one stage or program at least."""


class SearchProgress:
    """The deadline of a search for a pipeline, and what it has done so far.

    Args:
      time_limit_s: for all of the search; None ends by its own rule.

    Attributes:
      is_interrupted: whether Ctrl-C ended a part of it, after which no other is begun that can be left out.
    """

    def __init__(self, line: LiveLine, time_limit_s: float | None):
        self._line, self.deadline, self.is_interrupted = line, Deadline.from_now(time_limit_s), False
        self._start_process_s = time.process_time()
        self._now, self._num_solved, self._best_s, self._bound_s = "", 0, math.inf, -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return self.deadline.elapsed_s

    # Time.

    def is_search_over(self) -> bool:
        """Returns whether no further stages are looked for; those of a first pipeline have more time."""
        limit_s = self.deadline.limit_s
        if limit_s is None or math.isfinite(self._best_s):
            was_ended = self.is_interrupted and math.isfinite(self._best_s)
            return was_ended or self.deadline.is_over(SEARCH_SHARE)
        return self.seconds >= SEARCH_SHARE * limit_s + _PATIENCE_S

    def is_proof_over(self) -> bool:
        """Returns whether no further stages are solved for a bound."""
        return self.is_interrupted or self.deadline.is_over(_PROOF_SHARE)

    def stage_limit_s(self, num_left: int = 1) -> float:
        """Returns the solver's time limit for a stage or program, of which some are left to plan.

        Without a limit for the search it is about the same time of the processor on a busy machine as on a quiet one,
        so that the same search finds the same.
        """
        rest_s = self.deadline.remaining_s(1 / num_left)
        if rest_s is None:
            process_s = time.process_time() - self._start_process_s
            load = self.seconds / process_s if process_s > 0 else 1.0
            return STAGE_TIME_LIMIT_S * min(max(load, 1.0), _MOST_LOAD)
        return min(STAGE_TIME_LIMIT_S, max(rest_s, _LEAST_TIME_S))

    # Progress.

    def tries(self, num_microbatches: int, schedule: str, number: int, count: int) -> None:
        """Notes which number of micro-batches and schedule is tried now, the one with a number from 1 of some."""
        batches = f"{num_microbatches} micro-batch{'es' if num_microbatches > 1 else ''}"
        self.step(f"{batches}, {schedule} ({number} of {count})")

    def solved(self) -> None:
        """Notes that a stage was solved."""
        self._num_solved += 1
        self.step(self._now)

    def found(self, seconds: float) -> None:
        """Notes the seconds of a step as a pipeline that was found."""
        self._best_s = min(self._best_s, seconds)
        self.step(self._now)

    def bounded(self, bound_s: float) -> None:
        """Notes the seconds that no pipeline is below."""
        self._bound_s = bound_s
        self.step(self._now)

    def step(self, name: str) -> None:
        """Notes what the search does now."""
        self._now = name
        solved = f"{format_count(self._num_solved, 'stage')} solved" if self._num_solved else ""
        best = f"best {format_s(self._best_s)}" if math.isfinite(self._best_s) else ""
        bound = f"bound {format_s(self._bound_s)}" if math.isfinite(self._bound_s) else ""
        self._line.step(", ".join(part for part in (f"{self.seconds:.1f} s, {name}", solved, best, bound) if part))
