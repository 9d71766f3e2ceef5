"""Own code by import path, `package.module:attribute`: its form, how it is imported, and the hash
of its file.

A config may name code in this form wherever it may name a built-in part, for example in
`optimizer.name`. Nothing is imported when a config is read, because the config may come from a
swarm. No torch here.
"""

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator

from inner.errors import InputError, summarise

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def is_import_path(name: str) -> bool:
    """Return whether `name` has the form package.module:attribute."""
    return _FORM.fullmatch(name) is not None


def one_of(names: Sequence[str], example: str) -> AfterValidator:
    """Return a validator for a setting that is one of `names` or an import path such as
    `example`.
    """

    def check(name: str) -> str:
        if name not in names and not is_import_path(name):
            ours = "".join(f"{each}, " for each in names) + ("or " if names else "")
            raise ValueError(f"{ours}own code by its import path as in {example}")
        return name

    return AfterValidator(check)


def _read_number(value: Any) -> Any:
    """Convert a text such as 1e-5, which YAML does not read as a number; return all other values
    unchanged.
    """
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


Scalar = bool | int | float | str | None
Options = dict[str, Annotated[Scalar | list[Scalar], AfterValidator(_read_number)]]
"""Settings of own code: plain values and lists of them. They are part of the run's config, and so
of its hash.
"""


def load(path: str, key: str) -> Callable[..., Any]:
    """Import the class or function that `path` names. `key` is the setting with that path.

    It must be defined in the package that the path names: permission to import a package does not
    cover other packages that it has imported. Raises InputError.
    """
    where = f"{key}: got {path!r}"
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{where}; there is no module {error.name!r} here; install its package into this "
            "environment, or add the "
            "folder that contains it to PYTHONPATH"
        ) from error
    except Exception as error:
        raise InputError(f"{where}; importing {module_name} failed: {summarise(error)}") from error
    package = module_name.partition(".")[0]
    own = {
        each: value
        for each, value in vars(module).items()
        if callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] == package
    }
    if name not in own:
        near = get_close_matches(name, own, n=1, cutoff=0.0)
        hint = f"the nearest name is {module_name}:{near[0]}" if near else "it has none"
        raise InputError(
            f"{where}; allowed: a class or function that {package} defines in {module_name}; {hint}"
        )
    return own[name]


def call_text(target: Callable[..., Any]) -> str:
    """Return name and parameters of a class or function, for messages."""
    try:
        return f"{target.__name__}{inspect.signature(target)}"
    except ValueError:  # Some builtins have no signature.
        return target.__name__


def source_sha256(path: str, key: str) -> str:
    """Return the SHA-256 of the file that defines the code at `path`, in hexadecimal digits. Raises
    InputError.
    """
    target = load(path, key)
    file = inspect.getsourcefile(target)
    if file is None:
        raise InputError(
            f"{key}: got {path!r}, which has no source file; name code that is written in Python"
        )
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
