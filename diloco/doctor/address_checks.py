"""Checks of `diloco doctor` on addresses: whether an island can listen there, and others reach
it.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Iterator

from diloco.doctor.checks import Check
from diloco.swarm.visit import LocalIsland
from outer.routes.addresses import WILDCARDS, is_loopback

DIAL_SECONDS = 5.0


def check_listening(local: LocalIsland, *, is_alone: bool) -> Iterator[Check]:
    """Check that the island can listen at the address in its config, and that others could reach it
    there.
    """
    host = local.island.listen_host
    port = local.island.listen_port
    where = "island.listen_host"
    network = local.network
    cure = network.listening_cure
    if network.needs_host and host in WILDCARDS:
        yield Check(
            "FAILED", where, f"{host}: {local.transport} needs one address of this machine; {cure}"
        )
        return
    has_relays = network.has_routes and bool(local.island.relays)
    has_address = host not in WILDCARDS or local.island.announce_host is not None
    if network.announces_host and not has_address and not has_relays:
        yield Check(
            "FAILED", where, f"{host}: others need an address to reach this island at; {cure}"
        )
        return
    if problem := find_bind_problem(host, 0):
        yield Check("FAILED", where, f"{host}: {problem}; {cure}")
        return
    if (
        has_relays
        and local.island.announce_host is None
        and (host in WILDCARDS or is_loopback(host))
    ):
        text = (
            f"{host}: no address is announced; others reach this island by "
            f"{', '.join(local.island.relays)}"
        )
        yield Check("ok", where, text)
    elif is_loopback(host) and not is_alone:
        yield Check(
            "warning",
            where,
            f"{host}: islands on other machines cannot reach this one; to allow it, {cure}",
        )
    else:
        yield Check("ok", where, f"{host}: an address of this machine")
    yield check_port(local, host, port)
    if local.island.announce_host is not None:
        yield check_announced(local, local.island.announce_host, port)


def check_port(local: LocalIsland, host: str, port: int) -> Check:
    """Check that the island's ports are free. With gloo each rank has a port of its own, and with
    tls two.
    """
    where = "island.listen_port"
    if port == 0:
        return Check(
            "ok", where, "0: any free port; behind a firewall or router set one and open it"
        )
    of_rank = local.network.ports_per_rank
    ports = range(port, port + max(of_rank * local.island.ranks, 1))
    if ports[-1] > 65535:
        text = (
            f"{port}: with {of_rank} per rank the last port is {ports[-1]}, above 65535; set a "
            "lower one"
        )
        return Check("FAILED", where, text)
    for each in ports:
        if problem := find_bind_problem(host, each):
            return Check("FAILED", where, f"{each}: {problem}")
    text = (
        f"{port}: free"
        if len(ports) == 1
        else f"{port} to {ports[-1]}, {of_rank} for each rank: free"
    )
    if local.network.opens_random_ports:
        text += (
            f"; {local.transport} also chooses ports for payloads itself: islands must reach "
            "each other on all ports"
        )
    return Check("ok", where, text)


def check_announced(local: LocalIsland, host: str, port: int) -> Check:
    """Check that the announced address can lead to this machine."""
    where = "island.announce_host"
    if port == 0 and local.network.has_daemon:
        return Check(
            "FAILED", where, f"{host}: it needs a fixed island.listen_port that is forwarded; got 0"
        )
    if find_bind_problem(host, 0) == "":
        return Check("ok", where, f"{host}: an address of this machine")
    target = f"port {port}" if port else "its port (set island.listen_port)"
    text = (
        f"{host}: not an address of this machine, so a router or cloud must forward {target} to it"
    )
    return Check("ok", where, text)


def find_bind_problem(host: str, port: int) -> str:
    """Return why a process cannot listen at this address; empty if it can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, at = found[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(at)
            listener.listen(1)
    except socket.gaierror as error:
        return f"it names no host ({error.strerror})"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                "something listens there already; stop it if it is this island, or set another port"
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return "not an address of this machine"
        return f"nothing can listen there ({error.strerror})"
    return ""


async def time_connection(host: str, port: int) -> tuple[float, str]:
    """Open a TCP connection.

    Return its duration in seconds and the problem, which is empty if it opened.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return 0.0, f"no answer within {DIAL_SECONDS:g} s, as when a firewall drops packets"
    except ConnectionRefusedError:
        return 0.0, "refused: nothing listens there"
    except socket.gaierror as error:
        return 0.0, f"no such host is found: {error.strerror}"
    except OSError as error:
        return 0.0, error.strerror or str(error)
    writer.transport.abort()
    return time.perf_counter() - began, ""
