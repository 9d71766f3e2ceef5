"""Files that are replaced whole or not at all, and locks that end with the process that holds
them.
"""

import fcntl
import os
from pathlib import Path, PurePosixPath
from typing import IO, Any

from inner.errors import InputError

CACHE_TAG = "CACHEDIR.TAG"
CACHE_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n"
"""First line of the file that marks a folder as a cache: https://bford.info/cachedir/."""


def home_path(text: str, where: str) -> Path:
    """Return the path of a config's value. `~` or `~user` at its start becomes the home directory.

    Raises InputError, which names the value by `where`, if there is no home directory, as in a
    container without HOME.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(
            f"{where}: {text!r} begins with a home directory, but there is none here (the "
            "environment has no HOME, or "
            "no user has this name); set HOME, or give an absolute path"
        ) from None


def make_folder(folder: Path, where: str) -> Path:
    """Create a folder that a user named, unless it exists, and return it.

    Raises InputError, which names the setting or option by `where`, if it cannot be created or
    written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "this user may not write there"
    except OSError as error:
        problem = f"{error.strerror} ({error.filename})"
    if problem:
        raise InputError(
            f"{where}: the folder {folder} cannot be used: {problem}; name a folder to write to"
        )
    return folder


def make_cache_folder(folder: Path) -> None:
    """Create the folder with a CACHEDIR.TAG in it, so that programs which read or back up folders
    skip it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CACHE_TAG).write_text(CACHE_SIGNATURE)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace `path` by one rename: a reader sees the old or the new file, even after a kill. Text
    is stored as UTF-8.

    Raises OSError, which names the path. The data is not synced: a power failure may still lose it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(beside, path)
    except OSError as error:
        # An error raised by write() names no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_synced(path: Path, *pieces: bytes | bytearray | memoryview) -> None:
    """Write the pieces into a file, one after the other, and return once they are on the disk. A
    kill may leave an incomplete file.
    """
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def take_space(file: IO[bytes], size: int) -> None:
    """Reserve the space of an empty file at once, so that a full disk raises OSError here and other
    processes see the size.

    On systems without such a call (macOS), other processes see the size, but a full disk shows only
    when data is written.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def try_lock(file: int | IO, *, shared: bool = False) -> bool:
    """Take the advisory lock (flock) of an open file. Return False if another open file holds it in
    a conflicting mode.

    The lock lasts until the file is closed here and in every forked child, so at most as long as
    these processes.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: int | IO) -> None:
    """Take the exclusive lock of `try_lock`; wait while another open file holds it."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_process_lock(file: int | IO) -> bool:
    """Take the lock (lockf) of a file that is open for writing. Return False if another process
    holds it.

    The lock ends with this process: unlike with `try_lock`, forked children that outlive a killed
    parent do not keep it. Raises OSError if the file system has no locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def open_url(url: str, complaint: str) -> tuple[Any, PurePosixPath]:
    """Return the file system of a URL or folder that fsspec supports, and the path in it.

    Raises InputError, which begins with `complaint`, if fsspec does not support the URL, or the
    package for it is missing.
    """
    import fsspec

    url = str(home_path(url, complaint)) if url.startswith("~") else url
    try:
        files, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        cure = "; pip install 'diloco[s3]'" if url.startswith("s3:") else ""
        raise InputError(f"{complaint}; {error}{cure}") from None
    return files, PurePosixPath(path)
