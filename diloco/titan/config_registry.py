"""All configs of torchtitan's own models, by their names, with islands: for `--module diloco.titan`."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType

import torchtitan.models  # pyright: ignore[reportMissingImports]

from diloco.titan.trainer import Config, with_islands


def __getattr__(name: str) -> Callable[[], Config]:
    """Return torchtitan's config function of this name, whose config gets islands."""
    if not name.startswith("_"):
        for registry in load_registries(name):
            if callable(found := getattr(registry, name, None)):
                return wraps(found)(lambda: with_islands(found()))
    raise AttributeError(f"torchtitan has no config {name!r}")


def __dir__() -> list[str]:
    """Return the names of all config functions, which torchtitan shows if it does not find one."""
    functions = (
        name
        for registry in load_registries()
        for name, value in vars(registry).items()
        if getattr(value, "__module__", "") == registry.__name__ and name[0].islower()
    )
    return sorted(functions)


def load_registries(config: str = "") -> Iterator[ModuleType]:
    """Yield the registries of torchtitan's models, first of those with whose name the config's begins.

    A registry that needs a package which is not installed is left out.
    """
    models = [found.name for found in pkgutil.iter_modules(torchtitan.models.__path__)]
    for model in sorted(models, key=lambda model: not config.startswith(model)):
        try:
            yield importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:
            continue
