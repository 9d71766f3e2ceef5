"""Checks of `diloco doctor` on this machine alone: versions, config, addresses, disk, run key, libp2p."""

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

from diloco.config.check import check_island
from diloco.config.schema import Config, IslandConfig, RunConfig
from diloco.errors import ConfigError
from diloco.formatting import human_bytes
from diloco.runtime.process_settings import count_needed_files, find_allowed_files
from diloco.swarm.listeners import PROC, find_rank_stores
from inner.errors import InputError as DataError
from inner.model.sizes import num_params, resolve_sizes
from outer.errors import InputError
from outer.network.run_key import RunKey, load_run_key, read_run_key

CheckLevel = Literal["ok", "warning", "FAILED"]
CONNECT_SECONDS = 10.0
"""Longest wait for a swarm that does not answer."""
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
    """The result of one check: what was found and, if it is not ok, what to do."""

    level: CheckLevel
    name: str
    text: str


@dataclass(frozen=True)
class LocalIsland:
    """The island that the user wants to run on this machine. `run` is None if no config file is given."""

    run: RunConfig | None
    island: IslandConfig
    transport: str

    @property
    def folder(self) -> Path:
        return Path(self.island.run_dir).expanduser()

    @property
    def connect_seconds(self) -> float:
        return min(CONNECT_SECONDS, self.island.connect_seconds)


