"""What `diloco doctor` finds out about this machine alone: versions, config, addresses, disk, key, libp2p."""

import asyncio
import errno
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from diloco.check import check_island
from diloco.config import Config, ConfigError, IslandConfig, RunConfig
from diloco.units import human_bytes
from inner.errors import InputError as DataError
from inner.presets import num_params, resolve_sizes
from outer.errors import InputError
from outer.keys import RunKey, read_run_key, run_key_in

Level = Literal["ok", "warning", "FAILED"]
DAEMON_SECONDS = 20.0
DIAL_SECONDS = 5.0
LOW_DISK_BYTES = 1_000_000_000
SWARM_CURE = {
    "hivemind": "set island.listen_host=0.0.0.0 island.listen_port=PORT and, behind a router or in a cloud, "
    "island.announce_host=PUBLIC_ADDRESS",
    "gloo": "set island.listen_host to this machine's address in the network of the islands",
}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's: what was measured and, when it is not ok, what to do."""

    level: Level
    name: str
    text: str


@dataclass(frozen=True)
class Subject:
    """The island that the user wants to run here. `run` is None without a config."""

    run: RunConfig | None
    island: IslandConfig
    transport: str

    @property
    def folder(self) -> Path:
        return Path(self.island.run_dir).expanduser()


def local_checks(subject: Subject, *, is_alone: bool) -> Iterator[Check]:
    """All that can be said without a swarm. `is_alone`: the swarm, if one was named, is on this machine."""
    yield check_versions(subject.transport)
    yield from check_config(subject)
    if subject.transport == "loopback":
        yield Check("ok", "network", "outer.transport=loopback needs none")
    else:
        yield from check_listening(subject, is_alone=is_alone)
    yield from check_disk(subject)
    now = datetime.now(UTC)
    yield Check("ok", "clock", f"{now:%Y-%m-%d %H:%M:%S} UTC, as this machine says")
    if subject.island.run_key_file is not None:
        yield check_key(Path(subject.island.run_key_file).expanduser())
    if subject.transport == "hivemind":
        yield check_daemon()


def check_versions(transport: str) -> Check:
    """What this island would run on."""
    from outer.probe import PACKAGES, versions
    from outer.wire import VERSION

    found = versions()
    text = f"{', '.join(f'{name} {number}' for name, number in found.items())}, wire {VERSION}"
    needed = [p for p in PACKAGES if p not in found and (p != "hivemind" or transport == "hivemind")]
    if needed:
        return Check("FAILED", "versions", f"{text}; not installed: {', '.join(needed)}; run scripts/setup")
    return Check("ok", "versions", text)


def check_config(subject: Subject) -> Iterator[Check]:
    """Whether the island's mesh and batch can train the run. What the file says was checked when it was read."""
    run, island = subject.run, subject.island
    if run is None:
        yield Check("ok", "config", "none given; --config FILE checks that, too, and compares it with the swarm's")
        return
    text = f"run {run.name!r}, hash {run.hash}, {island.island!r} of {island.ranks} ranks over {subject.transport}"
    try:
        check_island(run, island, island.island)
    except ConfigError as error:
        yield Check("FAILED", "config", f"{text}: {error}")
    else:
        yield Check("ok", "config", text)


def check_listening(subject: Subject, *, is_alone: bool) -> Iterator[Check]:
    """Whether the island can listen where its config says, and whether others could find it there."""
    island, host, port = subject.island, subject.island.listen_host, subject.island.listen_port
    where = "island.listen_host"
    if subject.transport == "gloo" and host in ("", "0.0.0.0", "::"):
        yield Check("FAILED", where, f"{host}: gloo needs one address of this machine; {SWARM_CURE['gloo']}")
        return
    problem = bind_problem(host, 0)
    if problem:
        yield Check("FAILED", where, f"{host}: {problem}; {SWARM_CURE[subject.transport]}")
        return
    if is_loopback(host) and not is_alone:
        cure = SWARM_CURE[subject.transport]
        yield Check("warning", where, f"{host}: islands on other machines cannot reach this one; to let them, {cure}")
    else:
        yield Check("ok", where, f"{host}: an address of this machine")
    yield check_port(subject, host, port)
    if island.announce_host is not None:
        yield check_announced(subject, island.announce_host, port)


def check_port(subject: Subject, host: str, port: int) -> Check:
    """Whether the island's ports are free: under gloo each rank has one of its own."""
    where = "island.listen_port"
    if port == 0:
        return Check("ok", where, "0: any free port; behind a firewall or router set one and open it")
    ports = range(port, port + (subject.island.ranks if subject.transport == "gloo" else 1))
    if ports[-1] > 65535:
        return Check(
            "FAILED", where, f"{port}: one for each rank makes {ports[-1]}, and 65535 is the last; set a lower"
        )
    for each in ports:
        problem = bind_problem(host, each)
        if problem:
            return Check("FAILED", where, f"{each}: {problem}")
    text = f"{port}: free" if len(ports) == 1 else f"{port} to {ports[-1]}, one for each rank: free"
    if subject.transport == "gloo":
        text += "; gloo's payloads take ports of its own choice besides: islands must reach each other on all"
    return Check("ok", where, text)


