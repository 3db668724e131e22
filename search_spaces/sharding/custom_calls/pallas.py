"""Pallas calls: their grid and block specs say which dimensions may be split, and how to run on a part.

A grid axis that numbers the blocks of one dimension in arrays, and does nothing else, is a loop over independent parts:
a device can run a stretch of it on its own parts of these arrays. So a call is split without knowing what it computes,
and the call on parts is the same call with a smaller grid.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
from jax.extend import core

from cost.base import Work
from cost.compute import equation_flops
from search_spaces.replay import bind, with_inner
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls.kernel import Parts, arrays_bytes, dtype_of_work
from search_spaces.sharding.rules import Factors, Mark, rule_from_factors

PALLAS_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
"""The custom calls that Pallas calls lower to, by Triton and by Mosaic."""
_PLACES = ("program_id", "num_programs")
"""Primitives by which a body asks where in the grid it runs, or how large the grid is."""


class _Array(NamedTuple):
    """An operand or result of a call.

    Attributes:
      axes: for each dimension the grid axis that numbers its blocks, or None.
      block_sizes: for each dimension the elements of a block; the whole dimension where no axis numbers blocks.
    """

    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    block_sizes: tuple[int, ...]


def name_of_call(equation: core.JaxprEqn) -> str:
    """Returns the name that a Pallas call was given, or that of its body."""
    body = getattr(equation.params["jaxpr"], "debug_info", None)
    name = equation.params.get("name") or str(getattr(body, "func_src_info", "")).split(" ")[0]
    return f"pallas_call {name!r}"


def rule_of_call(equation: core.JaxprEqn) -> Rule | None:
    """Returns the rule of a call: each free grid axis is a factor; None where no axis of the grid is free."""
    arrays, grid = _arrays(equation), _grid(equation)
    free_axes = _free_axes(equation, arrays)
    if not free_axes:
        return None
    factors = Factors()
    of_axis = {axis: factors.new(grid[axis]) for axis in free_axes}

    def dims(array: _Array) -> list[list[int]]:
        return [
            [factors.new(size, Mark.NEED_REPLICATION)]
            if axis not in of_axis
            else [of_axis[axis]]
            if block_size == 1
            else [of_axis[axis], factors.new(block_size, Mark.NEED_REPLICATION)]
            for size, axis, block_size in zip(*array, strict=True)
        ]

    whole = [[[factors.new(n, Mark.NEED_REPLICATION)] for n in v.aval.shape] for v in _unblocked(equation)]  # pyright: ignore[reportAttributeAccessIssue]
    blocked = [dims(array) for array in arrays]
    num_inputs = equation.params["grid_mapping"].num_inputs
    return rule_from_factors(factors, [*whole, *blocked[:num_inputs]], blocked[num_inputs:])


def run_call(equation: core.JaxprEqn, operands: Sequence[Any], parts: Parts) -> list[Any]:
    """Runs a call on parts of its operands: on the stretch of its grid that the parts are."""
    del parts
    return list(bind(equation, operands, **_local_parameters(equation, operands)))


def work_of_call(equation: core.JaxprEqn, operands: Sequence[jax.ShapeDtypeStruct], share: float) -> Work:
    """Returns the work of one device: its share of the call's own estimate, or else of its body and its arrays.

    Of an array whose blocks are picked by numbers that only the running call knows, such as the pages of a cache, at
    most as many blocks are read as the grid has places.
    """
    flops = share * equation_flops(equation)
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return Work(flops, share * float(estimate.bytes_accessed), dtype_of_work(operands))
    num_bytes = share * arrays_bytes([v.aval for v in _unblocked(equation)])
    num_places = prod(_grid(equation).values())
    for mapping in equation.params["grid_mapping"].block_mappings:
        aval = mapping.array_aval
        block_elements = prod(_block_size(d, n) or n for d, n in zip(mapping.block_shape, aval.shape, strict=True))
        num_bytes += share * aval.dtype.itemsize * min(prod(aval.shape), num_places * block_elements)
    return Work(flops, num_bytes, dtype_of_work(operands))


def _local_parameters(equation: core.JaxprEqn, operands: Sequence[Any]) -> dict[str, Any]:
    """Returns the parameters of a call that differ for parts of its operands."""
    mapping, arrays, grid = equation.params["grid_mapping"], _arrays(equation), _grid(equation)
    parts = operands[len(_unblocked(equation)) :]
    local_grid = dict(grid)
    for array, part in zip(arrays, parts, strict=False):
        for axis, whole, size, block_size in zip(array.axes, array.shape, part.shape, array.block_sizes, strict=True):
            if axis is not None and size != whole:
                local_grid[axis] = size // block_size

    def shape(array: _Array) -> tuple[int, ...]:
        return tuple(
            size if axis is None or local_grid[axis] == grid[axis] else local_grid[axis] * block_size
            for size, axis, block_size in zip(*array, strict=True)
        )

    avals = [m.array_aval.update(shape=shape(a)) for m, a in zip(mapping.block_mappings, arrays, strict=True)]
    block_mappings = [m.replace(array_aval=aval) for m, aval in zip(mapping.block_mappings, avals, strict=True)]
    new_grid = tuple(local_grid.get(axis, size) for axis, size in enumerate(mapping.grid))
    out_avals = [
        aval.update(shape=shape(array))
        for aval, array in zip(equation.params["out_avals"], arrays[mapping.num_inputs :], strict=True)
    ]
    parameters = {
        "grid_mapping": dataclasses.replace(mapping, grid=new_grid, block_mappings=tuple(block_mappings)),
        "out_avals": tuple(out_avals),
    }
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        share = prod(local_grid.values()) / prod(grid.values())
        numbers = {f.name: getattr(estimate, f.name) for f in dataclasses.fields(estimate)}
        scaled = {name: int(n * share) for name, n in numbers.items() if isinstance(n, int | float)}
        parameters["cost_estimate"] = dataclasses.replace(estimate, **scaled)
    return parameters


def _grid(equation: core.JaxprEqn) -> dict[int, int]:
    """Returns the size of each grid axis that is known before the call runs."""
    return {axis: size for axis, size in enumerate(equation.params["grid_mapping"].grid) if isinstance(size, int)}


def _unblocked(equation: core.JaxprEqn) -> list[Any]:
    """Returns the operands before those with blocks: sizes of the grid, and numbers that index maps read."""
    return list(equation.invars[: len(equation.invars) - equation.params["grid_mapping"].num_inputs])


def _arrays(equation: core.JaxprEqn) -> list[_Array]:
    """Returns the operands and results that have blocks."""
    arrays = []
    for mapping in equation.params["grid_mapping"].block_mappings:
        jaxpr, shape = mapping.index_map_jaxpr.jaxpr, tuple(mapping.array_aval.shape)
        axis_of = {var: axis for axis, var in enumerate(jaxpr.invars[: len(equation.params["grid_mapping"].grid)])}
        axes, block_sizes = [], []
        for out, dim, size in zip(jaxpr.outvars, mapping.block_shape, shape, strict=True):
            block_size = _block_size(dim, size)
            axis = None if isinstance(out, core.Literal) or block_size is None else axis_of.get(out)
            axes.append(axis)
            block_sizes.append(size if axis is None or block_size is None else block_size)
        arrays.append(_Array(shape, tuple(axes), tuple(block_sizes)))
    return arrays


def _block_size(dim: Any, size: int) -> int | None:
    """Returns the elements of a block along a dimension; None where blocks may overlap or have several sizes."""
    kind = type(dim).__name__
    if dim is None or kind == "Squeezed":
        return 1
    if isinstance(dim, int):
        return dim
    return int(dim.block_size) if kind == "Blocked" else size if kind == "Indirect" else None


def _free_axes(equation: core.JaxprEqn, arrays: Sequence[_Array]) -> list[int]:
    """Returns the grid axes that number the blocks of one dimension of every result, and do nothing else.

    Neither the body nor another index map may ask where along the axis it runs, and blocks must be full.
    """
    mapping, grid = equation.params["grid_mapping"], _grid(equation)
    logical_axes = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    asked_axes = {logical_axes[number] for number in _asked_axes(equation.params["jaxpr"], len(logical_axes))}
    for block_mapping, array in zip(mapping.block_mappings, arrays, strict=True):
        jaxpr = block_mapping.index_map_jaxpr.jaxpr
        reads = Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal))
        reads.update(v for v in jaxpr.outvars if not isinstance(v, core.Literal))
        numbers_blocks = Counter(axis for axis in array.axes if axis is not None)
        for axis, var in enumerate(jaxpr.invars[: len(mapping.grid)]):
            if reads[var] != numbers_blocks[axis] or numbers_blocks[axis] > 1:
                asked_axes.add(axis)
        for size, axis, block_size in zip(*array, strict=True):
            if axis is not None and size != grid.get(axis, 0) * block_size:
                asked_axes.add(axis)
    operands, results = arrays[: mapping.num_inputs], arrays[mapping.num_inputs :]
    for operand, result in equation.params.get("input_output_aliases", ()):  # a result in an operand's memory
        place = operand - len(_unblocked(equation))
        if place >= 0 and operands[place] != results[result]:
            asked_axes.update(axis for axis in results[result].axes if axis is not None)
    return [
        axis
        for axis in grid
        if axis not in asked_axes
        and all(axis in array.axes for array in results)
        and any(axis in array.axes for array in operands)
    ]


def _asked_axes(jaxpr: Any, num_axes: int) -> Iterator[int]:
    """Yields the grid axes of which a body asks: all if it draws random numbers, which go on from place to place."""
    for equation in with_inner(getattr(jaxpr, "jaxpr", jaxpr).eqns):
        if equation.primitive.name in _PLACES:
            yield equation.params["axis"]
        elif equation.primitive.name.startswith("prng"):
            yield from range(num_axes)
