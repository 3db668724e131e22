"""A call of a function: its arguments as flat arrays, and the structure that makes arguments of arrays again.

What is not an array belongs to the structure: static arguments, and leaves such as the activation function of an
Equinox module. A function with the same structure and arrays of the same types is the same program.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diffshard.plans.base import LogicalAxes
from diffshard.sharding_search.argument_names import names_by_position
from diffshard.sharding_search.logical_axes import logical_axes_of, spec_by_rules
from diffshard.sharding_search.options import Options
from diffshard.staged_array import StagedArray
from search_spaces.sharding.given import carried_spec, given_specs

ArrayType = tuple[tuple[int, ...], str, bool]
"""Shape, dtype and weakness of an array, on which the traced function depends."""


@dataclass(frozen=True)
class Structure:
    """A pytree without its arrays. Two are equal if the same arrays make equal pytrees of them.

    Attributes:
      constants: the leaves that are not arrays, with their positions among all leaves.
      types: of the constants: 1 and 1.0 are equal, but different constants.
    """

    treedef: Any
    constants: tuple[tuple[int, Any], ...]
    types: tuple[type, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(type(value) for _, value in self.constants))

    def arrays_of(self, tree: Any) -> list[Any] | None:
        """Returns the arrays of a pytree that has this structure; None if it has another."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            return None
        if not self.constants:
            return leaves
        for (position, constant), kind in zip(self.constants, self.types, strict=True):
            leaf = leaves[position]
            if leaf is not constant and (type(leaf) is not kind or leaf != constant):
                return None
        positions = {position for position, _ in self.constants}
        return [leaf for i, leaf in enumerate(leaves) if i not in positions]

    def unflatten(self, arrays: Iterable[Any]) -> Any:
        """Returns the pytree with these arrays, which may be anything."""
        if not self.constants:
            return jax.tree.unflatten(self.treedef, arrays)
        remaining, constants = iter(arrays), dict(self.constants)
        leaves = [constants[i] if i in constants else next(remaining) for i in range(self.treedef.num_leaves)]
        return jax.tree.unflatten(self.treedef, leaves)

    def unflatten_beside_constants(self, arrays: Iterable[Any]) -> Any:
        """Returns the pytree with these in place of arrays, None in that of constants, and static arguments kept."""
        constants = tuple((i, value if isinstance(value, Static) else None) for i, value in self.constants)
        return Structure(self.treedef, constants).unflatten(arrays)


@dataclass(frozen=True)
class Static:
    """A static argument, which is one leaf of a call whatever it is made of."""

    value: Any
    kind: type = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.value))


@dataclass(frozen=True)
class Call:
    """The arguments of a call. Tuples have an entry for each array, in the order of the flat arguments.

    Attributes:
      structure: of the positional arguments and the keyword arguments, a tuple and a dictionary.
      parameters: the names of the arguments in order, the static ones included.
      paths: a name of the array: the parameter's, then the place inside.
      keys: the keys of the place inside, as text.
      donated: whether its memory may be used for results.
      given: the spec that the user wants, else the one that the array has already, or None.
      logical_axes: the names of its dimensions by flax's metadata, or None.
    """

    structure: Structure
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[str, ...]
    numbers: tuple[int, ...]
    paths: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    donated: tuple[bool, ...]
    given: tuple[PartitionSpec | NamedSharding | None, ...]
    logical_axes: tuple[LogicalAxes | None, ...]


def split(tree: Any) -> tuple[list[Any], Structure]:
    """Returns the arrays of a pytree, and its structure.

    Arrays are what `jax.jit` takes: Python's numbers, too. In an Equinox module numbers are constants, as they are for
    `equinox.filter_jit`.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays, constants = [], []
    for i, ((path, leaf), is_array) in enumerate(zip(entries, are_arrays(tree), strict=True)):
        if is_array:
            arrays.append(leaf)
            continue
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"The leaf {jax.tree_util.keystr(path)} is {leaf!r}, which is neither an array nor hashable, so it can "
                "be neither traced nor a constant. Make it an array, or a static argument that has a hash."
            ) from None
        constants.append((i, leaf))
    return arrays, Structure(treedef, tuple(constants))


def jax_settings() -> tuple[bool, str | None]:
    """Returns the settings of JAX on which what is traced and compiled depends, besides the call."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


def abstract_split(tree: Any) -> tuple[list[jax.ShapeDtypeStruct], Structure]:
    """Returns shapes and dtypes of the arrays of a pytree, and its structure."""
    arrays, structure = split(tree)
    return [abstract_array(array) for array in arrays], structure


def array_paths(name: str, tree: Any) -> tuple[str, ...]:
    """Returns the path of each array of a pytree that has a name."""
    entries = zip(jax.tree_util.tree_leaves_with_path(tree), are_arrays(tree), strict=True)
    return tuple(f"{name}{jax.tree_util.keystr(path)}" for (path, _), is_array in entries if is_array)


