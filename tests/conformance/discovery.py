"""Finds every module with an `EXAMPLE`, so that a new file is held to the rules without being listed anywhere."""

import importlib
import pkgutil
from types import ModuleType


def examples(package: ModuleType) -> list[ModuleType]:
    """The modules below a package that have an `EXAMPLE`: a function without arguments that makes a small instance."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    return [module for module in modules if "EXAMPLE" in vars(module)]
