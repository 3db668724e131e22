"""The baselines: each splits state and batch by a rule that its paper states, and says how activations are split.

Optimiser moments are split as their parameters are, because their paths end alike and their shapes are equal. Without
rules for activations the compiler would split these as it finds parameters split, and FSDP would be lost.
"""

from collections.abc import Callable, Mapping, Sequence

from jax.sharding import PartitionSpec

from diffshard.baselines.base import (
    LOGICAL_AXES,
    TENSOR_GROUPS,
    Argument,
    BaselineMesh,
    BaselineShardings,
    DoesNotApplyError,
    Split,
    tensor_splits,
)
from diffshard.plans.base import LogicalAxisRules

Baseline = Callable[[Sequence[Argument], BaselineMesh, Mapping[tuple[str, ...], int | None]], BaselineShardings]
"""A function of the arguments, the mesh, and exceptions to the dimensions that Megatron splits."""


def data_parallel(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits the batch over all devices, and replicates the state."""
    del dimensions
    specs = [
        _replicated(argument) if argument.is_state else _batch_spec(argument, mesh, mesh.axes) for argument in arguments
    ]
    return BaselineShardings(tuple(specs), _rules({"batch": mesh.axes}))


def fsdp(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits batch and state over all devices, arrays of the state along their largest dimension that divides.

    Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 3.
    """
    return _fully_sharded_state(data_parallel(arguments, mesh, dimensions), arguments, mesh, mesh.axes)


def hybrid_fsdp(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits the batch over all devices, and the state over the inner axis only: copies are along the other axes.

    Source: Zhao et al., PyTorch FSDP (arXiv:2304.11277), section 3.2.2, hybrid sharding.
    """
    _check_two_axes(mesh, "FSDP")
    return _fully_sharded_state(data_parallel(arguments, mesh, dimensions), arguments, mesh, (mesh.inner,))


def megatron(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits heads, hidden units, vocabulary and experts over the inner axis, and the batch over the others."""
    splits = tensor_splits(arguments, dimensions)
    if not any(splits):
        raise DoesNotApplyError("No argument looks like the matrix of a layer.")
    specs, whole = [], set()
    for argument, split in zip(arguments, splits, strict=True):
        if not argument.is_state:
            specs.append(_batch_spec(argument, mesh, mesh.outer))
            continue
        spec = _tensor_parallel_spec(argument, split, mesh)
        specs.append(spec)
        if split is not None and not any(spec):
            whole.add(split[1])
    groups = {group: (mesh.inner,) for group in TENSOR_GROUPS if group not in whole}
    return BaselineShardings(tuple(specs), _rules({"batch": mesh.outer, **groups}))


def megatron_fsdp(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits as Megatron does, and another dimension of each array of the state over the other axes."""
    _check_two_axes(mesh, "Megatron")
    return _fully_sharded_state(megatron(arguments, mesh, dimensions), arguments, mesh, mesh.outer)


def megatron_sequence(
    arguments: Sequence[Argument], mesh: BaselineMesh, dimensions: Mapping[tuple[str, ...], int | None]
) -> BaselineShardings:
    """Splits as Megatron does, and between its matrices the sequence over the inner axis.

    Source: Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
    """
    shardings = megatron(arguments, mesh, dimensions)
    # The first rule that can be used is: a dimension of heads or hidden units comes before the sequence.
    return shardings._replace(rules=(*shardings.rules, *_rules({"sequence": (mesh.inner,)})))


BASELINES: dict[str, Baseline] = {
    "data parallel": data_parallel,
    "fsdp": fsdp,
    "hybrid fsdp": hybrid_fsdp,
    "megatron": megatron,
    "megatron fsdp": megatron_fsdp,
    "megatron sequence": megatron_sequence,
}
"""All baselines by name."""


def _rules(groups: Mapping[str, tuple[str, ...]]) -> LogicalAxisRules:
    return tuple((name, axes) for group, axes in groups.items() if axes for name in LOGICAL_AXES[group])


def _replicated(argument: Argument) -> PartitionSpec:
    return PartitionSpec(*[None] * len(argument.shape))


def _batch_spec(argument: Argument, mesh: BaselineMesh, axes: Sequence[str]) -> PartitionSpec:
    """Splits the leading dimension; keys and scalars belong to every device."""
    if not argument.shape or argument.is_key or not axes:
        return _replicated(argument)
    num_parts = mesh.num_parts(axes)
    if argument.shape[0] % num_parts:
        raise DoesNotApplyError(
            f"It would split the leading dimension of {argument.path}, {argument.shape[0]}, into {num_parts} parts."
        )
    return PartitionSpec(tuple(axes), *[None] * (len(argument.shape) - 1))


def _tensor_parallel_spec(argument: Argument, split: Split | None, mesh: BaselineMesh) -> PartitionSpec:
    """Splits one dimension over the inner axis; an array that it does not divide stays whole."""
    axes: list[str | None] = [None] * len(argument.shape)
    if split is not None and argument.shape[split[0]] % mesh.sizes[mesh.inner] == 0:
        axes[split[0]] = mesh.inner
    return PartitionSpec(*axes)


def _fully_sharded_state(
    shardings: BaselineShardings, arguments: Sequence[Argument], mesh: BaselineMesh, axes: Sequence[str]
) -> BaselineShardings:
    """Splits the largest free dimension that divides of each array of the state; arrays without one are left."""
    specs = [
        _with_split(spec, argument, mesh, axes) if argument.is_state else spec
        for argument, spec in zip(arguments, shardings.specs, strict=True)
    ]
    return shardings._replace(specs=tuple(specs))


def _with_split(spec: PartitionSpec, argument: Argument, mesh: BaselineMesh, axes: Sequence[str]) -> PartitionSpec:
    num_parts = mesh.num_parts(axes)
    free = [
        d
        for d, split_axes in enumerate(spec)
        if split_axes is None and argument.shape[d] and argument.shape[d] % num_parts == 0
    ]
    if not free:
        return spec
    largest = max(free, key=lambda d: argument.shape[d])
    return PartitionSpec(*(tuple(axes) if d == largest else split_axes for d, split_axes in enumerate(spec)))


def _check_two_axes(mesh: BaselineMesh, same: str) -> None:
    if not mesh.outer:
        raise DoesNotApplyError(f"On a mesh of one axis it is the same as {same}.")
