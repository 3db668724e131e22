"""`diffshard.nnx.search`: functions that update flax's nnx modules and optimisers in place, as under `nnx.jit`.

Of a call's modules the graph is a constant of the plan, and the state is an argument; see `diffshard.module_states`.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from cost.clusters import Cluster
from diffshard.front_end import search as search_function
from diffshard.module_states import ModuleCall, ModuleGraph, of_states, run_with_states, split_modules
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.plan import PipelinePlan
from diffshard.plans.comparison import Comparison
from diffshard.processes import errors_for_all
from diffshard.sharding_search.argument_names import argument_names
from diffshard.sharding_search.mesh_candidates import mesh_of_all
from diffshard.sharding_search.number_formats import carried_formats
from diffshard.sharding_search.plan import Plan

if TYPE_CHECKING:
    from diffshard.baselines.plans import BaselinePlans
    from diffshard.budgets.base import Budget, Phase
    from diffshard.elastic.training import Training

PlanT = TypeVar("PlanT", Plan, PipelinePlan)
_GRAPH = "nnx_graph"
"""The name of the static argument that has the graphs of modules."""


class _ModuleFunction(Generic[PlanT]):
    """A function of nnx modules that runs as a function of their states.

    Args:
      planned: returns, for states in place of modules, their new states and the function's result.
      mesh: of all devices, whose processes are told of errors.
    """

    def __init__(self, fn: Callable[..., Any], planned: Any, mesh: Mesh | AbstractMesh | None):
        self._name, self._signature = getattr(fn, "__qualname__", "function"), inspect.signature(fn)
        self._planned, self._mesh = planned, mesh

    def plan(self, *args: Any, **kwargs: Any) -> PlanT:
        """Returns the plan for arguments as those of the function; of modules it has the states.

        Modules may be abstract (`nnx.eval_shape`). Errors are those of `PlannedFunction.plan`; `progress` is, too, but
        not with `pipeline`.
        """
        progress = {"progress": kwargs.pop("progress")} if "progress" in kwargs else {}
        call = self._split(args, kwargs)
        return self._planned.plan(*call.args, **progress, **call.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, updates the modules among the arguments, and returns the result.

        Raises:
          ValueError: the function changes the structure of a module; or as `PlannedFunction`.
        """
        call = self._split(args, kwargs)
        return call.update(*self._planned(*call.args, **call.kwargs))

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleCall:
        name = self._name
        with errors_for_all(self._mesh, f"plan {name} together"):
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name} does not take these arguments: {error}.") from None
        call = split_modules(bound.args, bound.kwargs)
        return call._replace(kwargs={**call.kwargs, _GRAPH: call.graph})


class PlannedModuleFunction(_ModuleFunction[Plan]):
    """A function of nnx modules that runs as its plan says; `nnx.search` and `nnx.apply` make it."""

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the arguments of a call on the mesh as their plan wants them; modules are updated in place.

        Returns:
          The arguments; a single one without a tuple.
        """
        plan = self.plan(*args, **kwargs)
        call = self._split(args, kwargs)
        # The graph is placed as well, so that there are two arguments at least: a single one comes without a tuple.
        placed = dict(zip([*range(len(call.args)), *call.kwargs], plan.shard(*call.args, **call.kwargs), strict=True))
        call.update([placed[argument] for argument in call.graph.arguments])
        placed |= dict(zip(call.graph.arguments, call.modules, strict=True))
        del placed[_GRAPH]
        return tuple(placed.values()) if len(placed) > 1 else next(iter(placed.values()))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the planned function of flat arrays, as `PlannedFunction.lower` does."""
        call = self._split(args, kwargs)
        return self._planned.lower(*call.args, **call.kwargs)


class PipelinedModuleFunction(_ModuleFunction[PipelinePlan]):
    """A training step of nnx modules that runs as a pipeline; `nnx.search` and `nnx.apply` make it.

    Variables that several stages keep a part of, such as stacked weights of layers, have a `StagedArray`.
    """


@overload
def search(
    fn: Callable[..., Any], mesh: Cluster | None = None, *, pipeline: Pipeline, **options: Any
) -> PipelinedModuleFunction: ...


@overload
def search(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh | Cluster | None = None,
    *,
    pipeline: None = None,
    **options: Any,
) -> PlannedModuleFunction: ...


