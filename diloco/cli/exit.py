"""The end of the command line: the errors that are shown without a traceback, and the exit
status.
"""

import errno
import os
import sys
from contextlib import suppress

DISK_PROBLEMS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def error_text(error: BaseException) -> str | None:
    """Return the text to show instead of a traceback; None for an error that needs its
    traceback.
    """
    from diloco.errors import ConfigError
    from inner.errors import InputError as DataError
    from inner.errors import TrainingStopped
    from outer.errors import InputError, OuterError, RankLost

    if isinstance(
        error, ConfigError | DataError | TrainingStopped | InputError | OuterError | RankLost
    ):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_PROBLEMS and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror}; it must be on a disk that has room and where "
            "this user may write"
        )
    return None


def exit_status(error: BaseException) -> int:
    """Return 2 for a mistake of the user, else 1. A rank returns FINAL_STATUS after a mistake or a
    refusal.

    Examples are a wrong config, a wrong key, a name that is in use, or a run without other islands.
    The launcher does not restart such a rank, because the same command would fail again.
    """
    from diloco.errors import FINAL_STATUS

    if not isinstance(error, ValueError):
        return 1
    return FINAL_STATUS if "RANK" in os.environ else 2


def end(code: int) -> None:
    """Exit with status `code`. Skips the interpreter's shutdown, in which threads of gloo and Arrow
    sometimes hang.
    """
    for stream in (sys.stdout, sys.stderr):
        # A failing write, for example to a log on a full disk, must not change the exit status.
        with suppress(OSError):
            stream.flush()
    if {"torch", "pyarrow"} & sys.modules.keys():
        os._exit(code)
    sys.exit(code)
