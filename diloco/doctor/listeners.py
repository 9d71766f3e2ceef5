"""Finds the addresses at which processes of this machine listen, and the rank stores among them.

Linux only. A TCPStore, where the ranks of torchrun meet, listens on all addresses of its machine
and accepts anyone, and torchrun unpickles data from it. `diloco launch` starts an island of one
node without a TCPStore.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TCP_LISTENS = "0A"
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
TABLES = ("tcp", "tcp6", "udp", "udp6")
Bound = tuple[str, str, int]


@dataclass(frozen=True)
class ListeningSocket:
    """A socket that accepts connections or datagrams. `protocol` is tcp, tcp6, udp or udp6."""

    pid: int
    program: str
    protocol: str
    host: str
    port: int

    @property
    def is_beyond_loopback(self) -> bool:
        """Whether other machines can reach it, unless a firewall is in between."""
        address = ipaddress.ip_address(self.host)
        return not (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def __str__(self) -> str:
        return f"{self.protocol} [{self.host}]:{self.port} of process {self.pid} ({self.program})"


def find_rank_stores() -> list[ListeningSocket]:
    """Return the rank stores that listen beyond loopback, among the processes open to this user."""
    listeners = read_listeners(int(folder.name) for folder in PROC.glob("[0-9]*"))
    return [each for each in listeners if each.is_beyond_loopback and is_rank_store(each)]


def is_rank_store(listener: ListeningSocket) -> bool:
    """Return whether a TCP listener is torchrun's store, or the store of its own process's
    ranks.
    """
    folder = PROC / str(listener.pid)
    try:
        command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    is_torchrun = any(
        argument in TORCHRUN or argument.endswith("/torchrun") for argument in command
    )
    return listener.protocol.startswith("tcp") and (
        is_torchrun or f"MASTER_PORT={listener.port}" in variables
    )


def read_listeners(pids: Iterable[int]) -> list[ListeningSocket]:
    """Return the listening sockets of these processes.

    Processes that have ended or belong to other users are left out.
    """
    found: list[ListeningSocket] = []
    for pid in pids:
        with suppress(OSError):
            inodes = set(socket_inodes(pid))
            bound = bound_sockets(pid) if inodes else {}
            program = (PROC / str(pid) / "comm").read_text().strip()
            found += [
                ListeningSocket(pid, program, *bound[inode]) for inode in inodes & bound.keys()
            ]
    return found


def socket_inodes(pid: int) -> Iterator[str]:
    """Yield the inode numbers of a process's sockets."""
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target.removeprefix("socket:[").removesuffix("]")


def bound_sockets(pid: int) -> dict[str, Bound]:
    """Return the protocol, address and port of each listening socket, by its inode.

    The sockets are those of the process's network namespace.
    """
    bound = {}
    for table in TABLES:
        with suppress(OSError):
            for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
                local, remote, state, inode = (line.split()[column] for column in (1, 2, 3, 9))
                # A UDP socket without a peer accepts datagrams from anyone.
                if state == TCP_LISTENS or (table.startswith("udp") and remote.endswith(":0000")):
                    bound[inode] = (table, *parse_address(local))
    return bound


def parse_address(text: str) -> tuple[str, int]:
    """Parse an address as the kernel prints it, into host and port.

    The kernel prints 4-byte words in the machine's byte order, a colon, and the port.
    """
    words, port = text.split(":")
    data = b"".join(
        int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)
    )
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data), int(
        port, 16
    )
