"""`diffshard.nnx.search`: functions that update flax's nnx modules and optimisers in place, as under `nnx.jit`.

A module is split into its graph, which is a constant of the plan, and its state, which is an argument. The planned
function returns the new state beside the result, and the modules are updated with it. Modules that share variables,
such as an optimiser's model, share them in the plan, too.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from diffshard.base import Progress
from diffshard.processes import errors_for_all
from diffshard.sharding_search.options import argument_names
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.search import search as search_function

_GRAPH = "nnx_graph"
"""The name of the static argument that has the graphs of modules."""


class _Graph(NamedTuple):
    """The modules of a call without their state: one graph of all, and the arguments that they are."""

    graphdef: Any
    arguments: tuple[int | str, ...]


class _SameModule(NamedTuple):
    """Stands in a result for a module that is an argument."""

    number: int


class PlannedModuleFunction:
    """A function of nnx modules that runs as its plan says; made by `diffshard.nnx.search` and `diffshard.nnx.apply`.

    Args:
      fn: the function.
      planned: returns, for states in place of modules, their new states and the function's result.
    """

    def __init__(self, fn: Callable[..., Any], planned: PlannedFunction[Plan]):
        self._signature = inspect.signature(fn)
        self._planned = planned

    def plan(self, *args: Any, progress: Progress | None = None, **kwargs: Any) -> Plan:
        """Returns the plan for arguments as those of the function; of modules it has the states.

        Modules may be abstract (`nnx.eval_shape`). `progress` and errors are those of `PlannedFunction.plan`.
        """
        call = self._split(args, kwargs)
        return self._planned.plan(*call.args, progress=progress, **call.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, updates the modules among the arguments, and returns the result.

        Raises:
          ValueError: the function changes the structure of a module; or as `PlannedFunction`.
        """
        call = self._split(args, kwargs)
        states, result = self._planned(*call.args, **call.kwargs)
        nnx.update(call.modules, nnx.State(dict(enumerate(states))))
        return jax.tree.map(
            lambda x: call.modules[x.number] if isinstance(x, _SameModule) else x, result, is_leaf=_is_same_module
        )

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the arguments of a call on the mesh as their plan wants them; modules are updated in place.

        Returns:
          The arguments; a single one without a tuple.
        """
        plan = self.plan(*args, **kwargs)
        call = self._split(args, kwargs)
        # The graph is placed as well, so that there are two arguments at least: a single one comes without a tuple.
        placed = dict(zip([*range(len(call.args)), *call.kwargs], plan.shard(*call.args, **call.kwargs), strict=True))
        states = [placed[argument] for argument in call.graph.arguments]
        nnx.update(call.modules, nnx.State(dict(enumerate(states))))
        placed |= dict(zip(call.graph.arguments, call.modules, strict=True))
        del placed[_GRAPH]
        return tuple(placed.values()) if len(placed) > 1 else next(iter(placed.values()))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the planned function of flat arrays, as `PlannedFunction.lower` does."""
        call = self._split(args, kwargs)
        return self._planned.lower(*call.args, **call.kwargs)

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_ModuleCall":
        name = self._planned.options.function_name
        with errors_for_all(self._planned.options.mesh, f"plan {name} together"):
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name} does not take these arguments: {error}.") from None
        arguments: dict[int | str, Any] = {**dict(enumerate(bound.args)), **bound.kwargs}
        places = tuple(place for place, argument in arguments.items() if _has_module(argument))
        modules = tuple(arguments[place] for place in places)
        graphdef, states = nnx.split(modules)
        arguments |= {place: states[i] if i in states else nnx.State({}) for i, place in enumerate(places)}
        graph = _Graph(graphdef, places)
        named: dict[str, Any] = {name: argument for name, argument in arguments.items() if isinstance(name, str)}
        return _ModuleCall(
            tuple(arguments[i] for i in range(len(bound.args))), {**named, _GRAPH: graph}, graph, modules
        )


class _ModuleCall(NamedTuple):
    """The arguments of a call with states in place of modules, and the modules."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: _Graph
    modules: tuple[Any, ...]


def search(fn: Callable[..., Any], mesh: Mesh | AbstractMesh, **options: Any) -> PlannedModuleFunction:
    """Finds how to run a function of nnx modules on a mesh: `diffshard.search` for what `nnx.jit` takes.

    >>> step = diffshard.nnx.search(train_step, mesh)
    >>> print(step.plan(model, optimizer, batch))
    >>> loss = step(model, optimizer, batch)  # the model and the optimiser are updated in place

    Args:
      fn: a function whose arguments are, or hold, `nnx.Module`, `nnx.Optimizer`, `nnx.Rngs` and the like, which it may
        change. It must not change their structure, such as by adding variables.
      mesh: as in `diffshard.search`.
      **options: all other arguments of `diffshard.search`.

    Raises:
      TypeError, ValueError: as `diffshard.search`.
    """
    with errors_for_all(mesh, "search a plan"):
        if not callable(fn):
            raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
        static_argnames = (*argument_names(options.pop("static_argnames", ())), _GRAPH)
        planned = search_function(_of_states(fn), mesh, static_argnames=static_argnames, **options)
    return PlannedModuleFunction(fn, planned)


def apply(plan: Plan, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None) -> PlannedModuleFunction:
    """Gives a function of nnx modules a plan that `diffshard.nnx.search` made for it, without a search.

    Args:
      plan: the plan, for instance from `Plan.load`.
      fn: the function.
      mesh: as in `Plan.apply`.

    Raises:
      PlanError: as `Plan.apply`.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"`plan` must be a Plan, for instance from `Plan.load`, not {type(plan).__name__}.")
    return PlannedModuleFunction(fn, plan.apply(_of_states(fn), mesh))


def _of_states(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes states in place of modules, and returns the new ones beside the result."""

    def run(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        graph: _Graph = kwargs.pop(_GRAPH)
        arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        states = nnx.State({i: arguments[place] for i, place in enumerate(graph.arguments)})
        arguments_before = states
        modules = nnx.merge(graph.graphdef, states)
        arguments |= dict(zip(graph.arguments, modules, strict=True))
        result = fn(*(arguments[i] for i in range(len(args))), **{name: arguments[name] for name in kwargs})
        graphdef, states = nnx.split(modules)
        if graphdef != graph.graphdef:
            raise ValueError(_changed_structure(run.__name__, signature, graph, arguments_before, states))
        numbers = {id(module): i for i, module in enumerate(modules)}
        result = jax.tree.map(
            lambda x: _SameModule(numbers[id(x)]) if id(x) in numbers else x, result, is_leaf=lambda x: id(x) in numbers
        )
        return tuple(states[i] if i in states else nnx.State({}) for i in range(len(modules))), result

    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    place = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameters.insert(place, inspect.Parameter(_GRAPH, inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__name__ = getattr(fn, "__name__", "function")
    run.__qualname__ = getattr(fn, "__qualname__", run.__name__)
    return run


def _changed_structure(name: str, signature: inspect.Signature, graph: _Graph, before: Any, after: Any) -> str:
    """Returns the message on a function that changes the structure of modules: which variables come and go."""
    names = list(signature.parameters)
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
        f"{name} changes the structure of a module that it gets: it {what}. Make the module as it is after a call, "
        "before it is planned; or return what is new, and take it out of the module, as by `nnx.pop`."
    )


def _has_module(tree: Any) -> bool:
    return any(_is_module(leaf) for leaf in jax.tree.leaves(tree, is_leaf=_is_module))


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_same_module(x: Any) -> bool:
    return isinstance(x, _SameModule)
