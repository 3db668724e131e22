"""Changes that a function makes to its arguments in place: a traced function gets copies, so that they are lost.

Modules of flax's nnx are such arguments, and dictionaries.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from diffshard.sharding_search.call import Structure

ReportLostChanges = Callable[[str], None]
"""What is done with the sentence that says which changes are lost: a warning, or an error."""


def lost_changes(
    structure: Structure, names: Sequence[str], before: Sequence[Any], arguments: Any, results: Sequence[Any]
) -> list[str]:
    """Returns the names of arguments into which a function has put other arrays that it does not return.

    Args:
      structure: of the arguments.
      names: for each array of the arguments the name of its argument.
      before: the arrays that were in the arguments when the function was called.
      arguments: what the function was called with, afterwards.
      results: the arrays that it returned.
    """
    after = structure.arrays_of(arguments)
    returned = {id(array) for array in results}
    lost = (
        name
        for name, old, new in zip(names, before, before if after is None else after, strict=True)
        if new is not old and id(new) not in returned
    )
    return list(dict.fromkeys(lost))


def in_words(function_name: str, lost: Sequence[str]) -> str:
    """Returns the sentence that says which changes of a function are lost."""
    names = " and ".join(f"`{name}`" for name in lost)
    return f"{function_name} changes {names} in place, and these changes are lost, as under `jax.jit`."


def warn_of_lost_changes(sentence: str) -> None:
    """Warns of changes that are lost, and says what to do."""
    warnings.warn(
        f"{sentence} Return the new state, or use `diffshard.nnx.search` for modules of flax's nnx.", stacklevel=2
    )
