"""Checks of what a search for a pipeline is asked for, before anything is traced."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from cost.clusters import Cluster
from cost.host_groups import Hosts
from cost.presets import device_and_network
from cost.real_numbers import whole_number


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
