"""Network namespaces on one machine, joined by a bridge, whose links can be cut. Needs root and the command `ip`.

    bootstrap  eth0 ---- v1  \\
    island 0   eth0 ---- v2   bridge (in a namespace of its own)
    island 1   eth0 ---- v3  /

A cut gives both sides a link-layer address that nobody has: what is sent gets lost without a word to the sender, as on
a broken link. It needs no packet filter, which not every kernel has.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from diloco.config import ConfigError

PREFIX = "diloco-net"
COMMAND_SECONDS = 10
MAX_NAMESPACES = 250
NOBODY = "02:00:00:00:00:00"
"""A link-layer address (locally administered) of no interface."""


@dataclass(frozen=True)
class Namespace:
    """One participant's namespace; `host` is its address, `port` the bridge's end of its link."""

    name: str
    host: str
    port: str

    def command(self, *words: str) -> list[str]:
        """The words of a command, to be run inside. The process stays the same: its pid is the command's."""
        return ["ip", "netns", "exec", self.name, *words]


class Net:
    """Namespaces on a bridge of their own. Made by `opened_net`."""

    def __init__(self, prefix: str) -> None:
        self.bridge = f"{prefix}-bridge"
        self._prefix = prefix
        self._namespaces: list[Namespace] = []
        self._cuts: Counter[tuple[str, str]] = Counter()
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "up", "type", "bridge")

    def add(self) -> Namespace:
        """One more namespace, connected with all others."""
        number = len(self._namespaces) + 1
        if number > MAX_NAMESPACES:
            raise ConfigError(f"a simulated network holds {MAX_NAMESPACES} namespaces at most")
        made = Namespace(f"{self._prefix}-{number}", f"10.213.0.{number}", f"v{number}")
        ip("netns", "add", made.name)
        ip("-n", made.name, "link", "add", "eth0", "type", "veth", "peer", "name", made.port, "netns", self.bridge)
        ip("-n", made.name, "address", "add", f"{made.host}/24", "dev", "eth0")
        ip("-n", made.name, "link", "set", "lo", "up")
        ip("-n", made.name, "link", "set", "eth0", "up")
        ip("-n", self.bridge, "link", "set", made.port, "master", "bridge", "up")
        self._namespaces.append(made)
        return made

    def cut(self, some: Sequence[Namespace], others: Sequence[Namespace]) -> None:
        """From now on nothing passes between any of the one and any of the other side. Cuts of a pair add up."""
        for one, other in directions(some, others):
            self._cuts[one.name, other.name] += 1
            ip("-n", one.name, "neigh", "replace", other.host, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def heal(self, some: Sequence[Namespace], others: Sequence[Namespace]) -> None:
        """Undo one such cut."""
        for one, other in directions(some, others):
            self._cuts[one.name, other.name] -= 1
            if not self._cuts[one.name, other.name]:
                ip("-n", one.name, "neigh", "delete", other.host, "dev", "eth0")


def directions(some: Sequence[Namespace], others: Sequence[Namespace]) -> list[tuple[Namespace, Namespace]]:
    """Every pair of one side's with the other's, both ways."""
    pairs = [(one, other) for one in some for other in others]
    return pairs + [(other, one) for one, other in pairs]


@contextmanager
def opened_net() -> Iterator[Net]:
    """A net that is gone at the end, however it comes. Raises ConfigError where there can be none."""
    check_possible()
    remove_stale()
    prefix = f"{PREFIX}-{os.getpid()}"
    try:
        yield Net(prefix)
    finally:
        remove([name for name in names() if name.startswith(f"{prefix}-")])


def check_possible() -> None:
    """Raise ConfigError unless this process may make namespaces."""
    if os.geteuid() != 0:
        raise ConfigError(
            "--netns, and faults of the kind cut, put each island into a network namespace, which needs root; "
            f"this is user {os.geteuid()}. Run it as root, for example with sudo, or in a container with NET_ADMIN"
        )
    try:
        names()
    except FileNotFoundError:
        raise ConfigError("--netns, and faults of the kind cut, need the command `ip`: install iproute2") from None


def remove_stale() -> None:
    """Remove the namespaces of processes that ended without doing so."""
    remove([name for name in names() if name.startswith(f"{PREFIX}-") and not is_alive(owner(name))])


def owner(name: str) -> int:
    """The process that made the namespace of this name: PREFIX-<pid>-...; 0 if the name says nothing."""
    pid = name.removeprefix(f"{PREFIX}-").partition("-")[0]
    return int(pid) if pid.isdigit() else 0


def is_alive(pid: int) -> bool:
    """Whether the process exists; 0 is none."""
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def names() -> list[str]:
    """All namespaces of this machine that have names."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]


def remove(namespaces: Sequence[str]) -> None:
    """Delete them; what has gone already is no error."""
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=COMMAND_SECONDS)


def ip(*words: str) -> str:
    """What `ip` prints. Raises ConfigError with its complaint."""
    return run_tool("ip", *words)


def run_tool(*words: str) -> str:
    """What the command prints. Raises ConfigError with its complaint."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise ConfigError(f"the network of the simulation cannot be made: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
