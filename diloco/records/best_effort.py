"""Records are written as well as may be: what fails costs the record and one warning, never the training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import ConfigError

log = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Log whatever fails in the block as one warning, which names `what`, and go on after the block.

    For records alone: a disk that is full, a folder that is read-only, a file of another program that is half written.
    The block must not call what all ranks of an island call together. A ConfigError is the user's and passes.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is only about a record
        log.warning("%s (%s: %s); training goes on", what, type(error).__name__, error)