def search(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh | Cluster | None = None, **options: Any
) -> PlannedModuleFunction | PipelinedModuleFunction:
    """Finds how to run a function of nnx modules on a mesh: `diffshard.search` for what `nnx.jit` takes.

    >>> step = diffshard.nnx.search(train_step, mesh)
    >>> print(step.plan(model, optimizer, batch))
    >>> loss = step(model, optimizer, batch)  # the model and the optimiser are updated in place

    Args:
      fn: a function whose arguments are, or hold, `nnx.Module`, `nnx.Optimizer`, `nnx.Rngs` and the like, which it may
        change. It must not change their structure, such as by adding variables.
      mesh: as in `diffshard.search`.
      **options: all other arguments of `diffshard.search`.

    Returns:
      The planned function; with `pipeline` a `PipelinedModuleFunction`.

    Raises:
      TypeError, ValueError: as `diffshard.search`.
    """
    devices = options.get("devices")
    with errors_for_all(mesh if devices is None else mesh_of_all(devices), "search a plan"):
        if not callable(fn):
            raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
        if carried := carried_formats(options.get("formats")):
            raise ValueError(
                f"{carried[0]}, whose residuals go with the state of a training, and "
                "modules have no place for them. Give a function of states (`nnx.split`) to `diffshard.search`."
            )
        static_argnames = (*argument_names(options.pop("static_argnames", ())), _GRAPH)
        planned: Any = search_function(_of_states(fn), mesh, static_argnames=static_argnames, **options)
    if isinstance(planned, PipelinedFunction):
        return PipelinedModuleFunction(fn, planned, mesh_of_all(planned.options.cluster))
    return PlannedModuleFunction(fn, planned, planned.options.mesh)


@overload
def apply(
    plan: Plan, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None, **options: Any
) -> PlannedModuleFunction: ...


@overload
def apply(plan: PipelinePlan, fn: Callable[..., Any], mesh: Any, **options: Any) -> PipelinedModuleFunction: ...


def apply(
    plan: Plan | PipelinePlan, fn: Callable[..., Any], mesh: Any = None, **options: Any
) -> PlannedModuleFunction | PipelinedModuleFunction:
    """Gives a function of nnx modules a plan that `diffshard.nnx.search` made for it, without a search.

    Args:
      plan: the plan, for instance from `Plan.load`.
      fn: the function.
      mesh: as in `Plan.apply`; of a pipeline the devices, as in `PipelinePlan.apply`.
      **options: as of that `apply`.

    Raises:
      PlanError: as `Plan.apply`.
    """
    if isinstance(plan, PipelinePlan):
        pipelined = plan.apply(_of_states(fn), mesh, **options)
        return PipelinedModuleFunction(fn, pipelined, mesh_of_all(pipelined.options.cluster))
    if not isinstance(plan, Plan):
        raise TypeError(f"`plan` must be a Plan, for instance from `Plan.load`, not {type(plan).__name__}.")
    planned = plan.apply(_of_states(fn), mesh, **options)
    return PlannedModuleFunction(fn, planned, planned.options.mesh)


def compare(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh, *args: Any, plans: Mapping[str, Any], **options: Any
) -> Comparison:
    """Compiles plans of `diffshard.nnx.search` for a target, as `diffshard.compare` does for functions of arrays.

    Args:
      fn: the function of modules that the plans were made for.
      mesh: as in `diffshard.compare`.
      *args: as for the function itself; modules may be abstract.
      plans: as in `diffshard.compare`; shardings are for the modules' states in place of modules.
      **options: as of `diffshard.compare`.

    Raises:
      TypeError, ValueError, PlanError, RuntimeError: as `diffshard.compare`.
    """
    from diffshard.comparison.compare import compare as compare_functions

    call = split_modules(args, {})
    return compare_functions(of_states(fn, call.graph), mesh, *call.args, plans=plans, **options)


def baseline_plans(fn: Callable[..., Any], mesh: Mesh | AbstractMesh, *args: Any, **options: Any) -> "BaselinePlans":
    """Makes plans by hand for comparison, as `diffshard.baselines.baseline_plans` for functions of arrays.

    >>> plans = diffshard.nnx.baseline_plans(train_step, mesh, model, optimizer, batch)
    >>> step = diffshard.nnx.apply(plans["fsdp"], train_step)

    Args:
      fn: a function of modules, which it changes.
      mesh: as of `diffshard.baselines.baseline_plans`.
      *args: as for the function itself; modules may be abstract.
      **options: as of `diffshard.baselines.baseline_plans`.

    Raises:
      TypeError, ValueError, ProcessesError: as `diffshard.baselines.baseline_plans`.
    """
    from diffshard.baselines.plans import baseline_plans as plans_of_states

    call = split_modules(args, {})
    found = plans_of_states(of_states(fn, call.graph), mesh, *call.args, **options)
    return replace(found, plans={name: _with_graph(plan) for name, plan in found.items()})


class ModuleBudget:
    """How a job of nnx modules runs while its devices change; made by `diffshard.nnx.budget`, `print` shows it.

    >>> plans = diffshard.nnx.ModuleBudget(train_step, diffshard.elastic.Budget.load("budget.json", meshes=meshes))

    Args:
      fn: the function of modules.
      budget: of the modules' states, with its `plans`, its `save` and its bound.
    """

    def __init__(self, fn: Callable[..., Any], budget: "Budget"):
        self.fn, self.budget = fn, budget

    def step(self, phase: int) -> PlannedModuleFunction:
        """Returns the function with the plan of one phase."""
        return apply(self.budget.plan(phase), self.fn)

    def move(self, phase: int, *args: Any) -> Any:
        """Puts the first arguments where the plan of a phase wants them, as `Budget.move`; modules in place.

        Returns:
          The arguments; a single one without a tuple.
        """
        call = split_modules(args, {})
        moved = self.budget.move(phase, *call.args)
        placed = list(moved) if len(args) > 1 else [moved]
        call.update([placed[place] for place in call.graph.arguments if isinstance(place, int)])
        for place, module in zip(call.graph.arguments, call.modules, strict=True):
            if isinstance(place, int):
                placed[place] = module
        return tuple(placed) if len(placed) > 1 else placed[0]

    def __str__(self) -> str:
        return str(self.budget)


