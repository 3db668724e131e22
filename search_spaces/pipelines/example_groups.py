"""Micro-batches whose examples are in groups, so that gradients are summed over the groups once, when a step ends.

A gradient that is summed over all examples of a micro-batch has to be reduced over the devices that share them, in each
micro-batch again. Here the forward and backward programs compute R groups of examples side by side, along a dimension
of their own, and what micro-batches add up has that dimension too: R totals. One program at the end of the step sums
them. Where devices split the dimension of the groups, micro-batches reduce nothing, and the sharding search finds that
by itself. The price is memory: each device has a total of its own instead of a part of one.

A step that was traced in M·R parts becomes one of M micro-batches. Group r of micro-batch m is part r·M + m, and the
groups are neighbouring parts of the batch. So a batch that is stored in R parts stays where it is.

Groups are side by side by `jax.vmap`. JAX gives an operand without the mapped dimension one of size 1, and some
primitives do not stretch it when they are lowered. Such operations become calls with a rule of their own, which
stretches their operands first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.pipelines.batch_states import Split, State
from search_spaces.pipelines.stage_labels import NUMBER, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.pipelines.step_parts import abstract
from search_spaces.replay import CALLS, bind, evaluated, traced_again, user_source, with_inner, without_dead_code

_REDUCE = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


def in_groups(staged: StagedStep) -> StagedStep:
    """Returns a step whose micro-batches keep sums for each of R groups of their examples, and reduce them once.

    Args:
      staged: a step of M·R micro-batches, those of R groups one after the other; with one group it is returned as it
        is.

    Raises:
      ValueError: an operation cannot compute groups side by side; names it.
    """
    return staged if staged.num_groups == 1 else _Grouping(staged).step()


def reduced(total: Key) -> Key:
    """Returns the key of what the totals of all groups make together."""
    return ("reduced", total)


class _Grouping:
    """Makes the programs of M micro-batches of R groups from those of M·R micro-batches."""

    def __init__(self, staged: StagedStep):
        self.staged, self.num_groups = staged, staged.num_groups
        self.num_microbatches = staged.num_microbatches // staged.num_groups
        self.dims: dict[Key, int | None] = {}  # where arrays of micro-batches have their groups; None: the same in all
        self.grouped: dict[Label, StageProgram] = {}
        self.avals = dict(staged.avals)
        sums = [a for program in staged.programs.values() for a in program.accumulations]
        self.added = {a.part for a in sums if a.state in _REDUCE}
        self.totals = {a.total for a in sums if a.state in _REDUCE}
        self.results = {key for key in staged.outputs if not isinstance(key, core.Literal)}

    def step(self) -> StagedStep:
        """Returns the step of M micro-batches."""
        staged, programs = self.staged, {}
        for label, program in staged.programs.items():
            if label.kind == "begin":
                programs[label] = program
            elif label.kind in ("forward", "backward"):
                programs[label] = self._in_groups(program)
        for label, program in list(programs.items()):
            sums = [a for a in program.accumulations if a.state in _REDUCE]
            if sums:
                reduction = self._reduction(label.stage, sums)
                programs[reduction.label] = reduction
        for label, program in staged.programs.items():
            if label.kind == "finish":
                after = label._replace(phase=label.phase + 1)
                reads = tuple(self._whole(key) for key in program.reads)
                programs[after] = replace(program, label=after, reads=reads)
        return replace(
            staged,
            num_microbatches=self.num_microbatches,
            num_groups=1,
            programs=programs,
            outputs=tuple(key if isinstance(key, core.Literal) else self._whole(key) for key in staged.outputs),
            avals=self.avals,
        )

    def _whole(self, key: Key) -> Key:
        """Returns the key of an array at the end of a step."""
        return reduced(key) if key in self.totals else key

    def _dim(self, key: Key) -> int | None:
        """Returns the dimension along which an array that a program reads has its groups."""
        maker = self.staged.makers.get(key)
        if maker is not None and maker.kind in ("forward", "backward") and key not in self.dims:
            self._in_groups(self.staged.programs[maker])
        return self.dims.get(key)

    def _in_groups(self, program: StageProgram) -> StageProgram:
        """Returns a forward or backward program for all groups of a micro-batch."""
        if program.label in self.grouped:
            return self.grouped[program.label]
        dims = [self._dim(key) for key in program.reads]
        run = _GroupedProgram(program, dims, self.num_groups, self.num_microbatches)
        shapes = [abstract(self.avals[key]) for key in program.reads]
        traced = jax.make_jaxpr(run)(*shapes)
        traced, found = _with_own_dims(traced, self.num_groups, [key in self.added for key in program.makes])
        self.dims.update(zip(program.makes, found, strict=True))
        self.avals.update(zip(program.makes, traced.out_avals, strict=True))
        self.grouped[program.label] = grouped = self._with_pieces(replace(program, program=traced))
        return grouped

    def _with_pieces(self, program: StageProgram) -> StageProgram:
        """Returns a program that puts together what its groups make in pieces, and keeps what is the same in all."""
        accumulations, pieces = [], {}
        for a in program.accumulations:
            dim = self._dim(a.part)
            if a.state in _REDUCE:
                assert dim is not None
                shape = list(self.staged.avals[a.total].shape)
                shape.insert(dim, self.num_groups)
                self.avals[a.total] = jax.ShapeDtypeStruct(tuple(shape), self.staged.avals[a.total].dtype)
            elif dim is not None:
                pieces[a.part] = dim, a.state
                a = Accumulation(a.total, ("piece", a.part), a.state)
            accumulations.append(a)
        if not pieces:
            return replace(program, accumulations=tuple(accumulations))
        needed = {*self.staged.readers, *self.results, *self.added}
        makes = tuple(key for key in program.makes if key not in pieces or key in needed)
        jaxpr = core.jaxpr_as_fun(program.program)

        def run(*arrays: Any) -> list[Any]:
            env = {**dict(zip(program.reads, arrays, strict=True))}
            env.update(zip(program.makes, jaxpr(*arrays), strict=True))
            put = [_together(env[key], dim, state) for key, (dim, state) in pieces.items()]
            return [*(env[key] for key in makes), *put]

        traced = jax.make_jaxpr(run)(*(abstract(self.avals[key]) for key in program.reads))
        keys = [("piece", key) for key in pieces]
        self.avals.update(zip(keys, traced.out_avals[len(makes) :], strict=True))
        self.avals.update({a.total: self.avals[a.part] for a in accumulations if a.part in keys})
        return replace(program, program=traced, makes=(*makes, *keys), accumulations=tuple(accumulations))

    def _reduction(self, stage: int, sums: list[Accumulation]) -> StageProgram:
        """Returns the program that sums the totals of a stage over the groups."""
        totals = [a.total for a in sums]

        def run(*arrays: Any) -> list[Any]:
            return [
                _REDUCE[a.state](array, axis=self.dims[a.part], **({"dtype": array.dtype} if a.state == "sum" else {}))  # type: ignore[index]
                for a, array in zip(sums, arrays, strict=True)
            ]

        traced = jax.make_jaxpr(run)(*(abstract(self.avals[key]) for key in totals))
        makes = tuple(reduced(key) for key in totals)
        self.avals.update(zip(makes, traced.out_avals, strict=True))
        return StageProgram(Label("finish", stage, 0), traced, tuple(totals), makes)


def _together(array: Any, dim: int, state: State) -> Any:
    """Returns the pieces of neighbouring groups in one; or one of them, where they are the same."""
    stack = jnp.moveaxis(array, dim, 0)
    if not isinstance(state, Split):
        return stack[0]
    pieces = jnp.moveaxis(stack, 0, state.dim)
    return pieces.reshape(*pieces.shape[: state.dim], -1, *pieces.shape[state.dim + 2 :])


_OF_EQUAL_SHAPES = ("threefry2x32",)
"""Primitives that JAX cannot lower if only some operands have the mapped dimension."""


def _with_equal_shapes(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program whose operations of `_OF_EQUAL_SHAPES` `jax.vmap` can map."""
    if not any(equation.primitive.name in _OF_EQUAL_SHAPES for equation in with_inner(program.jaxpr.eqns)):
        return program

    def run(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name in _OF_EQUAL_SHAPES:
            return _side_by_side(equation, operands)
        return bind(equation, operands, **{name: _changed(value) for name, value in equation.params.items()})

    return traced_again(program, lambda *arrays: evaluated(program.jaxpr, program.consts, arrays, run))


def _changed(parameter: Any) -> Any:
    """Returns a parameter of an equation, with `_with_equal_shapes` of the programs in it."""
    if isinstance(parameter, core.ClosedJaxpr):
        return _with_equal_shapes(parameter)
    if isinstance(parameter, core.Jaxpr):
        return _with_equal_shapes(core.ClosedJaxpr(parameter, ())).jaxpr
    return type(parameter)(map(_changed, parameter)) if type(parameter) in (tuple, list) else parameter


def _side_by_side(equation: core.JaxprEqn, operands: list[Any]) -> Any:
    """Evaluates an equation; over all groups each operand has their dimension, also where it is the same in all."""
    call = jax.custom_batching.custom_vmap(lambda *arrays: tuple(bind(equation, arrays)))

    @call.def_vmap
    def of_all_groups(axis_size: int, in_batched: list[bool], *arrays: Any) -> tuple[Any, Any]:
        shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
        each = []
        for array, is_batched in zip(arrays, in_batched, strict=True):
            own = array.shape[1:] if is_batched else array.shape
            array = array.reshape(axis_size if is_batched else 1, *[1] * (len(shape) - len(own)), *own)
            each.append(jnp.broadcast_to(array, (axis_size, *shape)))
        return tuple(bind(equation, each)), (True,) * len(equation.outvars)

    return call(*operands)


class _GroupedProgram:
    """A forward or backward program that computes all groups of a micro-batch side by side.

    Args:
      program: of one of M·R parts.
      dims: of each array that it reads the dimension of the groups; None where it has none.
      num_groups: R.
      num_microbatches: M.
    """

    def __init__(self, program: StageProgram, dims: list[int | None], num_groups: int, num_microbatches: int):
        self.reads, self.program, self.dims = program.reads, _with_equal_shapes(program.program), dims
        self.num_groups, self.num_microbatches = num_groups, num_microbatches

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the program's results, with the groups along the first dimension."""
        number = dict(zip(self.reads, arrays, strict=True)).get(NUMBER)
        numbered = [key == NUMBER for key in self.reads]
        jaxpr, consts = self.program.jaxpr, self.program.consts

        def of_group(group: Any, *own: Any) -> list[Any]:
            parts = [group * self.num_microbatches + number if n else a for a, n in zip(own, numbered, strict=True)]
            return self._run(jaxpr, consts, parts, numbered, group, number)

        of_groups = jnp.arange(self.num_groups, dtype=jnp.int32)
        return jax.vmap(of_group, in_axes=(0, *self.dims))(of_groups, *arrays)

    def _run(
        self,
        jaxpr: core.Jaxpr,
        constants: Sequence[Any],
        arrays: Sequence[Any],
        numbered: Sequence[bool],
        group: Any,
        number: Any,
    ) -> list[Any]:
        """Runs a body; `numbered` tells which of its arguments are the number of the part."""
        numbers = {v for v, is_number in zip(jaxpr.invars, numbered, strict=True) if is_number}

        def run(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            of_numbers = [isinstance(v, core.Var) and v in numbers for v in equation.invars]
            if _is_number(equation, of_numbers):
                numbers.add(equation.outvars[0])
            dim = self._dim_of_parts(equation, of_numbers)
            if dim is not None:
                return [self._own_part(operands, dim, equation.params["slice_sizes"], group, number)]
            body = equation.params.get(CALLS.get(equation.primitive.name, ""))
            if body is None:
                return _bind(equation, operands)
            inner, constants = getattr(body, "jaxpr", body), getattr(body, "consts", ())
            return self._run(inner, constants, operands, of_numbers, group, number)

        return evaluated(jaxpr, constants, arrays, run)

    def _dim_of_parts(self, equation: core.JaxprEqn, of_numbers: Sequence[bool]) -> int | None:
        """Returns the dimension from which an equation takes the part of its group; None for other equations."""
        if equation.primitive.name != "dynamic_slice":
            return None
        sizes, shape = equation.params["slice_sizes"], equation.invars[0].aval.shape  # type: ignore[attr-defined]
        at = [dim for dim, is_number in enumerate(of_numbers[1:]) if is_number]
        parts = self.num_groups * self.num_microbatches
        return at[0] if len(at) == 1 and sizes[at[0]] == 1 and shape[at[0]] == parts else None

    def _own_part(self, operands: list[Any], dim: int, sizes: tuple[int, ...], group: Any, number: Any) -> Any:
        """Returns the part of a group: all groups' parts are one slice, which needs no gather."""
        array, *starts = operands
        shape = array.shape[:dim], (self.num_groups, self.num_microbatches), array.shape[dim + 1 :]
        array = array.reshape([n for sizes in shape for n in sizes])
        starts = [*starts[:dim], 0, number, *starts[dim + 1 :]]
        starts = [jnp.asarray(start, jnp.int32) for start in starts]
        parts = lax.dynamic_slice(array, starts, (*sizes[:dim], self.num_groups, 1, *sizes[dim + 1 :]))
        return _of_group(jnp.moveaxis(parts, dim, 0), group)


@jax.custom_batching.custom_vmap
def _of_group(arrays: Any, group: Any) -> Any:
    """Returns the array of a group, of `[R, ...]`; over all groups these are the arrays as they are."""
    return lax.dynamic_index_in_dim(arrays, group, keepdims=False)


@_of_group.def_vmap
def _of_all_groups(axis_size: int, in_batched: list[bool], arrays: Any, groups: Any) -> tuple[Any, bool]:
    del axis_size
    if not in_batched[0]:
        return arrays, True
    return jax.vmap(lambda own, group: lax.dynamic_index_in_dim(own, group, keepdims=False))(arrays, groups), True


def _is_number(equation: core.JaxprEqn, of_numbers: Sequence[bool]) -> bool:
    """Returns whether an equation makes the number of the part again, as an index that counts from the front."""
    if equation.primitive.name == "select_n" and len(of_numbers) == 3:  # select_n(number < 0, number, number + size)
        return of_numbers[1]
    return equation.primitive.name in ("convert_element_type", "copy") and of_numbers[0]


def _bind(equation: core.JaxprEqn, operands: list[Any]) -> Any:
    try:
        return bind(equation, operands)
    except NotImplementedError as error:
        name = f"{equation.primitive.name} ({user_source(equation)})"
        raise ValueError(f"{name} cannot compute groups of examples side by side: {error}") from None


def _with_own_dims(
    traced: core.ClosedJaxpr, num_groups: int, forced: list[bool]
) -> tuple[core.ClosedJaxpr, list[int | None]]:
    """Returns a program whose results have their groups where they come to lie, and these dimensions.

    Results that are the same in all groups have no such dimension, unless it is forced. So weights are not copied for
    each group, and what a scan over layers stacks is not transposed.
    """
    jaxpr = traced.jaxpr
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    results, dims = [], []
    for variable, is_forced in zip(jaxpr.outvars, forced, strict=True):
        maker = makers.get(variable) if isinstance(variable, core.Var) else None
        source, dim = variable, 0
        if maker is not None and maker.primitive.name == "transpose":
            permutation = maker.params["permutation"]
            rest = [d for d in range(len(permutation)) if d != permutation[0]]
            if list(permutation[1:]) == rest:
                source, dim = maker.invars[0], permutation[0]
        elif maker is not None and maker.primitive.name == "broadcast_in_dim" and not is_forced:
            operand = maker.invars[0].aval  # type: ignore[attr-defined]
            shape, kept = maker.params["shape"], maker.params["broadcast_dimensions"]
            if tuple(shape) == (num_groups, *operand.shape) and tuple(kept) == tuple(range(1, len(shape))):
                source, dim = maker.invars[0], None
        results.append(source)
        dims.append(dim)
    return without_dead_code(core.ClosedJaxpr(jaxpr.replace(outvars=results), traced.consts)), dims
