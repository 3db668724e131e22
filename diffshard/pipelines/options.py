"""What a search for a pipeline is asked for, checked before anything is traced; and the calls of static arguments.

For each set of values of the static arguments there is a step that does not take them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from jax.sharding import AbstractMesh, Mesh

from cost.clusters import Cluster
from cost.host_groups import Hosts, Submesh
from cost.presets import device_and_network
from cost.real_numbers import is_positive, whole_number
from diffshard.base import Solver
from diffshard.live_progress import ProgressDisplay
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.offload_search import check_offload
from diffshard.pipelines.plans.base import ArgumentRoles, PipelinePlanData
from diffshard.sharding_search.call import split
from diffshard.sharding_search.options import DEFAULT_SOLVER, positional_names, signature_of
from diffshard.solving.solve import resolve


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
      start: an earlier plan; the search takes it, or finds nothing slower.
      progress: where the search shows how it goes.
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
    solver: str | Solver = DEFAULT_SOLVER
    time_limit_s: float | None = None
    cache: str | None = None
    start: PipelinePlanData | None = None
    progress: ProgressDisplay = "terminal"
    roles: ArgumentRoles = field(default_factory=ArgumentRoles)

    def __post_init__(self):
        limit, time_limit_s = self.memory_limit_bytes, self.time_limit_s
        if limit is not None and not is_positive(limit):
            raise ValueError(f"`memory_limit_bytes` must be a positive number, not {limit!r}.")
        if time_limit_s is not None and not is_positive(time_limit_s):
            raise ValueError(f"`time_limit_s` must be a positive number of seconds or None, not {time_limit_s!r}.")
        if self.progress not in get_args(ProgressDisplay):
            raise ValueError(f"`progress` must be one of {get_args(ProgressDisplay)}, not {self.progress!r}.")
        resolve(self.solver)
        if self.start is not None and not isinstance(self.start, PipelinePlanData):
            raise TypeError(
                f"`start` must be a `PipelinePlan` together with `pipeline`, or None, not {type(self.start).__name__}."
            )


def pipeline_options(
    fn: Callable[..., Any], devices: Any, pipeline: Pipeline, hardware: Any, **options: Any
) -> PipelineOptions:
    """Returns the arguments of a search for a pipeline, checked.

    Args:
      fn: the training step.
      devices: a `Cluster`, JAX devices, or their number.
      pipeline: what may be chosen.
      hardware: the name of a preset; None for clusters, and for that of JAX devices.
      options: further fields of `PipelineOptions`; arguments that have a name may be given by position only.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"`pipeline` must be a diffshard.Pipeline, not {pipeline!r}.")
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
    donated, static = (
        checked_arguments(fn, kind, options.pop(f"{kind}_argnums", ()), options.pop(f"{kind}_argnames", ()))
        for kind in ("donate", "static")
    )
    batch, cluster = pipeline.batch, checked_cluster(devices, hardware)
    if "offload" in pipeline.residuals:
        check_offload(cluster)
    asked_for = PipelineOptions(
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
    check_static(asked_for)
    return asked_for


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


class NamedArguments(NamedTuple):
    """Arguments by position and by name; those that have both are in both, as calls may give them."""

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]


def checked_arguments(
    fn: Callable[..., Any], kind: str, numbers: Sequence[Any], names: Sequence[Any]
) -> NamedArguments:
    """Returns arguments that are given by position and by name, of a kind such as "donate".

    Raises:
      ValueError: the function has no such argument.
    """
    checked = [whole_number(number) for number in numbers]
    if any(number is None or number < 0 for number in checked):
        raise ValueError(f"`{kind}_argnums` must be positions of arguments, 0 or more, not {tuple(numbers)!r}.")
    found = [number for number in checked if number is not None]
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in function
        return NamedArguments(tuple(found), tuple(names))
    kinds = {p.kind for p in parameters.values()}
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    function = getattr(fn, "__name__", "the function")
    for number in found:
        if number >= len(named) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"`{kind}_argnums` {tuple(found)} names a position that the {len(named)} arguments of {function} "
                "do not have."
            )
    for name in names:
        if not isinstance(name, str) or (name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds):
            raise ValueError(
                f"`{kind}_argnames` has {name!r}, which is no argument of {function}; it has {', '.join(parameters)}."
            )
    all_names = [*names, *(named[number] for number in found if number < len(named))]
    all_numbers = [*found, *(named.index(name) for name in names if name in named)]
    return NamedArguments(tuple(dict.fromkeys(all_numbers)), tuple(dict.fromkeys(all_names)))


