"""Checks of the addresses at which gloo may be used, and protection of its port against strangers.

gloo accepts every connection to the port of a group as long as the group lives, authenticates no
connection, and ends the process when it can accept no more. So, as soon as all pairs are connected,
the kernel is set to drop all packets that arrive at the port. While a group is being built the port
is open.
"""

import asyncio
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from functools import cache

from outer.errors import InputError

log = logging.getLogger(__name__)

DESCRIPTORS = "/proc/self/fd"
"""Folder in which Linux lists the open files of this process."""
SO_ATTACH_FILTER = 26
"""Linux: attach a classic BPF program to a socket. Python's socket module does not name it."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The program `return 0`: keep nothing of a packet that arrives at the socket."""


def close_door(own: bytes) -> int:
    """Drop all packets to the listening socket whose address is in `own`. Return the number of
    sockets closed in this way.

    `own` is the address data of this endpoint's gloo. Existing connections continue. Only Linux can
    do this, and some kernels let only root do it: elsewhere the socket stays open, with a warning.
    """
    if not os.path.isdir(DESCRIPTORS):
        _warn_of_open_door("only Linux can close it")
    num_closed = 0
    for listener in _listeners():
        with listener:
            if _socket_address(listener) in own:
                try:
                    drop_all(listener)
                except PermissionError:
                    _warn_of_open_door("this system lets only root close it")
                else:
                    num_closed += 1
    return num_closed


def drop_all(listener: socket.socket) -> None:
    """Let the kernel drop whatever arrives at a socket. Raises PermissionError where only root may
    do this.
    """
    program = ctypes.create_string_buffer(DROP_ALL)
    packed = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, packed)


def check_listen_host(host: str) -> None:
    """Raise InputError for a wildcard address, because gloo sends the address to the other
    endpoints unchanged.
    """
    if host in ("", "0.0.0.0", "::"):
        raise InputError(
            f"island.listen_host: got {host!r}; gloo needs the one address of this machine that "
            "the other islands "
            "reach, e.g. 10.0.0.5. Its traffic is not encrypted: keep it inside a private network"
        )


async def check_is_private(key: str, host: str) -> None:
    """Raise InputError if `host`, the value of the setting `key`, is an address of the open
    internet.
    """
    public = [
        address for address in await _addresses_of(host) if ipaddress.ip_address(address).is_global
    ]
    if public:
        raise InputError(
            f"{key}: got {host!r}, an address of the open internet ({public[0]}), and "
            "outer.transport is gloo. gloo encrypts nothing, and whoever reaches its ports can end "
            "the island: use hivemind or a VPN. If only the islands of the run reach this address, "
            "set island.gloo_in_public=true"
        )


async def _addresses_of(host: str) -> list[str]:
    """Return the IP addresses of a host; empty if its name cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]).partition("%")[0] for *_, address in found]


@cache
def _warn_of_open_door(cause: str) -> None:
    log.warning(
        "gloo's port stays open to anyone who reaches it, because %s; keep it inside a private "
        "network, or set outer.transport=tls",
        cause,
    )


def _listeners() -> Iterator[socket.socket]:
    """Yield duplicates of this process's listening sockets."""
    if not os.path.isdir(DESCRIPTORS):
        return
    for name in os.listdir(DESCRIPTORS):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
        if (
            is_ip
            and found.type == socket.SOCK_STREAM
            and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            yield found
        else:
            found.close()


def _socket_address(listener: socket.socket) -> bytes:
    """Return the port and address of a socket in the layout of a struct sockaddr."""
    host, port = listener.getsockname()[:2]
    flow_info = bytes(4) if listener.family == socket.AF_INET6 else b""
    return (
        struct.pack("!H", port)
        + flow_info
        + socket.inet_pton(listener.family, host.partition("%")[0])
    )