def budget(fn: Callable[..., Any], phases: "Sequence[Phase]", *args: Any, **options: Any) -> ModuleBudget:
    """Plans a function of nnx modules for devices that change, as `diffshard.elastic.budget` does for one of arrays.

    >>> plans = diffshard.nnx.budget(train_step, phases, model, optimizer, batch)
    >>> plans.move(1, model, optimizer)
    >>> loss = plans.step(1)(model, optimizer, batch)

    Args:
      fn: a function of modules, which it changes.
      phases: as of `diffshard.elastic.budget`.
      *args: as for the function itself; modules may be abstract.
      **options: as of `diffshard.elastic.budget`.

    Raises:
      InfeasibleError, ProcessesError, TypeError, ValueError: as `diffshard.elastic.budget`.
    """
    from diffshard.budgets.budget import budget as budget_of_states

    call = split_modules(args, {})
    found = budget_of_states(of_states(fn, call.graph), phases, *call.args, **options)
    chosen, alone = (p._replace(plans=tuple(map(_with_graph, p.plans))) for p in (found.chosen, found.alone))
    return ModuleBudget(fn, replace(found, chosen=chosen, alone=alone, fn=None))


class ModuleTraining:
    """A training of nnx modules with checkpoints; made by `diffshard.nnx.resume`.

    Attributes:
      training: of the modules' states, with its `plan`, `num_steps` and `data`.
    """

    def __init__(self, training: "Training", graph: ModuleGraph):
        self.training, self._graph = training, graph

    def restore(self) -> tuple[Any, ...]:
        """Returns the modules to go on from, as `Training.restore` does with states."""
        states = self.training.restore()
        return nnx.merge(self._graph.graphdef, nnx.State(dict(enumerate(states))))

    def step(self, modules: Sequence[Any], *args: Any) -> Any:
        """Makes a step with modules, which it updates in place, and further arguments; returns its result."""
        call = split_modules(modules, {})
        return call.update(*self.training.step(call.args, *args))

    def save(self, num_steps: int, modules: Sequence[Any], data: Any = None, *, force: bool = False) -> bool:
        """Begins a checkpoint of modules; arguments and errors as of `Training.save`."""
        return self.training.save(num_steps, split_modules(modules, {}).args, data, force=force)

    def __enter__(self) -> "ModuleTraining":
        return self

    def __exit__(self, *error: object) -> None:
        self.training.close()


def resume(
    directory: str | os.PathLike[str],
    fn: Callable[..., Any],
    mesh: Any,
    init: Callable[[], Sequence[Any]],
    *args: Any,
    **options: Any,
) -> ModuleTraining:
    """Goes on with a training of nnx modules where its last checkpoint is, as `diffshard.resume` does with states.

    >>> with diffshard.nnx.resume("checkpoints", train_step, mesh, init, batch_shapes) as training:
    ...     modules = training.restore()
    ...     for number in range(training.training.num_steps, 10_000):
    ...         loss = training.step(modules, batch_of(number))
    ...         training.save(number + 1, modules)

    Args:
      directory: as in `diffshard.resume`.
      fn: a training step of modules, which come first and which it changes, and of other arguments.
      mesh: as in `diffshard.resume`.
      init: makes the modules: a tuple of them, such as a model and its optimiser.
      *args: the other arguments of `fn`: arrays or `jax.ShapeDtypeStruct`.
      **options: as of `diffshard.resume`.

    Raises:
      CheckpointError, OSError, ProcessesError, TypeError, ValueError: as `diffshard.resume`.
    """
    from diffshard.elastic.resume import resume as resume_states  # imports orbax, which takes a second

    abstract = nnx.eval_shape(lambda: tuple(init()))
    graph = split_modules(abstract, {}).graph

    def step(states: Sequence[Any], *rest: Any) -> tuple[tuple[Any, ...], Any]:
        return run_with_states(fn, graph, (*states, *rest), {})

    step.__name__ = step.__qualname__ = getattr(fn, "__name__", "function")
    states_of = lambda: split_modules(tuple(init()), {}).args  # noqa: E731
    return ModuleTraining(resume_states(directory, step, mesh, states_of, *args, **options), graph)


def _with_graph(plan: Plan) -> Plan:
    """Returns a plan that was made for one graph of modules as one of the function that takes the graph, too."""
    return replace(plan, static_argnames=(*plan.static_argnames, _GRAPH))


def _of_states(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes states in place of modules and their graph, as `run_with_states` does."""

    def run(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        graph: ModuleGraph = kwargs.pop(_GRAPH)
        return run_with_states(fn, graph, args, kwargs)

    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    place = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameters.insert(place, inspect.Parameter(_GRAPH, inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__name__ = getattr(fn, "__name__", "function")
    run.__qualname__ = getattr(fn, "__qualname__", run.__name__)
    return run