def bound_arguments(options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns arguments by position as far as the function has positions for them, and static ones as `Static`."""
    args, kwargs = tuple(args), dict(kwargs)
    if kwargs:
        signature = options.signature
        if signature is not None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{options.function_name} does not take these arguments: {error}.") from None
            args, kwargs = bound.args, bound.kwargs
        kwargs = {k: _static(k, v) if options.is_static_name(k) else v for k, v in kwargs.items()}
    if options.static_argnums:
        names = names_by_position(options.signature, len(args))
        numbered = enumerate(zip(names, args, strict=True))
        args = tuple(_static(name, a) if i in options.static_argnums else a for i, (name, a) in numbered)
    return args, kwargs


def plain(argument: Any) -> Any:
    """Returns an argument as the function takes it, where a static one is wrapped."""
    return argument.value if isinstance(argument, Static) else argument


def call_of(options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns a call with arguments that are arrays or `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: the function does not take these arguments, or a leaf is neither an array nor hashable.
      ValueError: a donated or static position is beyond the last argument, or a given sharding does not fit.
    """
    num_positions = max(len(args) + len(kwargs), len(options.positional_names))
    args, kwargs = bound_arguments(options, args, kwargs)
    for name, numbers in (("donate_argnums", options.donate_argnums), ("static_argnums", options.static_argnums)):
        if any(n >= num_positions for n in numbers):
            raise ValueError(f"`{name}` {numbers} names a position that the {num_positions} arguments do not have.")
    kwargs = {name: kwargs[name] for name in sorted(kwargs)}  # as the leaves of a dictionary are ordered
    parameters, arguments = (*names_by_position(options.signature, len(args)), *kwargs), (*args, *kwargs.values())
    donated = [*(i in options.donate_argnums for i in range(len(args))), *map(options.is_donated_name, kwargs)]
    specs = given_specs(options.in_shardings, [a for a in args if not isinstance(a, Static)])
    _, structure = split((args, kwargs))
    leaves: list[_Leaf] = []
    for number, argument in enumerate(arguments):
        leaves += _leaves_of(number, argument)
    specs += [None] * (len(leaves) - len(specs))
    kept = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if leaf.is_array]
    paths = [f"{parameters[leaf.number]}{jax.tree_util.keystr(leaf.path)}" for leaf, _ in kept]
    if options.metadata_rules is not None:
        kept = [
            (leaf, spec_by_rules(leaf.logical_axes, options.metadata_rules, options.given_names, path))
            if spec is None and leaf.logical_axes is not None
            else (leaf, spec)
            for (leaf, spec), path in zip(kept, paths, strict=True)
        ]
    return Call(
        structure=structure,
        arrays=tuple(abstract_array(leaf.value) for leaf, _ in kept),
        parameters=parameters,
        numbers=tuple(leaf.number for leaf, _ in kept),
        paths=tuple(paths),
        keys=tuple(_key_names(leaf.path) for leaf, _ in kept),
        donated=tuple(donated[leaf.number] for leaf, _ in kept),
        given=tuple(_carried(leaf.value, options) if spec is None else spec for leaf, spec in kept),
        logical_axes=tuple(leaf.logical_axes for leaf, _ in kept),
    )


def _carried(leaf: Any, options: Options) -> PartitionSpec | None:
    """Returns the spec that an array has on the mesh; None while the mesh is not chosen."""
    return None if options.candidates else carried_spec(leaf, options.mesh)


def abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type of an array, a `jax.ShapeDtypeStruct` or a Python number."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | StagedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def is_random_key(array: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an array is a random key: of JAX's own type, or the two words of an old-style one."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or (array.dtype == jnp.uint32 and array.shape == (2,))


def check_rows(paths: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raises `ValueError` if all arrays of a batch have the leading dimension 0; names the first one."""
    if arrays and not any(array.shape[0] for array in arrays):
        raise ValueError(
            f"The batch must have rows, but `{paths[0]}` has the shape {arrays[0].shape}. Give arguments of the shapes "
            "that steps will have."
        )


def array_types(leaves: Iterable[Any]) -> tuple[ArrayType, ...]:
    """Returns shape, dtype and weakness of each array."""
    arrays = map(abstract_array, leaves)
    return tuple((a.shape, str(a.dtype), a.weak_type) for a in arrays)


class _Leaf(NamedTuple):
    """A leaf of an argument, with its place among the arguments and inside this one."""

    number: int
    path: Any
    value: Any
    is_array: bool
    logical_axes: LogicalAxes | None


def _leaves_of(number: int, argument: Any) -> list[_Leaf]:
    """Returns the leaves of an argument; a static one has none."""
    if isinstance(argument, Static):
        return []
    entries = jax.tree_util.tree_leaves_with_path(argument)
    return [
        _Leaf(number, path, leaf, is_array, axes)
        for (path, leaf), is_array, axes in zip(entries, are_arrays(argument), logical_axes_of(argument), strict=True)
    ]


def are_arrays(tree: Any) -> list[bool]:
    """Returns for each leaf whether it is an array."""
    equinox = sys.modules.get("equinox")  # there are such modules only where it is imported
    if equinox is None:
        return [_is_array(leaf) for leaf in jax.tree.leaves(tree)]
    flags: list[bool] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, equinox.Module)):
        is_number_array = not isinstance(part, equinox.Module)
        flags += [_is_array(leaf, is_number_array) for leaf in jax.tree.leaves(part)]
    return flags


def _is_array(leaf: Any, is_number_array: bool = True) -> bool:
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return is_number_array
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | StagedArray)


def _key_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the keys of a path as text, without the attribute in which flax keeps what a variable holds."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    is_attribute = bool(path) and not isinstance(path[-1], jax.tree_util.DictKey | jax.tree_util.SequenceKey)
    return tuple(names[:-1] if is_attribute and names[-1] == "value" else names)


def _static(name: str, value: Any) -> Static:
    """Returns a static argument; raises `TypeError` if it has no hash, by which its plan could be found again."""
    try:
        hash(value)
    except TypeError:
        if any(_is_array(leaf, is_number_array=False) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"`{name}` has arrays, which cannot be static: a static argument is a constant. Leave it out of "
                "`static_argnums` and `static_argnames`."
            ) from None
        raise TypeError(
            f"`{name}` is static and must be hashable, which {value!r} is not. Give a tuple in place of a list."
        ) from None
    return Static(value)
