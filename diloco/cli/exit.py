"""How the command line ends: what it says of an error, and how the process leaves."""

import errno
import os
import sys
from contextlib import suppress

DISK_PROBLEMS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def told(error: BaseException) -> str | None:
    """What the error tells its reader, if that is all there is to know, without a traceback."""
    import inner.errors
    import outer.errors
    from diloco.config import ConfigError

    if isinstance(error, OSError):
        return of_the_disk(error)
    users = (
        ConfigError,
        inner.errors.InputError,
        inner.errors.TrainingStopped,
        outer.errors.InputError,
        outer.errors.OuterError,
    )
    return str(error) if isinstance(error, users) else None


def of_the_disk(error: OSError) -> str | None:
    """The same of what a file system refuses to whoever writes."""
    if error.errno not in DISK_PROBLEMS or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}; it must be on a disk that has room and where this user may write"


def end(code: int) -> None:
    """Leave without the interpreter's shutdown where gloo or Arrow is: their threads abort or hang in it at times."""
    for stream in (sys.stdout, sys.stderr):
        # A log on a full disk does not change how the command has ended.
        with suppress(OSError):
            stream.flush()
    if {"torch", "pyarrow"} & sys.modules.keys():
        os._exit(code)
    sys.exit(code)
