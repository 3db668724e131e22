"""Estimators by name: each file of the folder `estimators` is one, and its name is the file's."""

import importlib
import pkgutil
from collections.abc import Callable

from diffshard.bilevel_search import estimators
from diffshard.bilevel_search.base import Estimator, Increase


def estimator_names() -> tuple[str, ...]:
    """Returns the names of all estimators, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(estimators.__path__)))


def resolve(estimator: str | Estimator | Increase) -> Estimator:
    """Returns the estimator of a name or of a function; with a function, training runs the exact choice.

    Raises:
      ValueError: no estimator has this name.
    """
    if isinstance(estimator, Estimator):
        return estimator
    if callable(estimator):
        return Estimator(estimator)
    names = estimator_names()
    if not isinstance(estimator, str) or estimator not in names:
        raise ValueError(f"`estimator` must be one of {', '.join(names)}, or a function; got {estimator!r}.")
    make: Callable[[], Estimator] = importlib.import_module(f"{estimators.__name__}.{estimator}").EXAMPLE
    return make()
