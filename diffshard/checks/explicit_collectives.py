"""Every collective of a sharded computation without compiling it: Shardy's partitioner, run to its explicit form.

Like `search_spaces/sharding/shardy.py` this touches `jaxlib.mlir`; nothing else does.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from cost.base import CollectiveKind
from diffshard.checks.collectives import CollectiveRecord, axes_of_groups, axes_of_pairs, bits_of_dtype

_PASSES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives))"
)
_KINDS: dict[str, CollectiveKind] = {
    "sdy.all_gather": "all_gather",
    "sdy.reduce_scatter": "reduce_scatter",
    "sdy.all_reduce": "all_reduce",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "collective_permute",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}
_AXIS = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')


def explicit_collectives(lowered: Any) -> list[CollectiveRecord]:
    """Returns the collectives that Shardy's partitioner needs for a computation's shardings.

    Takes milliseconds where XLA takes seconds, and knows less: XLA combines, moves and cancels collectives afterwards,
    turns an all-reduce and a slice into a reduce-scatter (see `with_reduce_scatters`), and moves data between
    neighbours for slices, padding and convolution windows, which Shardy does not show. Bodies of loops count as often
    as they run where the trip count is a constant, once where it is not; of branches the one with most bytes counts.
    Groups of one device move nothing and are left out.

    Args:
      lowered: `jax.jit(...).lower(...)` with shardings on a mesh; it is not changed.

    Returns:
      In program order; `source` is the operation's location.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        copy = module.operation.clone()
        PassManager.parse(_PASSES).run(copy)
        return list(_Reader(copy).function("main", 1.0))


class _Reader:
    """Walks an explicit module from its main function, through calls, loops and branches."""

    def __init__(self, module: Any) -> None:
        self._functions: dict[str, Any] = {}
        self.axis_sizes: dict[str, int] = {}
        for op in module.regions[0].blocks[0].operations:
            operation = op.operation
            if operation.name == "func.func":
                self._functions[ir.StringAttr(operation.attributes["sym_name"]).value] = operation
            elif operation.name == "sdy.mesh":
                for axis in sdy.MeshAttr(operation.attributes["mesh"]).axes:
                    axis = sdy.MeshAxisAttr(axis)
                    self.axis_sizes[axis.name] = axis.size

    def function(self, name: str, count: float) -> Iterator[CollectiveRecord]:
        """Yields the collectives of a function that is called `count` times."""
        yield from self._region(self._functions[name].regions[0], count)

    def _region(self, region: Any, count: float) -> Iterator[CollectiveRecord]:
        for block in region.blocks:
            for op in block.operations:
                yield from self._operation(op.operation, count)

    def _operation(self, operation: Any, count: float) -> Iterator[CollectiveRecord]:
        name = operation.name
        if name == "func.call":
            yield from self.function(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value, count)
        elif name == "stablehlo.while":
            trips = count * _trip_count(operation)
            for region in operation.regions:
                yield from self._region(region, trips)
        elif name in ("stablehlo.case", "stablehlo.if"):
            branches = [list(self._region(region, count)) for region in operation.regions]
            yield from max(branches, key=lambda records: sum(c.num_bytes * c.count for c in records), default=[])
        elif name.startswith("sdy.") and name in _KINDS:
            yield from self._from_shardy(operation, count)
        elif name in _KINDS:
            collective = self._manual(operation, count)
            if collective.num_devices > 1:
                yield collective
        else:
            for region in operation.regions:
                yield from self._region(region, count)

    def _from_shardy(self, operation: Any, count: float) -> Iterator[CollectiveRecord]:
        """Yields a collective of the Shardy dialect: global types, axes by name."""
        kind = _KINDS[operation.name]
        attributes = operation.attributes
        local_bytes, dtype = self._local_bytes(operation.results[0].type, attributes["out_sharding"])
        sliced_axes: tuple[str, ...] = ()
        if kind == "all_to_all":
            groups = re.findall(r"\{([^}]*)\}: *\d+ *-> *\d+", str(attributes["params"]))
        elif kind == "collective_permute":
            groups = [self._permuted_axis(operation)]
        else:
            attribute = {
                "all_gather": "gathering_axes",
                "reduce_scatter": "reduce_scatter_axes",
                "all_reduce": "reduction_axes",
            }[kind]
            groups = [str(attributes[attribute])]
            sliced_axes = self._sliced_axes(operation) if kind == "all_reduce" else ()
        for text in groups:
            axes, num_devices = self._axes(text)
            if num_devices == 1:
                continue
            factor = num_devices if kind in ("all_to_all", "reduce_scatter") else 1
            num_bytes = local_bytes * factor
            yield CollectiveRecord(
                kind,
                axes,
                num_devices,
                num_bytes,
                dtype,
                1,
                count,
                sliced_axes,
                num_bytes if sliced_axes else 0.0,
                _location(operation),
            )

    def _manual(self, operation: Any, count: float) -> CollectiveRecord:
        """Returns a collective that a shard_map has written: local types, groups by device."""
        kind = _KINDS[operation.name]
        result, dtype = _type_bytes(operation.results[0].type)
        operand, _ = _type_bytes(operation.operands[0].type)
        if kind == "collective_permute":
            pairs = _integers(operation.attributes["source_target_pairs"])
            axes = axes_of_pairs([(s, t) for s, t in pairs], self.axis_sizes)
            num_devices = len(pairs) if axes else 1  # nobody sends to another
        else:
            axes, num_devices = self._manual_groups(operation.attributes["replica_groups"])
        size = result if kind == "all_gather" else operand
        factor = num_devices if kind == "all_to_all" else 1
        return CollectiveRecord(kind, axes, num_devices, size * factor, dtype, count=count, source=_location(operation))

    def _manual_groups(self, attribute: Any) -> tuple[tuple[str, ...], int]:
        """Returns axes and size of groups, which JAX writes as devices before 0.11 and as axes of a mesh since."""
        names = re.findall(r'axis_ref<name = "([^"]+)"', str(attribute))
        if names:
            return self._axes(" ".join(f'"{name}"' for name in names))
        groups = _integers(attribute)
        return axes_of_groups(groups, self.axis_sizes), len(groups[0])

    def _axes(self, text: str) -> tuple[tuple[str, ...], int]:
        """Reads a list like `{"x", "y":(1)2}`: axis names in the mesh's order, and how many devices they span."""
        axes = [(name, int(size) if size else self.axis_sizes[name]) for name, size in _AXIS.findall(text)]
        names = {name for name, _ in axes}
        return tuple(a for a in self.axis_sizes if a in names), math.prod(size for _, size in axes)

    def _permuted_axis(self, operation: Any) -> str:
        """Returns the axes that are in other places of the sharding after a permutation than before."""
        before = _sharding_of(operation.operands[0])
        after = str(operation.attributes["out_sharding"])
        if before is None:
            return after
        places = [
            {name: i for i, dim in enumerate(_dimensions(s)) for name, _ in _AXIS.findall(dim)} for s in (before, after)
        ]
        moved_axes = {a for a in {**places[0], **places[1]} if places[0].get(a) != places[1].get(a)}
        return " ".join(f'"{a}"' for a in self.axis_sizes if a in moved_axes) or after

    def _sliced_axes(self, operation: Any) -> tuple[str, ...]:
        users = [use.owner.operation for use in operation.results[0].uses]
        if not users or any(user.name != "sdy.all_slice" for user in users):
            return ()
        axes = {str(user.attributes["slicing_axes"]) for user in users}
        return self._axes(axes.pop())[0] if len(axes) == 1 else ()

    def _local_bytes(self, type_: Any, sharding: Any) -> tuple[float, str]:
        shape = ir.RankedTensorType(type_).shape
        shards = [self._axes(dim)[1] for dim in _dimensions(str(sharding))]
        local = [math.ceil(size / n) for size, n in zip(shape, shards, strict=True)]
        dtype = str(ir.RankedTensorType(type_).element_type)
        return math.prod(local) * bits_of_dtype(dtype) / 8, dtype


