"""`search`: a JAX function and a mesh in, the function parallelised out."""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cost.hardware import Hardware
from cost.presets import hardware_of, preset
from diffshard.execute import Execution
from diffshard.make_plan import InfeasibleError, layout_of, make_plan, space_of
from diffshard.plan import Plan, PlanError, argument_paths, automatic
from diffshard.solve import Progress, Solver, resolve
from search_spaces.sharding.candidates import dimensions_of
from search_spaces.sharding.graph import Graph, build_graph, feedback_of
from search_spaces.sharding.resharding import Paths

__all__ = ["InfeasibleError", "Searched", "apply", "search"]


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
    """Finds how to run a function on a mesh. Like `jax.jit` it returns a callable, and nothing happens until it is called.

    >>> step = diffshard.search(train_step, mesh)
    >>> print(step.plan(state, batch))
    >>> state, loss = step(state, batch)

    A result with the structure and shapes of an argument (a training state) is taken to replace it in the next call: it
    comes out sharded as the argument goes in.

    Args:
      fn: of positional arguments, any pytrees of arrays, and pytrees of arrays out; a whole training step.
      mesh: a `Mesh`, or an `AbstractMesh` to plan for devices that are not here.
      hardware: what computing and communicating costs: a `Hardware`, the name of a preset, or None for the preset of the
        mesh's devices.
      memory_limit_bytes: of each device; None takes the hardware's.
      in_shardings: shardings to keep: for each argument a pytree prefix of `PartitionSpec`, `NamedSharding` or None
        (free); None leaves all free. Arguments that carry a `NamedSharding` on this mesh keep it, too.
      solver: as in `diffshard.solve`; None is the default one.
      time_limit_s: seconds for the solver.
      key: random key or seed of the solver.
      donate_argnums, static_argnums: as in `jax.jit`.

    Raises:
      TypeError, ValueError: an argument breaks a rule; it is named, with the value.
    """
    return Searched(
        fn, mesh, hardware=hardware, memory_limit_bytes=memory_limit_bytes, in_shardings=in_shardings, solver=solver,
        time_limit_s=time_limit_s, key=key, donate_argnums=donate_argnums, static_argnums=static_argnums,
    )  # fmt: skip


def apply(plan: Plan, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None) -> "Searched":
    """A function with a plan that was made before. See `Plan.apply`."""
    mesh = plan.mesh if mesh is None else mesh
    if mesh is None or dict(mesh.shape) != dict(plan.mesh_axes):
        raise PlanError(
            f"The plan was made for the mesh {dict(plan.mesh_axes)}, not {dict(mesh.shape) if mesh else None}."
        )
    found = Searched(
        fn, mesh, hardware=plan.hardware, memory_limit_bytes=plan.memory_limit_bytes,
        donate_argnums=plan.donate_argnums, static_argnums=plan.static_argnums,
    )  # fmt: skip
    found.given_plan = plan
    return found


class Traced:
    """A function traced for some arguments.

    Attributes:
      graph: its graph.
      args: the arguments without the static ones, abstract.
      paths: a name for each flat argument; `out_paths` for each flat result.
      out_tree: structure of the result.
      static: the values of the static arguments.
      kept: for each flat argument the spec that it carries, or None.
    """

    def __init__(self, searched: "Searched", args: Sequence[Any]):
        abstract = [a if i in searched.static_argnums else jax.tree.map(_abstract, a) for i, a in enumerate(args)]
        # In a context mesh of explicit axes JAX would ask for a sharding in the types of every operation.
        context = automatic(jax.sharding.get_abstract_mesh())
        with jax.sharding.use_abstract_mesh(context):
            traced = jax.jit(searched.fn, static_argnums=searched.static_argnums or None).trace(*abstract)
        self.static = [args[i] for i in searched.static_argnums]
        self.args = tuple(a for i, a in enumerate(abstract) if i not in searched.static_argnums)
        self.paths = argument_paths(self.args, searched.argument_names(len(args)))
        self.out_tree = jax.tree.structure(traced.out_info)
        self.out_paths = ["result" + jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(traced.out_info)]
        feedback = feedback_of(traced.out_info, self.args)
        self.graph: Graph = build_graph(traced.jaxpr, feedback, self.paths)
        dynamic = [a for i, a in enumerate(args) if i not in searched.static_argnums]
        self.kept = [searched.carried(leaf) for leaf in jax.tree.leaves(tuple(dynamic))]


