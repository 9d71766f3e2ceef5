"""Takes from Python what Linux alone has. Every Python process with this folder in PYTHONPATH
imports it at its start.

So a run with it, and with all the processes that it starts, meets what it would meet on macOS or a
BSD, as far as that can be had without one: calls, constants and folders that are not there. What is
different there remains unseen.
"""

import builtins
import ctypes
import io
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

FOLDERS = ("/proc", "/sys", "/dev/shm")
LIBRARY_CALLS = ("prctl", "memfd_create", "mount", "setns", "unshare", "mallopt", "malloc_trim")
NAMES = {
    os: """
        CLONE_NEWNET O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd getrandom getxattr
        memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate process_cpu_count
        sched_getaffinity sched_setaffinity setns setxattr splice unshare
        """,
    select: "epoll",
    signal: "SIGPWR SIGSTKFLT SIGCLD SIGPOLL pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: """
        AF_ALG AF_NETLINK AF_PACKET AF_VSOCK MSG_CMSG_CLOEXEC MSG_ERRQUEUE MSG_MORE SOCK_CLOEXEC
        SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_INCOMING_CPU SO_MARK SO_PASSCRED SO_PEERCRED
        SO_PEERSEC SO_PRIORITY SO_PROTOCOL TCP_CONGESTION TCP_CORK TCP_DEFER_ACCEPT TCP_INFO
        TCP_KEEPIDLE TCP_LINGER2 TCP_QUICKACK TCP_SYNCNT TCP_USER_TIMEOUT TCP_WINDOW_CLAMP
        """,
}


def is_gone(path: object) -> bool:
    """Whether a path lies in a folder that Linux alone has."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.fsdecode(path)
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def without_folders(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a path, for which FOLDERS are not there."""

    def refuse(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if is_gone(path):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **options)

    return refuse


class Library(ctypes.CDLL):
    """A library of C without LIBRARY_CALLS."""

    def __getattr__(self, name: str) -> Any:
        if name in LIBRARY_CALLS:
            raise AttributeError(f"{name}: symbol not found")
        return super().__getattr__(name)


for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
    setattr(os, name, without_folders(getattr(os, name)))
_access = os.access
os.access = lambda path, *arguments, **options: (
    not is_gone(path) and _access(path, *arguments, **options)
)
builtins.open = io.open = without_folders(io.open)
ctypes.CDLL = Library
