"""Settings that name one of our parts, or the user's own code as `package.module:attribute`.
Nothing is imported here.

The text of a config may come from a swarm: outer/own_code.py checks which code the operator allows.
The form is the same as in inner/import_path.py, which this package may not import; a test compares
the two.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def is_import_path(name: str) -> bool:
    """Return whether `name` has the form package.module:attribute."""
    return _FORM.fullmatch(name) is not None


def one_of(names: Sequence[str], example: str) -> AfterValidator:
    """Return a validator of a setting that is one of `names` or an import path such as
    `example`.
    """

    def check(name: str) -> str:
        if name not in names and not is_import_path(name):
            raise ValueError(
                f"{', '.join([*names, ''])}or own code by its import path as in {example}"
            )
        return name

    return AfterValidator(check)


def _read_number(value: Any) -> Any:
    """Return a number for a text such as 1e-5, which YAML reads as text; return all other values
    unchanged.
    """
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


Options = dict[str, Annotated[bool | int | float | str | None, AfterValidator(_read_number)]]
"""Keyword arguments of own code. They are part of the run's config, and therefore of its hash."""