class Searched:
    """A function that runs as its plan says. Made by `search`."""

    def __init__(
        self,
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
    ):
        if not callable(fn):
            raise TypeError(f"`fn` must be a function of positional arguments, not {fn!r}.")
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(f"`mesh` must be a jax.sharding.Mesh or AbstractMesh, not {type(mesh).__name__}.")
        self.fn, self.mesh = fn, automatic(mesh)
        self.axis_names = tuple(str(name) for name in mesh.axis_names)
        self.axis_sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
        self.hardware = _hardware(hardware, mesh)
        for name, n in zip(self.axis_names, self.axis_sizes, strict=True):
            if n > 1:
                self.hardware.link(name)
        limit = self.hardware.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise ValueError(
                f"`memory_limit_bytes` must be a positive number of bytes or None, not {memory_limit_bytes!r}."
            )
        if time_limit_s is not None and not time_limit_s > 0:
            raise ValueError(f"`time_limit_s` must be a positive number of seconds or None, not {time_limit_s!r}.")
        self.memory_limit_bytes = float(limit)
        self.solver: str | Solver = "gradient" if solver is None else solver
        if solver is not None:
            resolve(solver)
        self.time_limit_s, self.key = time_limit_s, key
        self.donate_argnums = _argnums("donate_argnums", donate_argnums)
        self.static_argnums = _argnums("static_argnums", static_argnums)
        self.in_shardings = in_shardings
        self.given_plan: Plan | None = None
        self._plans: dict[Any, tuple[Plan, Any]] = {}
        self._last: tuple[Any, Any] | None = None  # the key of the last arguments and what runs them
        _check_prefix(in_shardings, self.axis_names)

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
        if self._last is not None:
            try:
                return self._last[1](*args)
            except Exception:
                if self._signature(args) == self._last[0]:
                    raise
        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                f"`mesh` {dict(self.mesh.shape)} is abstract: it can be planned and lowered for, not run on. "
                "Give `diffshard.search` a jax.sharding.Mesh of devices."
            )
        run = self._prepared(args, None)[1]
        found = run(*args)
        self._last = self._signature(args), run
        return found

    def lower(self, *args: Any) -> Any:
        """Lowers the planned function, as `jax.jit(...).lower`; `compile()` it, look at `as_text()`."""
        return self._prepared(args, None)[1].lower(*args)

    def _prepared(self, args: Sequence[Any], progress: Progress | None) -> tuple[Plan, Any]:
        signature = self._signature(args)
        if signature not in self._plans:
            start = time.perf_counter()
            traced = Traced(self, args)
            given = self._given(traced)
            space = space_of(traced.graph, self.axis_names, self.axis_sizes, self.hardware, given,
                             self._donated(traced), self.memory_limit_bytes)  # fmt: skip
            if self.given_plan is None:
                plan = make_plan(self, traced, space, start, progress)
            else:
                plan = self.given_plan
                plan.check_arguments(traced.args)
            layout = layout_of(plan, space)
            self._plans[signature] = plan, self._jitted(plan, traced, layout, space.prices.path)
        return self._plans[signature]

    def _jitted(self, plan: Plan, traced: Traced, layout: Any, path: Paths) -> Any:
        execution = Execution(traced.graph, layout, self.mesh, path)
        wanted = [(t.shape, t.dtype) for t in plan.arguments]
        static, values = self.static_argnums, traced.static

        def run(*args: Any) -> Any:  # traced once: what differs later is another plan's
            leaves = jax.tree.leaves(tuple(a for i, a in enumerate(args) if i not in static))
            if [(tuple(x.shape), str(x.dtype)) for x in leaves] != wanted or [args[i] for i in static] != values:
                raise PlanError("These arguments are not those that the plan was made for.")
            return jax.tree.unflatten(traced.out_tree, execution(*leaves))

        run.__name__ = getattr(self.fn, "__name__", "function")
        structure = jax.tree.structure(traced.args)
        in_shardings = jax.tree.unflatten(structure, [execution.sharding(s) for s in execution.in_specs])
        out_shardings = jax.tree.unflatten(traced.out_tree, [execution.sharding(s) for s in execution.out_specs])
        return jax.jit(
            run,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static or None,
            donate_argnums=self.donate_argnums or None,
        )

    def _signature(self, args: Sequence[Any]) -> Any:
        static = tuple(args[i] for i in self.static_argnums if i < len(args))
        leaves, tree = jax.tree.flatten(tuple(a for i, a in enumerate(args) if i not in self.static_argnums))
        avals = (jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
        return static, tree, tuple((tuple(a.shape), str(a.dtype)) for a in avals)

    def _donated(self, traced: Traced) -> tuple[bool, ...]:
        found = []
        dynamic = [i for i in range(len(traced.args) + len(self.static_argnums)) if i not in self.static_argnums]
        for i, arg in zip(dynamic, traced.args, strict=False):
            found += [i in self.donate_argnums] * len(jax.tree.leaves(arg))
        return tuple(found)

    def argument_names(self, count: int) -> list[str]:
        """The parameters' names, without the static ones."""
        try:
            names = [p.name for p in inspect.signature(self.fn).parameters.values() if p.kind is not p.VAR_POSITIONAL]
        except (TypeError, ValueError):
            names = []
        names = (names + [f"argument_{i}" for i in range(count)])[:count] if len(names) < count else names[:count]
        return [name for i, name in enumerate(names) if i not in self.static_argnums]

    def carried(self, leaf: Any) -> PartitionSpec | None:
        """The spec of an argument that is already sharded over this mesh, or None."""
        sharding = getattr(leaf, "sharding", None)
        committed = getattr(leaf, "committed", True)
        if isinstance(sharding, NamedSharding) and committed and dict(sharding.mesh.shape) == dict(self.mesh.shape):
            return sharding.spec
        return None

    def _given(self, traced: Traced) -> dict[int, list[tuple[int, ...] | None]]:
        """Specs to keep by flat argument: the user's first, then what the argument carries."""
        asked: list[Any] = list(traced.kept)
        if self.in_shardings is not None:
            prefix = self.in_shardings if isinstance(self.in_shardings, tuple | list) else (self.in_shardings,)
            if len(prefix) != len(traced.args):
                raise ValueError(
                    f"`in_shardings` must have one entry for each of the {len(traced.args)} arguments, not {len(prefix)}."
                )
            flat = _broadcast(tuple(prefix), traced.args)
            asked = [given if given is not None else kept for given, kept in zip(flat, asked, strict=True)]
        found = {}
        for i, (spec, leaf) in enumerate(zip(asked, jax.tree.leaves(traced.args), strict=True)):
            if spec is None:
                continue
            spec = spec.spec if isinstance(spec, NamedSharding) else spec
            try:
                dims = dimensions_of(spec, len(jax.numpy.shape(leaf)), self.axis_names)
            except ValueError as error:
                raise ValueError(f"`in_shardings` of {traced.paths[i]}: {error}") from None
            self._check_divides(traced.paths[i], spec, dims, jax.numpy.shape(leaf))
            found[i] = dims
        return found

    def _check_divides(
        self, path: str, spec: Any, dims: Sequence[tuple[int, ...] | None], shape: Sequence[int]
    ) -> None:
        for d, (axes, n) in enumerate(zip(dims, shape, strict=True)):
            parts = 1
            for a in axes or ():
                parts *= self.axis_sizes[a]
            if n % parts:
                raise ValueError(
                    f"`in_shardings` of {path}: {spec} splits dimension {d} of {tuple(shape)} into {parts} parts, "
                    "which do not divide it. Pad the array or choose another dimension."
                )


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _hardware(hardware: Hardware | str | None, mesh: Mesh | AbstractMesh) -> Hardware:
    if hardware is None:
        return hardware_of(mesh)
    if isinstance(hardware, str):
        return preset(hardware, dict(mesh.shape))
    if not isinstance(hardware, Hardware):
        raise TypeError(f"`hardware` must be a Hardware, a preset's name or None, not {type(hardware).__name__}.")
    return hardware


def _argnums(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    for number in numbers:
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"`{name}` must be positions of arguments, 0 or more, not {value!r}.")
    return numbers


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def _check_prefix(in_shardings: Any, axis_names: Sequence[str]) -> None:
    for path, leaf in jax.tree.leaves_with_path(in_shardings, is_leaf=_is_spec):
        if not _is_spec(leaf):
            raise TypeError(
                f"`in_shardings`{jax.tree_util.keystr(path)} must be a PartitionSpec, a NamedSharding or None, not {leaf!r}."
            )
        if leaf is not None:
            spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
            try:
                dimensions_of(spec, max(len(spec), 1), axis_names)
            except ValueError as error:
                raise ValueError(f"`in_shardings`{jax.tree_util.keystr(path)}: {error}") from None


def _broadcast(prefix: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """The prefix's entry for each leaf of the arguments."""
    found: list[Any] = []

    def spread(spec: Any, subtree: Any) -> None:
        found.extend([spec] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, prefix, args, is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`in_shardings` is not a prefix of the arguments: {error}") from None
    return found
