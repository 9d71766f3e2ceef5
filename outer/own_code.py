"""Imports code of the user's own that the outer config names: a codec, a merge rule, an outer optimizer.

outer/config/own_code.py has the form of the names, docs/extending.md what such code must do.
"""

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from outer.errors import InputError

_allowed: set[str] = set()


def allow(*paths: str) -> None:
    """Let `load` import these in this process: they stand in a config of the operator, or the operator allowed them."""
    _allowed.update(paths)


def load(path: str, key: str) -> Callable[..., Any]:
    """Import the class or function that `key` of the config names by `path`, which was allowed before.

    Raises InputError. Nothing that a swarm's config alone names is imported.
    """
    where = f"{key}: got {path!r}"
    if path not in _allowed:
        raise InputError(f"{where}, code that a run of others names; it is not imported here (island.allow_imports)")
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{where}; there is no module {error.name!r} here; install its package into this environment, or add the "
            "folder that has it to PYTHONPATH"
        ) from error
    except Exception as error:
        raise InputError(f"{where}; importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(found := getattr(module, name, None)):
        callables = [each for each, value in vars(module).items() if callable(value)]
        near = get_close_matches(name, callables, n=1, cutoff=0.0)
        hint = f"the nearest name is {module_name}:{near[0]}" if near else "it has none"
        raise InputError(f"{where}; allowed: a class or function of {module_name}; {hint}")
    return found


def call(path: str, key: str, options: Mapping[str, Any]) -> Any:
    """Call what `path` names with the options as keyword arguments. Raises InputError if it does not take them."""
    target = load(path, key)
    try:
        return target(**options)
    except Exception as error:
        raise InputError(
            f"{key}: {path}({', '.join(f'{name}={value!r}' for name, value in options.items())}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error