def _dimensions(sharding: str) -> list[str]:
    """Returns the axes of each dimension of a sharding such as `<@mesh, [{"x", "y"}, {}]>`."""
    inside = sharding[sharding.index("[{") if "[{" in sharding else sharding.rindex("[") :]
    return re.findall(r"\{([^}]*)\}", inside[: inside.index("]")])


def _sharding_of(value: Any) -> str | None:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    attributes = owner.attributes
    for name in ("out_sharding", "sdy.sharding"):
        if name in attributes:
            return str(attributes[name])
    return None


def _type_bytes(type_: Any) -> tuple[float, str]:
    tensor = ir.RankedTensorType(type_)
    dtype = str(tensor.element_type)
    return math.prod(tensor.shape) * bits_of_dtype(dtype) / 8, dtype


def _integers(attribute: Any) -> list[list[int]]:
    shape = ir.RankedTensorType(attribute.type).shape
    values = [int(v) for v in ir.DenseIntElementsAttr(attribute)]
    if len(values) == 1 and math.prod(shape) > 1:
        values *= math.prod(shape)
    return [values[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]


def _trip_count(loop: Any) -> float:
    """Counts the trips of a loop from a constant by a constant to a constant, as scans have; one for other loops."""
    condition, body = (region.blocks[0] for region in loop.regions)
    test = condition.operations[len(condition.operations) - 1].operation.operands[0].owner
    if isinstance(test, ir.Block) or test.operation.name != "stablehlo.compare":
        return 1.0
    if " LT" not in str(test.operation.attributes["comparison_direction"]):
        return 1.0
    counter, limit = test.operation.operands[0], _constant(test.operation.operands[1])
    position = next((i for i, argument in enumerate(condition.arguments) if argument == counter), None)
    if position is None or limit is None:
        return 1.0
    start = _constant(loop.operands[position])
    after = body.operations[len(body.operations) - 1].operation.operands[position].owner
    if start is None or isinstance(after, ir.Block) or after.operation.name != "stablehlo.add":
        return 1.0
    step = _constant(after.operation.operands[1]) or _constant(after.operation.operands[0])
    return float(max(0, math.ceil((limit - start) / step))) if step else 1.0


def _constant(value: Any) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.operation.name not in ("sdy.constant", "stablehlo.constant"):
        return None
    match = re.search(r"dense<(-?\d+)>", str(owner.operation.attributes["value"]))
    return int(match[1]) if match else None


def _location(operation: Any) -> str:
    match = re.search(r'loc\("([^"]*)"', str(operation.location))
    return match[1] if match else ""
