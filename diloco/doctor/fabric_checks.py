"""Checks that NCCL and gloo find the fast links between an island's nodes.

They look at interfaces, adapters and limits of memory.
"""

import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.doctor.checks import Check
from diloco.formatting import human_bytes

WHERE = "fabric"
INTERFACES = "sys/class/net"
ADAPTERS = "sys/class/infiniband"
SHARED_MEMORY = "dev/shm"
NCCL_FILE = "etc/nccl.conf"
"""NCCL reads its variables from this file, too. The environment outranks it."""
ACTIVE = "ACTIVE"
LARGEST_TIMEOUT = 31
"""NCCL_IB_TIMEOUT is a field of 5 bits: an adapter waits for 4.096 us * 2^value."""
LEAST_SHARED_BYTES = 1_000_000_000
"""NVIDIA's containers are started with at least as much shared memory."""


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    """ADAPTER:PORT, as NCCL_IB_HCA names it."""
    state: str
    rate: str


def check_fabric(
    environment: Mapping[str, str], root: Path = Path("/"), *, has_gpus: bool
) -> Iterator[Check]:
    """Check NCCL's and gloo's settings against the interfaces and adapters of this machine."""
    settings = {**read_nccl_file(root), **environment}
    checks = [*check_interfaces(settings, root), *check_adapters(settings, find_ports(root))]
    if has_gpus:
        checks += check_shared_memory(root)
    nothing = "no InfiniBand or RoCE adapter: nodes of an island use TCP"
    yield from checks or [Check("ok", WHERE, nothing)]


def read_nccl_file(root: Path) -> dict[str, str]:
    """Return the variables in NCCL's file for the whole machine; none if there is no such file."""
    try:
        lines = (root / NCCL_FILE).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    lines = [line for line in lines if "=" in line and not line.lstrip().startswith("#")]
    pairs = [line.partition("=") for line in lines]
    return {name.strip(): value.strip() for name, _, value in pairs}


def selects(setting: str) -> Callable[[str], bool]:
    """Return the test for names that NCCL makes of a list: `eth`, `=eth0,eth1` or `^docker`."""
    excludes = setting.startswith("^")
    body = setting.removeprefix("^")
    is_exact = body.startswith("=")
    words = tuple(word.strip() for word in body.removeprefix("=").split(",") if word.strip())

    def test(name: str) -> bool:
        matches = name in words if is_exact else name.startswith(words)
        return matches != excludes

    return test


def check_interfaces(settings: Mapping[str, str], root: Path) -> Iterator[Check]:
    """Check that the named network interfaces exist and are up."""
    folder = root / INTERFACES
    known = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if not (value := settings.get(variable, "")):
            continue
        is_chosen = selects(value) if variable.startswith("NCCL") else value.split(",").__contains__
        chosen = [name for name in known if is_chosen(name)]
        text = f"{variable}={value}"
        if not chosen:
            has = ", ".join(known)
            yield Check("FAILED", WHERE, f"{text} names no interface of this machine; it has {has}")
        elif down := [name for name in chosen if _read(folder / name / "operstate") == "down"]:
            cure = "bring it up, or name another interface"
            yield Check("FAILED", WHERE, f"{text}: {', '.join(down)} is down; {cure}")
        else:
            yield Check("ok", WHERE, f"{text}: {', '.join(chosen)}")


def find_ports(root: Path) -> list[Port]:
    """Return the ports of this machine's adapters, in the order of their names."""
    states = sorted((root / ADAPTERS).glob("*/ports/*/state"))
    return [
        Port(
            name=f"{path.parts[-4]}:{path.parts[-2]}",
            state=_read(path).rpartition(":")[2].strip(),
            rate=_read(path.with_name("rate")),
        )
        for path in states
    ]


def check_adapters(settings: Mapping[str, str], ports: Sequence[Port]) -> Iterator[Check]:
    """Check that NCCL uses the adapters of this machine, and that their ports are active."""
    value = settings.get("NCCL_IB_HCA", "")
    yield from check_timeout(settings.get("NCCL_IB_TIMEOUT"))
    if not ports:
        if value:
            cure = "take it out, or look why the adapter's driver is not loaded"
            text = f"NCCL_IB_HCA={value}, and this machine has no adapter: {cure}"
            yield Check("warning", WHERE, text)
        return
    if settings.get("NCCL_IB_DISABLE") == "1":
        text = f"NCCL_IB_DISABLE=1: NCCL leaves {_names(ports)} alone and uses TCP; take it out"
        yield Check("warning", WHERE, text)
        return
    chosen = list(ports)
    if value:
        is_chosen = selects(value)
        chosen = [port for port in ports if is_chosen(port.name) or is_chosen(_adapter(port))]
    active = [port for port in chosen if port.state == ACTIVE]
    if not chosen:
        text = f"NCCL_IB_HCA={value} names no adapter of this machine; it has {_names(ports)}"
        yield Check("FAILED", WHERE, text)
    elif not active:
        told = ", ".join(f"{port.name} is {port.state}" for port in chosen)
        cure = "NCCL uses TCP; check cables and subnet manager"
        yield Check("warning", WHERE, f"no port is active ({told}): {cure}")
    else:
        unused = [port for port in chosen if port not in active]
        text = f"{', '.join(f'{port.name} {port.rate}' for port in active)}"
        text += f"; not active: {_names(unused)}" if unused else ""
        yield Check("warning" if unused else "ok", WHERE, text)
    yield from check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def check_timeout(value: str | None) -> Iterator[Check]:
    """Check the time that an adapter waits for an answer."""
    if value is not None and not (value.isdecimal() and int(value) <= LARGEST_TIMEOUT):
        allowed = f"a whole number from 0 to {LARGEST_TIMEOUT}"
        yield Check("warning", WHERE, f"NCCL_IB_TIMEOUT={value}; allowed: {allowed}")


def check_locked_memory(limit: int) -> Iterator[Check]:
    """Check that a process may lock as much memory as its adapters need. `limit`: in bytes."""
    if limit != resource.RLIM_INFINITY:
        text = f"a process may lock {human_bytes(limit)} of memory, adapters need more"
        cure = (
            "ulimit -l unlimited, LimitMEMLOCK=infinity of systemd, or memlock=-1 of the container"
        )
        yield Check("warning", WHERE, f"{text}: {cure}")


def check_shared_memory(root: Path) -> Iterator[Check]:
    """Check that the ranks of a node have shared memory to exchange data through."""
    try:
        found = os.statvfs(root / SHARED_MEMORY)
    except OSError:
        return
    size = found.f_frsize * found.f_blocks
    if size < LEAST_SHARED_BYTES:
        text = f"/dev/shm has {human_bytes(size)}, in which NCCL's ranks exchange data"
        cure = "give the container 1 GB (--shm-size=1g; on Kubernetes an emptyDir in memory)"
        yield Check("warning", WHERE, f"{text}: {cure}")


def _names(ports: Sequence[Port]) -> str:
    return ", ".join(port.name for port in ports)


def _adapter(port: Port) -> str:
    return port.name.partition(":")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
