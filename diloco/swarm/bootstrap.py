"""`diloco bootstrap` and `diloco relay`: serve addresses where islands find or reach each other.
They train nothing.
"""

import re
import signal
import threading
from ipaddress import IPv4Address
from pathlib import Path

import typer

from diloco.errors import ConfigError
from outer.errors import OuterError
from outer.identity.island_key import PUBLIC_KEY
from outer.packages import require_hivemind

PREFIX = "address: "
"""Prefix of each printed line with an address, for programs that parse it."""
START_SECONDS = 60.0
CLOSE_SECONDS = 5.0


def bootstrap(
    host: str,
    port: int,
    rendezvous: str,
    identity: Path | None,
    run_key_file: Path | None = None,
    folder: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, even after the end of the shell that started it.

    Prints one line per address.
    """
    _check(host, rendezvous, identity, run_key_file, folder)
    stopped = _expect_stop()
    if rendezvous == "dht":
        addresses, close = _serve_dht(host, port, identity)
    else:
        addresses, close = _serve_tcp(host, port, run_key_file, folder)
    for address in addresses:
        typer.echo(f"{PREFIX}{address}")
    typer.echo("pass it to the islands: island.bootstrap=[ADDRESS], or: diloco join ADDRESS")
    stopped.wait()
    close()


def relay(
    host: str,
    port: int,
    announce_host: str | None,
    run_key_file: Path | None,
    allow: list[str],
    mbit: float | None,
) -> None:
    """Forward connections until SIGTERM or SIGINT. Prints the address for `island.relays`."""
    from outer.network.event_loop import EventLoopThread
    from outer.network.run_key import load_run_key
    from outer.routes.relay import Relay, RelayLimits

    if bad := next((key for key in allow if re.fullmatch(PUBLIC_KEY, key) is None), None):
        raise ConfigError(
            f"--allow: got {bad!r}; allowed: an island's key (64 hexadecimal digits, see `diloco "
            "key`)"
        )
    key = load_run_key(str(run_key_file) if run_key_file else None)
    stopped = _expect_stop()
    loop = EventLoopThread()
    server = Relay(RelayLimits(bytes_per_second=mbit and mbit * 1e6 / 8), key, allow)
    try:
        loop.run(server.open(host, port), START_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"--host, --port: cannot listen on {host}:{port}: {error.strerror}; choose others"
        ) from None
    typer.echo(f"{PREFIX}{announce_host or host}:{server.port}")
    typer.echo(
        "pass it to the islands that nobody can reach: island.relays=[ADDRESS], with "
        "outer.transport=tls"
    )
    stopped.wait()
    loop.try_to(server.close(), CLOSE_SECONDS)
    loop.close()


def _expect_stop() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on."""
    # The end of a terminal is no request to stop. It still ends a bootstrap of `simulate`
    # (processes.py).
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _check(
    host: str,
    rendezvous: str,
    identity: Path | None,
    run_key_file: Path | None,
    folder: Path | None,
) -> None:
    if rendezvous not in ("dht", "tcp"):
        raise ConfigError(
            f"--rendezvous: got {rendezvous!r}; allowed: dht (for hivemind, tls), tcp (for gloo, "
            "tls)"
        )
    if rendezvous == "dht" and run_key_file is not None:
        raise ConfigError(
            "--run-key-file: a dht needs none, because its islands check each other's keys; leave "
            "it out"
        )
    if rendezvous == "dht" and folder is not None:
        raise ConfigError(
            "--folder: a dht needs none, because each of its values is signed by its owner; leave "
            "it out"
        )
    if rendezvous == "tcp" and identity is not None:
        raise ConfigError(
            "--identity: a tcp address is host and port alone; leave it out, and set a fixed --port"
        )
    if rendezvous == "dht":
        require_hivemind(
            "--rendezvous dht, the default,",
            "use --rendezvous tcp, where islands over tls and gloo meet",
        )
    try:
        if rendezvous == "dht":
            IPv4Address(host)
    except ValueError:
        raise ConfigError(
            f"--host: got {host!r}; allowed: an IPv4 address of this machine, for example "
            "127.0.0.1, or 0.0.0.0 for all"
        ) from None


def _serve_dht(host: str, port: int, identity: Path | None):
    from outer.membership.dht.membership import serve_bootstrap
    from outer.network.event_loop import EventLoopThread

    loop = EventLoopThread()
    try:
        peer = loop.run(serve_bootstrap([f"/ip4/{host}/tcp/{port}"], identity), START_SECONDS)
    except TimeoutError:
        text = (
            f"libp2p's daemon did not start within {START_SECONDS:g} s; `diloco doctor` checks "
            "this machine"
        )
        raise OuterError(text) from None
    return list(peer.addresses), lambda: loop.try_to(peer.close(), CLOSE_SECONDS)


def _serve_tcp(host: str, port: int, run_key_file: Path | None, folder: Path | None):
    from outer.membership.rendezvous import serve_rendezvous
    from outer.network.run_key import load_run_key

    server = serve_rendezvous(
        host, port, load_run_key(str(run_key_file) if run_key_file else None), folder
    )
    return [server.address], server.close
