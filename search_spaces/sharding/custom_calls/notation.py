"""Sharding rules as text, in the notation that einops, `custom_partitioning` and Shardy share.

Each dimension of each array has the name of a factor, and dimensions that are split alike have the same name:
`"b s d, d k -> b s k"`. A dimension of several factors stands in brackets, the major one first: `"b (h g) -> b h g"`.
`...` stands for any number of dimensions, which all arrays with a `...` share.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod

from search_spaces.sharding.base import Rule
from search_spaces.sharding.rules import Factors, Mark, rule_from_factors

REDUCTION_KINDS = ("sum", "max", "min")
"""What may combine partial results."""
ELLIPSIS = "..."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIMENSION = re.compile(rf"\.\.\.|{_NAME.pattern}|\((?:\s*{_NAME.pattern}\s*)+\)")

NamedDimensions = tuple[tuple[str, ...], ...]
"""For each dimension of an array the names of its factors, major to minor."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class NamedRule:
    """A sharding rule by names of factors.

    Attributes:
      operands, results: for each array, for each dimension, its factors; `("...",)` stands for any number of them.
      reduction: pairs of a factor whose splitting leaves partial results, and what combines them: "sum", "max", "min".
      whole: factors that must not be split (Shardy's need-replication factors).
    """

    operands: tuple[NamedDimensions, ...]
    results: tuple[NamedDimensions, ...]
    reduction: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()

    def __str__(self) -> str:
        sides = (", ".join(_written(array) for array in arrays) for arrays in (self.operands, self.results))
        return " -> ".join(sides)

    @property
    def combine(self) -> str:
        """The reduction that combines partial results; "sum" where there are none."""
        return self.reduction[0][1] if self.reduction else "sum"

    def sizes(
        self, operands: Sequence[Shape], results: Sequence[Shape] = (), known: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Returns the size of each factor for arrays of some shapes.

        The factors that `...` stands for are named `...0`, `...1` and so on. The sizes of a bracket's factors follow
        from other arrays, but for one factor, which gets what remains.

        Args:
          results: the shape of each result; may be left out.
          known: sizes of factors that shapes do not tell.
        """
        self._check_counts(operands, results)
        sizes: dict[str, int] = dict(known or {})
        brackets: list[tuple[tuple[str, ...], int, str]] = []
        for array, dimensions, shape in self._arrays(operands, results):
            names = self._expanded(dimensions, shape, array)
            for d, ((factor, *others), size) in enumerate(zip(names, shape, strict=True)):
                where = f"dimension {d} of {array}, of shape {shape}"
                if others:
                    brackets.append(((factor, *others), size, where))
                elif sizes.setdefault(factor, size) != size:
                    raise ValueError(
                        f"`rule` {str(self)!r} says that {factor!r} has one size everywhere, but it is "
                        f"{sizes[factor]} elsewhere and {size} in {where}."
                    )
        self._solve_brackets(brackets, sizes)
        self._check_ellipses(operands, results)
        return sizes

    def rule(self, operands: Sequence[Shape], results: Sequence[Shape], known: Mapping[str, int] | None = None) -> Rule:
        """Returns the rule of an operation on whole arrays; arguments and errors are those of `sizes`.

        Factors that only results have stay whole, as a part of an operand does not say how much of them to make.
        """
        sizes = self.sizes(operands, results, known)
        reduced, factors = {name for name, _ in self.reduction}, Factors()
        of_operands = {name for d, s in zip(self.operands, operands, strict=True) for name in _names(d, s)}
        number = {
            name: factors.new(
                size,
                Mark.NEED_REPLICATION
                if _as_given(name) in self.whole or name not in of_operands
                else Mark.REDUCTION if _as_given(name) in reduced else Mark.NONE,
            )
            for name, size in sizes.items()
        }  # fmt: skip

        def dims(array: str, dimensions: NamedDimensions, shape: Shape) -> list[list[int]]:
            return [[number[name] for name in names] for names in self._expanded(dimensions, shape, array)]

        arrays = [dims(*entry) for entry in self._arrays(operands, results)]
        return rule_from_factors(
            factors, arrays[: len(operands)], arrays[len(operands) :], reduction_is_sum=self.combine == "sum"
        )

    def name_of_dimension(self, operands: Sequence[Shape], specs: Sequence[Sequence[Sequence[int]]]) -> str:
        """Returns the name of the first dimension of operands of some shapes that their specs split, as in the rule."""
        for (array, dimensions, shape), spec in zip(self._arrays(operands, ()), specs, strict=True):
            for names, axes in zip(self._expanded(dimensions, shape, array), spec, strict=True):
                if axes:
                    return _written((names,))
        return ""

    def result_shapes(self, operands: Sequence[Shape], whole_sizes: Mapping[str, int]) -> list[Shape]:
        """Returns the shapes that the results must have for some operands; raises `ValueError` as `sizes`."""
        sizes = {**whole_sizes, **self.sizes(operands)}
        extra = sum(name.startswith(ELLIPSIS) for name in sizes)
        return [
            tuple(prod(sizes[name] for name in names) for names in _with_ellipsis(array, extra))
            for array in self.results
        ]

    def with_batch(self, is_mapped: Sequence[bool]) -> "NamedRule":
        """Returns the rule of the function under `jax.vmap`: mapped operands and all results begin with it."""
        taken = {name for array in (*self.operands, *self.results) for names in array for name in names}
        name = next(name for i in count() if (name := f"vmap_{i}") not in taken)
        operands = tuple(
            ((name,), *array) if mapped else array for array, mapped in zip(self.operands, is_mapped, strict=True)
        )
        return replace(self, operands=operands, results=tuple(((name,), *array) for array in self.results))

    def _arrays(self, operands: Sequence[Shape], results: Sequence[Shape]) -> list[tuple[str, NamedDimensions, Shape]]:
        """Returns a name, the dimensions and the shape of each array."""
        pairs = [("operand", i, d, s) for i, (d, s) in enumerate(zip(self.operands, operands, strict=True))]
        pairs += [("result", i, d, s) for i, (d, s) in enumerate(zip(self.results, results, strict=False))]
        return [(f"{side} {i}", dimensions, tuple(shape)) for side, i, dimensions, shape in pairs]

    def _check_counts(self, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        for side, expected, came in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(came) != len(expected) and (came or side == "operand"):
                raise ValueError(
                    f"`rule` {str(self)!r} is for {len(expected)} {side}s, but the function has {len(came)}, of shapes "
                    f"{list(map(tuple, came))}."
                )

    def _check_ellipses(self, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        arrays = [entry for entry in self._arrays(operands, results) if (ELLIPSIS,) in entry[1]]
        counts = {array: len(shape) - len(dimensions) + 1 for array, dimensions, shape in arrays}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"`rule` {str(self)!r} has '...' for equally many dimensions of each array, but these stand for it: "
                f"{counts}."
            )

    def _expanded(self, dimensions: NamedDimensions, shape: Shape, array: str) -> NamedDimensions:
        """Returns the dimensions with a name for each that `...` stands for."""
        has_ellipsis = (ELLIPSIS,) in dimensions
        extra = len(shape) - (len(dimensions) - has_ellipsis)
        if extra < 0 or (extra and not has_ellipsis):
            at_least = "at least " if has_ellipsis else ""
            raise ValueError(
                f"`rule` {str(self)!r} gives {array} {at_least}{len(dimensions) - has_ellipsis} dimensions "
                f"({_written(dimensions)!r}), but its shape is {shape}."
            )
        return _with_ellipsis(dimensions, extra)

    def _solve_brackets(self, brackets: Sequence[tuple[tuple[str, ...], int, str]], sizes: dict[str, int]) -> None:
        """Adds the sizes of factors that occur in brackets only."""
        waiting = list(brackets)
        while waiting:
            solvable = [b for b in waiting if _is_solvable(b[0], b[1], sizes)]
            if not solvable:
                names, _, where = waiting[0]
                unknown = [name for name in names if name not in sizes]
                raise ValueError(
                    f"`rule` {str(self)!r} does not say the sizes of {unknown} in {where}: all but one of a bracket's "
                    "factors must be a dimension elsewhere, of another size than 0."
                )
            for bracket in solvable:
                waiting.remove(bracket)
                names, size, where = bracket
                known = prod(sizes[name] for name in names if name in sizes)
                unknown = [name for name in names if name not in sizes]
                if (size % known if known else size) or (not unknown and size != known):
                    sizes_here = {name: sizes[name] for name in names if name in sizes}
                    raise ValueError(
                        f"`rule` {str(self)!r} divides {where} into {sizes_here}, which does not give {size}."
                    )
                sizes.update((name, size // known) for name in unknown)


def parse_rule(text: str, reduction: Mapping[str, str] | None = None, whole: Iterable[str] = ()) -> NamedRule:
    """Reads a rule such as `"b s h d, b t h d, b t h d -> b s h d"`.

    Args:
      reduction: for each factor whose splitting leaves partial results what combines them: "sum", "max" or "min".
    """
    if not isinstance(text, str):
        raise TypeError(f"`rule` must be a string such as 'm k, k n -> m n', not {text!r}.")
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"`rule` must have operands, one '->' and results, as 'm k, k n -> m n' has, not {text!r}.")
    operands, results = (tuple(_parse_array(array, text) for array in side.split(",")) for side in sides)
    if not sides[0].strip():
        operands = ()
    names = {name for array in (*operands, *results) for factors in array for name in factors}
    reduction, whole = dict(reduction or {}), frozenset(whole)
    for argument, given in (("reduction", reduction.keys()), ("need_replication", whole)):
        if unknown := sorted(set(given) - names):
            raise ValueError(f"`{argument}` names {unknown}, but `rule` {text!r} has only the factors {sorted(names)}.")
    _check_reduction(reduction, whole, results, text)
    return NamedRule(operands, results, tuple(sorted(reduction.items())), whole)


def _check_reduction(
    reduction: Mapping[str, str], whole: frozenset[str], results: Sequence[NamedDimensions], text: str
) -> None:
    if unknown := sorted(set(reduction.values()) - set(REDUCTION_KINDS)):
        raise ValueError(f"`reduction` must be made of {REDUCTION_KINDS}, not {unknown}.")
    if len(set(reduction.values())) > 1:
        raise ValueError(f"`reduction` must combine all factors of a kernel alike, not by {dict(reduction)}.")
    if both := sorted(reduction.keys() & whole):
        raise ValueError(f"`need_replication` and `reduction` both name {both}; a factor that is whole is not reduced.")
    everywhere = [f for f in reduction if all(any(f in dim for dim in array) for array in results)]
    if everywhere:
        raise ValueError(
            f"`reduction` names {everywhere}, but every result of `rule` {text!r} still has that dimension."
        )


def _parse_array(text: str, rule: str) -> NamedDimensions:
    rest = _DIMENSION.sub("", text).strip()
    if rest:
        raise ValueError(
            f"`rule` {rule!r} has {rest!r} in {text.strip()!r}; dimensions are names, brackets with names, or '...', "
            "separated by spaces."
        )
    dimensions = tuple(tuple(d.strip("()").split()) for d in _DIMENSION.findall(text))
    names = [name for factors in dimensions for name in factors]
    if len(set(names)) != len(names):
        raise ValueError(f"`rule` {rule!r} names a factor twice in {text.strip()!r}; each dimension has its own.")
    return dimensions


def _is_solvable(names: Sequence[str], size: int, sizes: Mapping[str, int]) -> bool:
    """Returns whether the sizes of a bracket's other factors give that of the last one, or contradict its size."""
    known = prod(sizes[name] for name in names if name in sizes)
    num_unknown = sum(name not in sizes for name in names)
    return num_unknown == 0 or (num_unknown == 1 and (known != 0 or size != 0))


def _with_ellipsis(dimensions: NamedDimensions, extra: int) -> NamedDimensions:
    if (ELLIPSIS,) not in dimensions:
        return dimensions
    place = dimensions.index((ELLIPSIS,))
    return (*dimensions[:place], *((f"{ELLIPSIS}{i}",) for i in range(extra)), *dimensions[place + 1 :])


def _names(dimensions: NamedDimensions, shape: Shape) -> set[str]:
    extra = len(shape) - len(dimensions) + 1
    return {name for names in _with_ellipsis(dimensions, extra) for name in names}


def _as_given(name: str) -> str:
    """Returns the name in the rule: `...` for each dimension that it stands for."""
    return ELLIPSIS if name.startswith(ELLIPSIS) else name


def _written(dimensions: NamedDimensions) -> str:
    return " ".join(factors[0] if len(factors) == 1 else f"({' '.join(factors)})" for factors in dimensions)
