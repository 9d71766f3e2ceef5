"""The user's own code that the outer config names: a codec, a merge rule, an outer optimizer.

Nothing is imported here. The program provides code that the operator's config names, or that the
operator has allowed. Code that only a swarm's config names is never provided. docs/extending.md
describes what such code must do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from outer.config.own_code import Options
from outer.errors import InputError

T = TypeVar("T")
Claim = Callable[[T], bool]
"""A function that checks one requirement for own code. Its docstring states the requirement."""
_provided: dict[str, Callable[..., Any]] = {}


def provide(path: str, target: Callable[..., Any]) -> None:
    """Let configs of this process name `target` by its import path."""
    _provided[path] = target


def find(path: str, key: str) -> Callable[..., Any]:
    """Return the class or function that `key` of the config names by `path`. Raises InputError
    if it was not provided.
    """
    if path not in _provided:
        raise InputError(
            f"{key}: got {path!r}, which a run of others names; it is imported only if "
            "island.allow_imports allows it"
        )
    return _provided[path]


def call(path: str, key: str, options: Mapping[str, Any]) -> Any:
    """Call the object that `path` names, with the options as keyword arguments. Raises
    InputError if it does not accept them.
    """
    target = find(path, key)
    try:
        return target(**options)
    except Exception as error:
        raise InputError(
            f"{key}: {path}({', '.join(f'{name}={value!r}' for name, value in options.items())}) "
            f"failed: {type(error).__name__}: {error}"
        ) from error


def require(claims: Sequence[Claim[T]], subject: T, where: str) -> None:
    """Check each requirement. Raises InputError with the first one that does not hold. `where`
    names key and subject.
    """
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
    """Return `build` with a cache: the result for a path and options is built once, because
    every step requests it.
    """

    @cache
    def built(path: str, options: tuple[tuple[str, Any], ...]) -> T:
        return build(path, dict(options))

    return lambda path, options: built(path, tuple(sorted(options.items())))
