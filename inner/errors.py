"""Errors of an island's training."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """The user's config or data cannot be used. The message says what, where, got, allowed, and the cure."""


def nearest_multiples(value: int, unit: int) -> str:
    """Text with the multiples of `unit` next to a value that is not one, for example `8192 or 12288`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def summarise(error: BaseException) -> str:
    """Type of an error and the first line of its text, at most 300 characters of it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextmanager
def refused(complaint: str, cure: str = "write it again or remove it") -> Iterator[None]:
    """Turn whatever is raised within into InputError: what others have written breaks libraries in many ways.

    A panic of Rust is no Exception, and is turned too; an interrupt and an exit pass.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{complaint}: {summarise(error)}; {cure}") from error


class TrainingStopped(RuntimeError):
    """The island stops because too many consecutive steps were non-finite."""
