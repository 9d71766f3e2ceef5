"""All configs of torchtitan's own models by name, with islands: for `--module diloco.titan`."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType

import torchtitan.models  # pyright: ignore[reportMissingImports]
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from diloco.titan.trainer import with_islands


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Return torchtitan's config function of this name, whose config gets islands.

    Raises ImportError if there is none and a registry cannot be imported.
    """
    failed: dict[str, str] = {}
    if not name.startswith("_"):
        for registry in load_registries(name, failed):
            if callable(found := getattr(registry, name, None)):
                return wraps(found)(lambda: with_islands(found()))
    if failed:
        causes = "; ".join(f"{model}: {cause}" for model, cause in failed.items())
        raise ImportError(
            f"{name!r} is no config of torchtitan, or of a model that cannot be imported: {causes}"
        )
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


def load_registries(name: str = "", failed: dict[str, str] | None = None) -> Iterator[ModuleType]:
    """Yield the registries of torchtitan's models, first that of a model with which `name` begins.

    `failed` gets the models whose registries cannot be imported, with the cause.
    """
    models = [found.name for found in pkgutil.iter_modules(torchtitan.models.__path__)]
    for model in sorted(models, key=lambda model: not name.startswith(model)):
        try:
            yield importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError as error:
            if failed is not None:
                failed[model] = str(error)
