"""Which options of `search` do not go together, why, and what to write instead; `docs/pairs.md` shows them all."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_BY_SECONDS = "compares plans by the seconds of a step, which an objective replaces"


class RefusedPair(NamedTuple):
    """Two options of `search` that cannot be given together.

    Attributes:
      one, other: as they are written, `check="compile"` for one value of an option.
      reason: why, and what to write instead; the end of a sentence.
    """

    one: str
    other: str
    reason: str


REFUSED_PAIRS = (
    RefusedPair("objective", "pipeline", f"a pipeline {_BY_SECONDS}"),
    RefusedPair("objective", "remat", f"the search for what is computed again {_BY_SECONDS}; use `jax.checkpoint`"),
    RefusedPair("objective", 'check="compile"', f"a compiler {_BY_SECONDS}"),
    RefusedPair("objective", "cache", "a file cannot tell one function from another; use `Plan.save` and `start`"),
    RefusedPair("formats", "pipeline", "the stages of a pipeline keep the formats of the step"),
    RefusedPair("formats", "remat", "what is computed again is not measured; use `jax.checkpoint`"),
    RefusedPair("formats", "check", "formats change results by more than rounding, and are compiled for one executor"),
    RefusedPair("formats", 'executor="constraints"', "only programs round the operands of products"),
    RefusedPair("formats", 'executor="propagation"', "only programs round the operands of products"),
    RefusedPair("formats", "objective", f"a limit on the loss {_BY_SECONDS}"),
    RefusedPair("state", "pipeline", "the stages of a pipeline keep their state; they can offload residuals"),
    RefusedPair("state", 'check="compile"', "programs in other processes do not say what is in the host's memory"),
    RefusedPair("state", "formats", "updates run in another order where formats are measured"),
    RefusedPair("pipeline", 'executor="propagation"', "a stage has nothing that its numbers can be held against"),
)


def check_pairs(given: Mapping[str, Any]) -> None:
    """Raises `ValueError` if two options are given that do not go together; the error names both, and says why.

    Args:
      given: options of `search` by name; None and empty ones are not given.
    """
    empty = {name for name, value in given.items() if isinstance(value, tuple | list | np.ndarray) and not len(value)}
    names = {name for name, value in given.items() if value is not None} - empty
    for name in list(names):  # some values are refused alone, as in `check="compile"`
        values = given[name] if isinstance(given[name], tuple | list) else (given[name],)
        names |= {f'{name}="{value}"' for value in values if isinstance(value, str)}
    for one, other, reason in REFUSED_PAIRS:
        if {one, other} <= names:
            raise ValueError(f"`{one}` cannot be given together with `{other}`: {reason}.")
