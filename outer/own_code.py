"""Code of the user's own that the outer config names: a codec, a merge rule, an outer optimizer.

Nothing is imported here. The program provides what a config of the operator names, or what the operator has allowed;
what only a swarm's config names is never there. docs/extending.md says what such code must do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from outer.config.own_code import Options
from outer.errors import InputError

T = TypeVar("T")
Claim = Callable[[T], bool]
"""Tries one thing that own code must do, which its docstring says."""
_provided: dict[str, Callable[..., Any]] = {}


def provide(path: str, target: Callable[..., Any]) -> None:
    """Let configs of this process name `target` by its import path."""
    _provided[path] = target


def find(path: str, key: str) -> Callable[..., Any]:
    """The class or function that `key` of the config names by `path`. Raises InputError if nobody has provided it."""
    if path not in _provided:
        raise InputError(
            f"{key}: got {path!r}, code that a run of others names; it is not imported here (island.allow_imports)"
        )
    return _provided[path]


def call(path: str, key: str, options: Mapping[str, Any]) -> Any:
    """Call what `path` names with the options as keyword arguments. Raises InputError if it does not take them."""
    target = find(path, key)
    try:
        return target(**options)
    except Exception as error:
        raise InputError(
            f"{key}: {path}({', '.join(f'{name}={value!r}' for name, value in options.items())}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def require(claims: Sequence[Claim[T]], subject: T, where: str) -> None:
    """Try each claim. Raises InputError with the first that does not hold; `where` names key and subject."""
    for claim in claims:
        try:
            holds = claim(subject)
        except Exception as error:
            raise InputError(f"{_say(claim, where)}; {type(error).__name__}: {error}") from error
        if not holds:
            raise InputError(f"{_say(claim, where)}; it does not hold")


def _say(claim: Claim[T], where: str) -> str:
    return f"{where} must do this: {' '.join((claim.__doc__ or '').split())!r}"


def once(build: Callable[[str, Options], T]) -> Callable[[str, Options], T]:
    """`build`, whose result for a path and options is made once and kept: a step asks for it each time."""

    @cache
    def built(path: str, options: tuple[tuple[str, Any], ...]) -> T:
        return build(path, dict(options))

    return lambda path, options: built(path, tuple(sorted(options.items())))
