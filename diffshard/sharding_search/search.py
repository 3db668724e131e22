"""`search`: a JAX function and a mesh in, the function parallelised out."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from diffshard.base import PlanError, Progress, Solver
from diffshard.plans.plan import Plan, automatic
from diffshard.sharding_search.options import Options, checked_options
from diffshard.sharding_search.planning import layout_of, make_plan, space_of
from diffshard.sharding_search.traced import TracedFunction, trace_function
from search_spaces.sharding.execution import Execution


def search(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    *,
    hardware: Hardware | str | None = None,
    memory_limit_bytes: float | None = None,
    in_shardings: Any = None,
    solver: str | Solver | None = None,
    time_limit_s: float | None = None,
    key: jax.Array | int | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> "Searched":
    """Finds how to run a function on a mesh. Like `jax.jit` it returns a callable: nothing happens until it is called.

    >>> step = diffshard.search(train_step, mesh)
    >>> print(step.plan(state, batch))
    >>> state, loss = step(state, batch)

    A result with the structure and shapes of an argument (a training state) is taken to replace it in the next call: it
    comes out sharded as the argument goes in.

    Args:
      fn: of positional arguments, any pytrees of arrays, and pytrees of arrays out; a whole training step.
      mesh: a `Mesh`, or an `AbstractMesh` to plan for devices that are not here.
      hardware: what computing and communicating costs: a `Hardware`, the name of a preset, or None for the preset of
        the mesh's devices.
      memory_limit_bytes: of each device; None takes the hardware's.
      in_shardings: shardings to keep: for each argument a pytree prefix of `PartitionSpec`, `NamedSharding` or None
        (free); None leaves all free. Arguments that carry a `NamedSharding` on this mesh keep it, too.
      solver: as in `diffshard.solve`; None is the default one.
      time_limit_s: seconds for the solver; None lets it end by its own rule.
      key: random key or seed of the solver.
      donate_argnums: positions of arguments whose memory may be used for results, as in `jax.jit`.
      static_argnums: positions of arguments that are compile-time constants, as in `jax.jit`.

    Raises:
      TypeError, ValueError: an argument breaks a rule; it is named, with the value.
    """
    return Searched(
        checked_options(
            fn, mesh, hardware, memory_limit_bytes, in_shardings, solver, time_limit_s, key, donate_argnums,
            static_argnums,
        )
    )  # fmt: skip


def apply(plan: Plan, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None) -> "Searched":
    """A function with a plan that was made before. See `Plan.apply`."""
    mesh = plan.mesh if mesh is None else mesh
    if mesh is None or dict(mesh.shape) != dict(plan.mesh_axes):
        found = None if mesh is None else dict(mesh.shape)
        raise PlanError(f"The plan was made for the mesh {dict(plan.mesh_axes)}, not {found}.")
    options = checked_options(
        fn, mesh, plan.hardware, plan.memory_limit_bytes, None, None, None, None, plan.donate_argnums,
        plan.static_argnums,
    )  # fmt: skip
    return Searched(options, plan)


class Searched:
    """A function that runs as its plan says; made by `search`.

    Args:
      options: what was asked for.
      plan: one that was made before, to use instead of searching.
    """

    def __init__(self, options: Options, plan: Plan | None = None):
        self.options = options
        self._given = plan
        self._found: dict[Any, tuple[Plan, Any]] = {}
        self._last: tuple[Any, Any] | None = None  # signature of the last arguments, and what runs them

    def plan(self, *args: Any, progress: Progress | None = None) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`), searched once for each set of shapes.

        Args:
          *args: as for the function itself.
          progress: called as `progress(seconds, cost, lower_bound)` while the solver runs.

        Raises:
          InfeasibleError: no plan fits the memory limit; says the least that would do.
          ValueError: a given sharding does not fit its argument.
        """
        return self._prepared(args, progress)[0]

    def __call__(self, *args: Any) -> Any:
        """Runs the function with the plan for these arguments.

        Raises:
          ValueError: the mesh is abstract, or an argument is committed to another sharding than the plan's.
        """
        if self._last is not None:
            try:
                return self._last[1](*args)
            except Exception:  # arguments of other types than last time, or a fault of these
                if self._signature(args) == self._last[0]:
                    raise
        if not isinstance(self.options.mesh, Mesh):
            raise ValueError(
                f"`mesh` {dict(self.options.mesh.shape)} is abstract: it can be planned and lowered for, not run on. "
                "Give `diffshard.search` (or `Plan.load`) a jax.sharding.Mesh of devices."
            )
        plan, run = self._prepared(args, None)
        _check_placed(plan, self.options.dynamic(args))
        found = run(*args)
        self._last = self._signature(args), run
        return found

    def lower(self, *args: Any) -> Any:
        """Lowers the planned function, as `jax.jit(...).lower`; `compile()` it, look at `as_text()`."""
        return self._prepared(args, None)[1].lower(*args)

    def _prepared(self, args: Sequence[Any], progress: Progress | None) -> tuple[Plan, Any]:
        signature = self._signature(args)
        if signature not in self._found:
            start = time.perf_counter()
            traced = trace_function(self.options, args)
            space = space_of(self.options, traced)
            if self._given is None:
                plan = make_plan(self.options, traced, space, start, progress)
            else:
                plan = self._given
                plan.check_arguments(traced.args)
            execution = Execution(traced.graph, layout_of(plan, space), self.options.mesh, space.prices.path)
            self._found[signature] = plan, self._jitted(traced, execution)
        return self._found[signature]

    def _jitted(self, traced: TracedFunction, execution: Execution) -> Any:
        options = self.options
        wanted = _types(jax.tree.leaves(traced.args)), _typed(traced.static)

        def run(*args: Any) -> Any:  # traced once: arguments that differ later are another plan's
            leaves = jax.tree.leaves(options.dynamic(args))
            if (_types(leaves), _typed(options.static(args))) != wanted:
                raise PlanError("These arguments are not those that the plan was made for.")
            with jax.sharding.use_abstract_mesh(automatic(jax.sharding.get_abstract_mesh())):
                return jax.tree.unflatten(traced.out_tree, execution(*leaves))

        run.__name__ = getattr(options.fn, "__name__", "function")
        structure = jax.tree.structure(traced.args)
        return jax.jit(
            run,
            in_shardings=jax.tree.unflatten(structure, [execution.sharding(s) for s in execution.in_specs]),
            out_shardings=jax.tree.unflatten(traced.out_tree, [execution.sharding(s) for s in execution.out_specs]),
            static_argnums=options.static_argnums or None,
            donate_argnums=options.donate_argnums or None,
        )

    def _signature(self, args: Sequence[Any]) -> Any:
        leaves, structure = jax.tree.flatten(self.options.dynamic(args))
        return _typed(self.options.static(args)), structure, _types(leaves)


def _types(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    """Shape, dtype and weakness of each array: what the traced function depends on."""
    avals = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves)
    return tuple((tuple(a.shape), str(a.dtype), bool(getattr(a, "weak_type", False))) for a in avals)


def _typed(values: Sequence[Any]) -> tuple[tuple[type, Any], ...]:
    """Static values with their types: 1 and 1.0 are equal, but not the same constant."""
    return tuple((type(value), value) for value in values)


def _check_placed(plan: Plan, args: Sequence[Any]) -> None:
    """Arrays that are committed elsewhere would be JAX's error, without the name of the argument."""
    for tensor, leaf in zip(plan.arguments, jax.tree.leaves(tuple(args)), strict=True):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
            wanted = jax.sharding.NamedSharding(plan.placed_mesh, tensor.partition_spec)
            if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                raise ValueError(
                    f"`{tensor.path}` is placed as {leaf.sharding}, but the plan wants {tensor.partition_spec} on the "
                    f"mesh {dict(plan.mesh_axes)}. Use `plan.shard(...)`, or place it so before planning to keep it."
                )