def check_announced(subject: Subject, host: str, port: int) -> Check:
    """Whether the announced address can lead here."""
    where = "island.announce_host"
    if port == 0 and subject.transport == "hivemind":
        return Check("FAILED", where, f"{host}: it needs a fixed island.listen_port, the one that is forwarded; got 0")
    if bind_problem(host, 0) == "":
        return Check("ok", where, f"{host}: an address of this machine")
    target = f"port {port}" if port else "its port (set island.listen_port)"
    return Check("ok", where, f"{host}: not of this machine, so a router or cloud must forward {target} to it")


def bind_problem(host: str, port: int) -> str:
    """Why nothing can listen at this address of this machine; "" if something can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, at = found[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(at)
            listening.listen(1)
    except socket.gaierror as error:
        return f"it names no host ({error.strerror})"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "something listens there already; stop it if it is this island, or set another port"
        if error.errno == errno.EADDRNOTAVAIL:
            return "not an address of this machine"
        return f"nothing can listen there ({error.strerror})"
    return ""


async def connect_seconds(host: str, port: int) -> tuple[float, str]:
    """How long a TCP connection takes, and why there is none ("": there is)."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return 0.0, f"no answer within {DIAL_SECONDS:g} s, as when a firewall drops what comes"
    except ConnectionRefusedError:
        return 0.0, "refused: nothing listens there"
    except socket.gaierror as error:
        return 0.0, f"no such host is found: {error.strerror}"
    except OSError as error:
        return 0.0, error.strerror or str(error)
    writer.transport.abort()
    return time.perf_counter() - began, ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_disk(subject: Subject) -> Iterator[Check]:
    """Room for the state that an island may take from others, and for the tokenised text."""
    state = state_bytes(subject.run) if subject.run is not None else 0
    cache = Path(subject.island.cache_dir).expanduser()
    for where, path, needed in (("island.run_dir", subject.folder, state), ("island.cache_dir", cache, 0)):
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        text = f"{path}: {human_bytes(free)} free"
        if needed:
            text += f", the run's state takes {human_bytes(needed)}"
        if not there.is_dir() or not os.access(there, os.W_OK):
            yield Check("FAILED", where, f"{path}: {there} is no folder that this user may write to; set {where}")
        elif free < needed:
            yield Check("FAILED", where, f"{text}; make room, or set {where} to a larger disk")
        elif free < needed + LOW_DISK_BYTES:
            yield Check("warning", where, f"{text}; that may not last: make room, or set {where} to a larger disk")
        else:
            yield Check("ok", where, text)


def state_bytes(run: RunConfig) -> int:
    """Of what a joiner takes: params and outer momentum in fp32. 0 when its tokenizer cannot be had."""
    from inner.data.tokenizer import vocab_size_of

    try:
        return 2 * 4 * num_params(resolve_sizes(run.model, run.model.vocab_size or vocab_size_of(run.data)))
    except (DataError, OSError):
        return 0


def check_key(path: Path) -> Check:
    """Whether the run's key can be read, by this user alone."""
    try:
        read_run_key(path)
    except InputError as error:
        return Check("FAILED", "run key", str(error))
    if path.stat().st_mode & 0o004:
        return Check("warning", "run key", f"everybody on this machine can read {path}; `chmod 600 {path}`")
    return Check("ok", "run key", f"{path}: readable; the swarm shows whether it is the run's")


def usable_key(island: IslandConfig) -> RunKey | None:
    """The island's key, or None when it has none or it cannot be read, which `check_key` says."""
    try:
        return run_key_in(island.run_key_file)
    except InputError:
        return None


def check_daemon() -> Check:
    """Whether hivemind's libp2p daemon runs on this machine."""
    from outer.loop import LoopThread
    from outer.membership.hivemind import serve_bootstrap

    loop, began = LoopThread(), time.monotonic()
    try:
        peer = loop.run(serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None), timeout_seconds=DAEMON_SECONDS)
        seconds = time.monotonic() - began
        loop.run(peer.close(), timeout_seconds=DAEMON_SECONDS)
    except (InputError, OSError, TimeoutError) as error:
        cause = str(error) or f"it does not start within {DAEMON_SECONDS:g} s"
        return Check("FAILED", "libp2p", f"{cause}; hivemind brings its daemon along: run scripts/setup again")
    finally:
        loop.close()
    return Check("ok", "libp2p", f"hivemind's daemon starts, in {seconds:.1f} s")


def subject_of(config: Config | None, overrides_only: Config, address: str | None) -> Subject:
    """The island that the file, or else the command line and the address, describe."""
    if config is not None:
        return Subject(config.run, config.for_island(config.island.index), config.outer.transport)
    island = overrides_only.for_island(overrides_only.island.index)
    is_tcp = address is not None and address.startswith("tcp://")
    return Subject(None, island, "gloo" if is_tcp else "hivemind")
