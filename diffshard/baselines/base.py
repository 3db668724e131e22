"""The baselines: what their rules know of arguments and mesh, what they give, and why they may not apply.

Names, shapes and flax's metadata say which dimension of a parameter Megatron splits: columns of the first of two
matrices, rows of the second. The product of a column-parallel matrix stays split, and that of the row-parallel one that
follows is summed over the devices once. Which matrix is which follows from logical axes where flax's metadata name
them, else from the words that models use, else from shapes. Dimensions are counted from the end, so that layers stacked
for a scan need no rules.

Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; experts by Lepikhin et al. (arXiv:2006.16668).

Each baseline splits state and batch by a rule that its paper states, and says how activations are split. Optimiser
moments are split as their parameters are, because their paths end alike and their shapes are equal. Without
rules for activations the compiler would split these as it finds parameters split, and FSDP would be lost.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from diffshard.plans.base import LogicalAxes, LogicalAxisRules
from diffshard.sharding_search.call import Call, is_random_key


class DoesNotApplyError(ValueError):
    """A baseline's rules do not fit a function or mesh; the message is a sentence that says why."""


class Argument(NamedTuple):
    """One array among the arguments of a function.

    Attributes:
      path: its place, for messages.
      names: the keys on the way to it, outermost first.
      shape: of the whole array.
      is_state: whether it belongs to what the function updates; all other arguments are batch.
      is_key: whether it is a random key or a part of one.
      logical_axes: the logical axis of each dimension, where flax's metadata name them; else None.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_state: bool
    is_key: bool = False
    logical_axes: tuple[str | None, ...] | None = None


class BaselineMesh(NamedTuple):
    """A mesh as baselines see it.

    Attributes:
      sizes: devices along each axis, in order.
      inner: the axis with the fastest links, along which devices are neighbours.
    """

    sizes: Mapping[str, int]
    inner: str

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes."""
        return tuple(self.sizes)

    @property
    def outer(self) -> tuple[str, ...]:
        """The other axes, along which copies of a model are."""
        return tuple(axis for axis in self.sizes if axis != self.inner)

    def num_parts(self, axes: Sequence[str]) -> int:
        """Returns into how many parts an array is split by axes."""
        return math.prod(self.sizes[axis] for axis in axes)


class BaselineShardings(NamedTuple):
    """The shardings of a baseline.

    Attributes:
      specs: for each argument how it is split.
      rules: by which mesh axes activations are split, by their logical axes.
    """

    specs: tuple[PartitionSpec, ...]
    rules: LogicalAxisRules


def describe_arguments(call: Call, is_state: Sequence[bool]) -> list[Argument]:
    """Returns the facts that baselines use about each array of the arguments of a call.

    Args:
      call: the arguments.
      is_state: for each array whether it is state.
    """
    return [
        Argument(name, keys, array.shape, state, is_random_key(array), _single_names(axes))
        for name, keys, array, state, axes in zip(
            call.paths, call.keys, call.arrays, is_state, call.logical_axes, strict=True
        )
    ]


def _single_names(axes: LogicalAxes | None) -> tuple[str | None, ...] | None:
    """Returns a name for each dimension; several mesh axes are none."""
    return None if axes is None else tuple(name if isinstance(name, str) else None for name in axes)


LOGICAL_AXES = {
    "batch": ("batch", "expert_batch", "activation_batch"),
    "heads": ("heads", "q_heads", "activation_heads"),
    "key_value_heads": ("kv_heads", "key_value_heads", "activation_kv_heads"),
    "hidden": ("mlp", "hidden", "activation_mlp"),
    "vocabulary": ("vocab", "vocabulary", "activation_vocab"),
    "experts": ("expert", "experts", "activation_exp"),
    "sequence": ("sequence", "length", "activation_length"),
}
"""What flax models call the dimensions that baselines split: those of flax's examples, T5X and MaxText."""
TENSOR_GROUPS = ("heads", "key_value_heads", "hidden", "vocabulary", "experts")
"""The groups of logical axes that Megatron splits."""

