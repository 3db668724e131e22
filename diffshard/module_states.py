"""Functions of flax's nnx modules as functions of the modules' states.

A module is split into its graph, which is constant, and its state, which is an argument. The function of states returns
the new states beside the result, and the modules are updated with them. Modules that share variables, such as an
optimiser's model, share them in the states, too.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx


class ModuleGraph(NamedTuple):
    """The modules of a call without their state: one graph of all, and the arguments that they are."""

    graphdef: Any
    arguments: tuple[int | str, ...]


@dataclass(frozen=True)
class _SameModule:
    """Stands in a result for a module that is an argument; a constant, not a pytree."""

    number: int


class ModuleCall(NamedTuple):
    """The arguments of a call with states in place of modules, the graph of the modules, and the modules."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: ModuleGraph
    modules: tuple[Any, ...]

    def update(self, states: Sequence[Any], result: Any = None) -> Any:
        """Puts new states into the modules, and returns the result with the modules that are in it."""
        nnx.update(self.modules, nnx.State(dict(enumerate(states))))
        return jax.tree.map(
            lambda x: self.modules[x.number] if isinstance(x, _SameModule) else x, result, is_leaf=_is_same_module
        )


def split_modules(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleCall:
    """Returns the arguments of a call with states in place of those that are, or hold, modules."""
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    places = tuple(place for place, argument in arguments.items() if has_module(argument))
    modules = tuple(arguments[place] for place in places)
    graphdef, states = nnx.split(modules)
    arguments |= {place: states[i] if i in states else nnx.State({}) for i, place in enumerate(places)}
    of_states = tuple(arguments[i] for i in range(len(args)))
    return ModuleCall(of_states, {name: arguments[name] for name in kwargs}, ModuleGraph(graphdef, places), modules)


def run_with_states(
    fn: Callable[..., Any], graph: ModuleGraph, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Runs a function of modules for their states, and returns the new states and the result."""
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    before = nnx.State({i: arguments[place] for i, place in enumerate(graph.arguments)})
    modules = nnx.merge(graph.graphdef, before)
    arguments |= dict(zip(graph.arguments, modules, strict=True))
    result = fn(*(arguments[i] for i in range(len(args))), **{name: arguments[name] for name in kwargs})
    graphdef, states = nnx.split(modules)
    if graphdef != graph.graphdef:
        raise ValueError(_changed_structure(fn, graph, before, states))
    numbers = {id(module): i for i, module in enumerate(modules)}
    result = jax.tree.map(
        lambda x: _SameModule(numbers[id(x)]) if id(x) in numbers else x, result, is_leaf=lambda x: id(x) in numbers
    )
    return tuple(states[i] if i in states else nnx.State({}) for i in range(len(modules))), result


def of_states(fn: Callable[..., Any], graph: ModuleGraph) -> Callable[..., tuple[tuple[Any, ...], Any]]:
    """Returns a function of a name and signature as `fn`, which `run_with_states` runs for the modules of a call."""
    return functools.wraps(fn)(lambda *args, **kwargs: run_with_states(fn, graph, args, kwargs))


def has_module(tree: Any) -> bool:
    """Returns whether an argument is a module or a variable of nnx, or holds one."""
    return any(_is_module(leaf) for leaf in jax.tree.leaves(tree, is_leaf=_is_module))


def _changed_structure(fn: Callable[..., Any], graph: ModuleGraph, before: Any, after: Any) -> str:
    """Returns the message on a function that changes the structure of modules: which variables come and go."""
    names = list(inspect.signature(fn).parameters)
    paths = [{path for path, _ in nnx.to_flat_state(states)} for states in (before, after)]

    def written(places: set[Any]) -> str:
        of_arguments = ((graph.arguments[path[0]], path[1:]) for path in sorted(places, key=str))
        return ", ".join(
            f"`{'.'.join(map(str, (argument if isinstance(argument, str) else names[argument], *rest)))}`"
            for argument, rest in of_arguments
        )

    added, removed = paths[1] - paths[0], paths[0] - paths[1]
    changes = [f"adds {written(added)}"] * bool(added) + [f"removes {written(removed)}"] * bool(removed)
    what = " and ".join(changes) or "changes attributes that are not arrays"
    return (
        f"{getattr(fn, '__name__', 'function')} changes the structure of a module that it gets: it {what}. Make the "
        "module as it is after a call, before it is planned; or return what is new, and take it out of the module, as "
        "by `nnx.pop`."
    )


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_same_module(x: Any) -> bool:
    return isinstance(x, _SameModule)
