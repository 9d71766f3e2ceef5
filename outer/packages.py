"""Versions of installed third-party packages. Importing this module imports none of them."""

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from outer.errors import InputError

log = logging.getLogger(__name__)

MAX_VERSION_LENGTH = 64


@cache
def find_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed or, with a warning,
    if it cannot be read.

    A package's files may be damaged or may just be replaced. Nothing is raised.
    """
    try:
        return version(package)[:MAX_VERSION_LENGTH]
    except PackageNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - no training may end because a number is not known
        log.warning(
            "the version of %s cannot be read (%s: %s)", package, type(error).__name__, error
        )
        return None


MEET_ELSEWHERE = (
    "let the islands meet at a rendezvous (`diloco bootstrap --rendezvous tcp`), over tls or gloo"
)
"""The cure where there is no DHT."""


def has_hivemind() -> bool:
    """Return whether hivemind is installed."""
    return find_spec("hivemind") is not None


def require_hivemind(what: str, instead: str = "set outer.transport=tls") -> None:
    """Raise InputError if hivemind is not installed. `what` needs it; `instead` names an
    alternative.
    """
    if not has_hivemind():
        raise InputError(
            f"{what} needs the package hivemind, which is not installed here; pip install "
            f"'diloco[hivemind]', or {instead}"
        )