_COLUMNS = {
    "heads": ("query", "q", "q_proj", "wq", "to_q", "qkv", "qkv_proj", "c_attn"),
    "key_value_heads": ("key", "k", "k_proj", "wk", "to_k", "value", "v", "v_proj", "wv", "to_v"),
    "hidden": (
        "up", "up_proj", "gate", "gate_proj", "swish", "w1", "w3", "wi", "wi_0", "wi_1", "fc1", "c_fc", "intermediate"
    ),
    "vocabulary": ("head", "lm_head", "unembed", "logits"),
}  # fmt: skip
_ROWS = {
    "heads": ("out", "out_proj", "o", "o_proj", "to_out"),
    "hidden": ("down", "down_proj", "w2", "wo", "fc2", "c_proj"),
    "vocabulary": ("embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "token_embedding", "wte"),
}
_COLUMN_OF = {word: group for group, words in _COLUMNS.items() for word in words}
_ROW_OF = {word: group for group, words in _ROWS.items() for word in words}
_WEIGHTS = ("kernel", "w", "weight", "weights", "embedding")
_BIASES = ("bias", "b")

Split = tuple[int, str]
"""The dimension that is split, counted from the end, and the group of logical axes that it belongs to."""


def tensor_splits(
    arguments: Sequence[Argument], dimensions: Mapping[tuple[str, ...], int | None]
) -> list[Split | None]:
    """Returns for each argument the dimension that Megatron splits, or None for those that every device holds whole.

    Args:
      arguments: of the function.
      dimensions: exceptions: dimensions from the end by the last names of a path, None for what stays whole.
    """
    query_heads = {
        argument.names[:-2]: argument.shape[-2:]
        for argument in arguments
        if argument.names[-2:-1] and _COLUMN_OF.get(_layer(argument.names)) == "heads" and len(argument.shape) >= 3
    }
    splits = [_split(argument, query_heads, dimensions) for argument in arguments]
    return splits if any(splits) else _by_shape(arguments)


def _split(
    argument: Argument,
    query_heads: Mapping[tuple[str, ...], tuple[int, ...]],
    dimensions: Mapping[tuple[str, ...], int | None],
) -> Split | None:
    if not argument.is_state or not argument.shape:
        return None
    for names, dimension in dimensions.items():
        if argument.names[-len(names) :] == names:
            return None if dimension is None else (dimension, "experts" if dimension < -2 else "hidden")
    if argument.logical_axes is not None:
        return _by_logical_axes(argument.logical_axes)
    layer, rank = _layer(argument.names), len(argument.shape)
    has_heads = rank >= 3 and query_heads.get(argument.names[:-2]) is not None
    is_bias = bool(argument.names) and argument.names[-1] in _BIASES
    if group := _COLUMN_OF.get(layer):
        by_heads = has_heads and group in ("heads", "key_value_heads") and not is_bias
        return (-2 if by_heads else -1, group) if rank >= 2 or is_bias else None
    if (group := _ROW_OF.get(layer)) and rank >= 2 and not is_bias:
        by_heads = has_heads and query_heads[argument.names[:-2]] == argument.shape[-3:-1]
        return -3 if by_heads and group == "heads" else -2, group
    return None


def _by_logical_axes(logical_axes: Sequence[str | None]) -> Split | None:
    """Splits the dimension of the first group in order that has one: experts come before what they hold."""
    for group in ("experts", *TENSOR_GROUPS):
        for dimension, name in enumerate(logical_axes):
            if name in LOGICAL_AXES[group]:
                return dimension - len(logical_axes), group
    return None


def _by_shape(arguments: Sequence[Argument]) -> list[Split | None]:
    """Splits the longer of a matrix's last dimensions; layers of a list and square matrices are split in turns.

    Optimiser moments must be split as their parameters are, so turns are counted over different names.
    """
    turns: dict[tuple[str, tuple[int, ...]], int] = {}
    splits: list[Split | None] = []
    for argument in arguments:
        layer = _layer(argument.names)
        is_bias = argument.names[-1:] in [(name,) for name in _BIASES]
        if not argument.is_state or len(argument.shape) < (1 if is_bias and layer.isdigit() else 2):
            splits.append(None)
            continue
        rows, columns = argument.shape[-2:] if len(argument.shape) >= 2 else (1, 1)
        if layer.isdigit():
            is_column = int(layer) % 2 == 0
        elif rows != columns:
            is_column = columns > rows
        else:
            is_column = turns.setdefault((layer, argument.shape), len(turns)) % 2 == 0
        splits.append((-1, "hidden") if is_column else None if is_bias else (-2, "hidden"))
    return splits


def _layer(names: tuple[str, ...]) -> str:
    """Returns the word that says what a parameter does: its own name, or its layer's where it is called kernel."""
    if len(names) < 2 or names[-1] not in (*_WEIGHTS, *_BIASES):
        return names[-1] if names else ""
    group_of_word = {**_COLUMN_OF, **_ROW_OF}
    return names[-1] if names[-1] in group_of_word and names[-2] not in group_of_word else names[-2]


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