def check_machine(local: LocalIsland, *, is_alone: bool) -> Iterator[Check]:
    """Run all checks that need no swarm. `is_alone` means that the given swarm is on this machine."""
    yield check_versions(local.transport)
    yield check_config(local)
    if local.transport == "loopback":
        yield Check("ok", "network", "outer.transport=loopback needs no network")
    else:
        yield from check_listening(local, is_alone=is_alone)
    yield check_rank_stores()
    yield check_open_files(local.island.ranks)
    yield from check_disk(local)
    yield Check("ok", "clock", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by this machine's clock")
    if local.island.run_key_file is not None:
        yield check_key(Path(local.island.run_key_file).expanduser())
    if local.transport == "hivemind":
        yield check_daemon()


def check_versions(transport: str) -> Check:
    """Check that the packages the island needs are installed, and report their versions."""
    from outer.diagnostics import PACKAGES, VERSION, package_versions

    found = package_versions()
    text = f"{', '.join(f'{name} {number}' for name, number in found.items())}, wire {VERSION}"
    needed = [p for p in PACKAGES if p not in found and (p != "hivemind" or transport == "hivemind")]
    if needed:
        return Check("FAILED", "versions", f"{text}; not installed: {', '.join(needed)}; run scripts/setup")
    return Check("ok", "versions", text)


def check_config(local: LocalIsland) -> Check:
    """Check that the island's mesh and micro-batch can train the run. The file itself has been validated already."""
    run, island = local.run, local.island
    if run is None:
        return Check("ok", "config", "none given; --config FILE also checks it and compares it with the swarm's config")
    text = f"run {run.name!r}, hash {run.hash}, {island.label!r} of {island.ranks} ranks over {local.transport}"
    try:
        check_island(run, island, island.label)
    except ConfigError as error:
        return Check("FAILED", "config", f"{text}: {error}")
    return Check("ok", "config", text)


def check_listening(local: LocalIsland, *, is_alone: bool) -> Iterator[Check]:
    """Check that the island can listen at the address in its config, and that others could reach it there."""
    host, port, where = local.island.listen_host, local.island.listen_port, "island.listen_host"
    if local.transport == "gloo" and host in ("", "0.0.0.0", "::"):
        yield Check("FAILED", where, f"{host}: gloo needs one address of this machine; {SWARM_CURE['gloo']}")
        return
    if problem := find_bind_problem(host, 0):
        yield Check("FAILED", where, f"{host}: {problem}; {SWARM_CURE[local.transport]}")
        return
    if is_loopback(host) and not is_alone:
        cure = SWARM_CURE[local.transport]
        yield Check("warning", where, f"{host}: islands on other machines cannot reach this one; to allow it, {cure}")
    else:
        yield Check("ok", where, f"{host}: an address of this machine")
    yield check_port(local, host, port)
    if local.island.announce_host is not None:
        yield check_announced(local, local.island.announce_host, port)


def check_rank_stores() -> Check:
    """Check that no store where an island's ranks meet, such as torchrun's, can be reached from other machines."""
    where, whose = "rank stores", "among the processes that this user may look at"
    if not PROC.exists():
        return Check("ok", where, "not checked, because this machine has no /proc")
    found = ", ".join(map(str, find_rank_stores()))
    if found:
        text = f"{found}: whoever reaches a store of an island's ranks can run code there; start an island of one node "
        text += "with `diloco launch`, and close the ports of one of several nodes, as docs/operating.md says"
        return Check("warning", where, text)
    return Check("ok", where, f"none listens beyond loopback, {whose}")


def check_open_files(num_ranks: int) -> Check:
    """Check that a rank may open a socket for each of the other ranks. It raises its limit itself where it may."""
    allowed, needed = find_allowed_files(), count_needed_files(num_ranks)
    text = f"{allowed} allowed for a process, a rank of {num_ranks} may need {needed}"
    if allowed < needed:
        cure = "raise the hard limit: ulimit -Hn, LimitNOFILE of systemd, or that of the container"
        return Check("warning", "open files", f"{text}; {cure}")
    return Check("ok", "open files", text)


def check_port(local: LocalIsland, host: str, port: int) -> Check:
    """Check that the island's ports are free. With gloo each rank has its own port."""
    where = "island.listen_port"
    if port == 0:
        return Check("ok", where, "0: any free port; behind a firewall or router set one and open it")
    ports = range(port, port + (local.island.ranks if local.transport == "gloo" else 1))
    if ports[-1] > 65535:
        text = f"{port}: with one port per rank the last is {ports[-1]}, above 65535; set a lower one"
        return Check("FAILED", where, text)
    for each in ports:
        if problem := find_bind_problem(host, each):
            return Check("FAILED", where, f"{each}: {problem}")
    text = f"{port}: free" if len(ports) == 1 else f"{port} to {ports[-1]}, one for each rank: free"
    if local.transport == "gloo":
        text += "; gloo also chooses ports for payloads itself: islands must reach each other on all ports"
    return Check("ok", where, text)


def check_announced(local: LocalIsland, host: str, port: int) -> Check:
    """Check that the announced address can lead to this machine."""
    where = "island.announce_host"
    if port == 0 and local.transport == "hivemind":
        return Check("FAILED", where, f"{host}: it needs a fixed island.listen_port that is forwarded; got 0")
    if find_bind_problem(host, 0) == "":
        return Check("ok", where, f"{host}: an address of this machine")
    target = f"port {port}" if port else "its port (set island.listen_port)"
    text = f"{host}: not an address of this machine, so a router or cloud must forward {target} to it"
    return Check("ok", where, text)


def find_bind_problem(host: str, port: int) -> str:
    """Why a process cannot listen at this address; "" if it can."""
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
            return "something listens there already; stop it if it is this island, or set another port"
        if error.errno == errno.EADDRNOTAVAIL:
            return "not an address of this machine"
        return f"nothing can listen there ({error.strerror})"
    return ""


async def time_connection(host: str, port: int) -> tuple[float, str]:
    """Open a TCP connection. Returns the time it took in seconds, and the problem ("" if there is none)."""
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
    """Whether the host is a loopback address, which only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_disk(local: LocalIsland) -> Iterator[Check]:
    """Check that there is space for the state that an island may download, and for the tokenised text."""
    state = state_bytes(local.run) if local.run is not None else 0
    cache = Path(local.island.cache_dir).expanduser()
    for where, path, needed in (("island.run_dir", local.folder, state), ("island.cache_dir", cache, 0)):
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        text = f"{path}: {human_bytes(free)} free"
        text += f", the run's state takes {human_bytes(needed)}" if needed else ""
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            yield Check("FAILED", where, f"{path}: {existing} is no folder that this user may write to; set {where}")
        elif free < needed:
            yield Check("FAILED", where, f"{text}; free some space, or set {where} to a larger disk")
        elif free < needed + LOW_DISK_BYTES:
            yield Check("warning", where, f"{text}, which is little; free some space, or set {where} to a larger disk")
        else:
            yield Check("ok", where, text)


def state_bytes(run: RunConfig) -> int:
    """Size of the state that a joiner downloads: params and outer momentum in fp32. 0 if the tokenizer is missing."""
    from inner.data.tokenizer import build_tokenizer

    try:
        vocab_size = run.model.vocab_size or build_tokenizer(run.data.tokenizer).vocab_size
        return 2 * 4 * num_params(resolve_sizes(run.model, vocab_size))
    except (DataError, OSError):
        return 0


def check_key(path: Path) -> Check:
    """Check that the run key can be read, and only by this user."""
    try:
        read_run_key(path)
    except InputError as error:
        return Check("FAILED", "run key", str(error))
    if path.stat().st_mode & 0o004:
        return Check("warning", "run key", f"all users of this machine can read {path}; run `chmod 600 {path}`")
    return Check("ok", "run key", f"{path}: readable; the swarm shows whether it is the key of the run")


def load_usable_key(island: IslandConfig) -> RunKey | None:
    """The island's run key; None if it has none or it cannot be read, which `check_key` reports."""
    try:
        return load_run_key(island.run_key_file)
    except InputError:
        return None


def check_daemon() -> Check:
    """Check that hivemind's libp2p daemon starts on this machine."""
    from outer.membership.hivemind import serve_bootstrap
    from outer.network.event_loop import EventLoopThread

    loop, began = EventLoopThread(), time.monotonic()
    try:
        peer = loop.run(serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None), timeout_seconds=DAEMON_SECONDS)
        seconds = time.monotonic() - began
        loop.run(peer.close(), timeout_seconds=DAEMON_SECONDS)
    except (InputError, OSError, TimeoutError) as error:
        cause = str(error) or f"it does not start within {DAEMON_SECONDS:g} s"
        return Check("FAILED", "libp2p", f"{cause}; hivemind includes its daemon: run scripts/setup again")
    finally:
        loop.close()
    return Check("ok", "libp2p", f"hivemind's daemon starts, in {seconds:.1f} s")


def resolve_local_island(config: Config | None, overrides_only: Config, address: str | None) -> LocalIsland:
    """The island that the config file describes, or else the overrides and the kind of address."""
    if config is not None:
        return LocalIsland(config.run, config.for_island(config.island.index), config.outer.transport)
    island = overrides_only.for_island(overrides_only.island.index)
    is_tcp = address is not None and address.startswith("tcp://")
    return LocalIsland(None, island, "gloo" if is_tcp else "hivemind")