def checked_cluster(devices: Any, hardware: Any) -> Cluster:
    """Returns devices as a cluster.

    Raises:
      TypeError, ValueError: they are a mesh, or of no kind that is known.
    """
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


class StaticCall(NamedTuple):
    """A call whose static arguments are taken out.

    Attributes:
      values: the static arguments, by the position or the name by which they are given.
      args, kwargs: the others.
    """

    values: dict[int | str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls have in common that run the same step: 1 and 1.0 are equal, but different constants."""
        return tuple((place, _exact(value)) for place, value in sorted(self.values.items(), key=str))


def _exact(value: Any) -> Any:
    """Returns what is equal only for values of one type, sign and contents; tuples are looked into."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_exact, value))
    return type(value), value, repr(value) if isinstance(value, float | complex) else ""


def static_call(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StaticCall:
    """Takes the static arguments out of a call.

    Raises:
      TypeError: one of them is not hashable.
    """
    by_position = {n: args[n] for n in options.static_argnums if n < len(args)}
    by_name = {name: kwargs[name] for name in options.static_argnames if name in kwargs}
    for place, value in {**by_position, **by_name}.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"The static argument {place!r} is {type(value).__name__}, which is not hashable. Give a value that "
                "is, such as a tuple or a frozen dataclass."
            ) from None
    return StaticCall(
        {**by_position, **by_name},
        tuple(x for n, x in enumerate(args) if n not in by_position),
        {name: x for name, x in kwargs.items() if name not in by_name},
    )


def without_static(options: PipelineOptions, values: Mapping[int | str, Any]) -> PipelineOptions:
    """Returns the options of the step that does not take static arguments, which have these values."""
    names = positional_names(signature_of(options.fn))
    taken = {names.index(place) if place in names else place for place in values}

    def moved(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(n - sum(isinstance(s, int) and s < n for s in taken) for n in positions)

    batch = options.pipeline.batch
    return replace(
        options,
        fn=_bound(options.fn, values),
        pipeline=replace(options.pipeline, batch_argnums=moved(batch.argnums)),
        donate_argnums=moved(options.donate_argnums),
        static_argnums=(),
        static_argnames=(),
    )


def check_static(options: PipelineOptions) -> None:
    """Checks that static arguments are not donated, and have no batch.

    Raises:
      ValueError: one of them is both.
    """
    names, batch = positional_names(signature_of(options.fn)), options.pipeline.batch
    others = {
        "donate_argnums": (*options.donate_argnums, *options.donate_argnames),
        "Pipeline.batch_argnums": (*batch.argnums, *batch.argnames),
    }
    static = {_name(names, place) for place in (*options.static_argnums, *options.static_argnames)}
    for option, places in others.items():
        for name in static & {_name(names, place) for place in places}:
            raise ValueError(f"`static_argnums` and `{option}` share the argument {name!r}.")


def _name(names: Sequence[str], place: int | str) -> int | str:
    return names[place] if isinstance(place, int) and place < len(names) else place


def _bound(fn: Callable[..., Any], values: Mapping[int | str, Any]) -> Callable[..., Any]:
    """Returns a function without some of its arguments, which have these values."""
    by_position = sorted((n, value) for n, value in values.items() if isinstance(n, int))
    by_name = {name: value for name, value in values.items() if isinstance(name, str)}

    @functools.wraps(fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for n, value in by_position:
            whole.insert(n, value)
        return fn(*whole, **kwargs, **by_name)

    signature = signature_of(fn)
    if signature is not None:
        names = positional_names(signature)
        taken = {*by_name, *(names[n] for n, _ in by_position if n < len(names))}
        left = [p for name, p in signature.parameters.items() if name not in taken]
        if all(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in left):
            vars(bound)["__signature__"] = signature.replace(parameters=left)
    return bound
