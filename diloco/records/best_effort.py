"""Writing records must never end the training: a failure costs the record and one warning."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import ConfigError

log = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Log any failure in the block as one warning that names `what`, and continue after the block.

    Only for records: the disk may be full, a folder read-only, or another program's file half
    written. The block must not contain a collective, which all ranks of an island call together. A
    ConfigError is the user's mistake and is raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - no error of a record may end the training
        log.warning("%s (%s: %s); training goes on", what, type(error).__name__, error)
