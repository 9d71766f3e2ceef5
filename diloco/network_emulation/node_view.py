"""Runs a command as if on a machine of its own, with its own host name and temporary folders.

    python -m diloco.network_emulation.node_view VIEW COMMAND...      VIEW is a NodeView as JSON

The nodes of a cluster share the folders of a run and nothing else. So /tmp and the like are empty
here, apart from the folders that are named as shared. A program that needs a Unix socket or a
temporary file of another node therefore fails here, as it would on a cluster. Needs root. The
process must be in a mount namespace of its own, as `ip netns exec` makes one.
"""

import ctypes
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CLONE_NEWUTS = 0x04000000
MS_BIND = 4096
MS_REC = 16384
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that each node has for itself."""
HOSTS = Path("/etc/hosts")


@dataclass(frozen=True)
class NodeView:
    """A node's host name, the addresses of its island's nodes by host name, and shared folders."""

    name: str
    hosts: Mapping[str, str]
    shared: Sequence[str]

    def command(self, *words: str) -> list[str]:
        """Wrap a command so that it runs with this view. The process replaces itself, so the pid is
        the command's.
        """
        module = "diloco.network_emulation.node_view"
        return [sys.executable, "-m", module, json.dumps(asdict(self)), *words]


def enter(view: NodeView) -> None:
    """Give this process the view of a node. Raises OSError."""
    here = os.getcwd()
    _check(_libc().unshare(CLONE_NEWUTS), "unshare")
    socket.sethostname(view.name)
    # Opened before they are hidden: a folder can still be mounted by its descriptor.
    shared = {
        path: os.open(path, os.O_PATH)
        for path in map(os.path.realpath, view.shared)
        if _is_hidden(path)
    }
    for folder in filter(os.path.isdir, PRIVATE):
        _mount("node", folder, "tmpfs")
        os.chmod(folder, 0o1777)
    for path in sorted(shared, key=len):
        _make_place(path, is_folder=os.path.isdir(f"/proc/self/fd/{shared[path]}"))
        _mount(f"/proc/self/fd/{shared[path]}", path, None, MS_BIND | MS_REC)
    for descriptor in shared.values():
        os.close(descriptor)
    _name_hosts(view.hosts)
    # The current folder is still the hidden one: enter the one that is now at its path.
    os.chdir(here if os.path.isdir(here) else "/")


def _is_hidden(path: str) -> bool:
    """Return whether a path lies in a folder that each node has for itself.

    Such a folder as a whole is never shared.
    """
    return os.path.exists(path) and any(path.startswith(f"{folder}/") for folder in PRIVATE)


def _make_place(path: str, *, is_folder: bool) -> None:
    if os.path.exists(path):
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        Path(path).mkdir()
    else:
        Path(path).touch()


def _name_hosts(hosts: Mapping[str, str]) -> None:
    """Replace /etc/hosts in this view only."""
    own = Path(PRIVATE[0]) / f"hosts-{os.getpid()}"
    own.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in hosts.items())
    )
    _mount(str(own), str(HOSTS), None, MS_BIND)


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _check(_libc().mount(*words, ctypes.c_ulong(flags), None), target)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enter the view that the first argument describes, then become the command."""
    enter(NodeView(**json.loads(sys.argv[1])))
    os.environ.pop("TMPDIR", None)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
