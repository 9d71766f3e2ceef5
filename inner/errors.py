"""Errors of an island's training."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """The user's config or data cannot be used. The message says what, where, got, allowed, and the
    cure.
    """


def nearest_multiples(value: int, unit: int) -> str:
    """Return a text with the multiples of `unit` nearest to a value that is not one, for example
    `8192 or 12288`.
    """
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def summarise(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, cut to 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextmanager
def refused(complaint: str, cure: str = "write it again or remove it") -> Iterator[None]:
    """Turn every exception inside the block into InputError. Files from other people break
    libraries in many ways.

    A panic of Rust is not an Exception, but is turned into InputError, too. An interrupt and an
    exit are not.
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
