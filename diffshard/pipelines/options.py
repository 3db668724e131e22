"""What a search for a pipeline is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost.clusters import Cluster
from cost.host_groups import Submesh
from diffshard.base import Solver
from diffshard.live_progress import ProgressDisplay
from diffshard.pipelines.base import Pipeline
from diffshard.sharding_search.call import split
from diffshard.sharding_search.options import DEFAULT_SOLVER


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The arguments of a search for a pipeline.

    Attributes:
      fn: the training step.
      cluster: the devices.
      pipeline: what may be chosen.
      memory_limit_bytes: of each device; None takes the memory of its kind.
      donate_argnums, donate_argnames: arguments whose memory results may take.
      static_argnums, static_argnames: arguments that are constants of the step.
      solver: of the sharding of a stage.
      time_limit_s: for solving and proving; None ends by its own rule.
      cache: a folder that keeps what was decided; None keeps nothing.
      progress: where the search shows how it goes.
    """

    fn: Callable[..., Any]
    cluster: Cluster
    pipeline: Pipeline
    memory_limit_bytes: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    solver: str | Solver = DEFAULT_SOLVER
    time_limit_s: float | None = None
    cache: str | None = None
    progress: ProgressDisplay = "terminal"


STAGE_TIME_LIMIT_S = 15.0
"""For the solver, for one stage or program; its bound says what is left."""


def donated_arrays(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """Tells for each flat argument whether it is donated."""
    flags: list[bool] = []
    for name, argument in (*enumerate(args), *((name, kwargs[name]) for name in sorted(kwargs))):
        is_donated = name in (options.donate_argnums if isinstance(name, int) else options.donate_argnames)
        flags += [is_donated] * len(split(argument)[0])
    return flags


def mesh_shape(submesh: Submesh) -> dict[str, int]:
    """Returns the mesh over a submesh: hosts and devices, or two axes within a host."""
    hosts, devices = submesh.shape if len(submesh.shape) == 2 else (1, submesh.num_devices)
    if hosts > 1:
        return {"x": hosts, "y": devices}
    return {"x": 2, "y": devices // 2} if devices >= 4 and devices % 2 == 0 else {"x": devices}


def memory_limit_of(options: PipelineOptions, kind: int) -> float:
    """Returns the bytes that a device of a kind may hold."""
    own = options.cluster.kinds[kind].device.memory_bytes
    return own if options.memory_limit_bytes is None else options.memory_limit_bytes
