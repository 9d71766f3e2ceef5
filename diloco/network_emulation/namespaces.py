"""Network namespaces on one machine, joined by a bridge, whose links can be cut. Needs root, `ip` and `tc`.

    bootstrap  eth0 ---- v1  \\
    island 0   eth0 ---- v2   bridge (in a namespace of its own)
    island 1   eth0 ---- v3  /

Where links have a delay that the kernel cannot make, a relay (diloco/relay.py) is in the place of the bridge. What
shapes the links, and counts their bytes, is in diloco/links.py.

A cut gives both sides a link-layer address that nobody has: what is sent gets lost without a word to the sender, as on
a broken link. It needs no packet filter, which not every kernel has.
"""

import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from diloco.config import ConfigError
from diloco.relay import address_of
from diloco.signals import end_with_parent

PREFIX = "diloco-net"
COMMAND_SECONDS = 10
MAX_NAMESPACES = 250
NOBODY = "02:00:00:00:00:00"
"""A link-layer address (locally administered) of no interface."""
NEEDED_BY = "--link, --netns and faults of the kind cut"


@dataclass(frozen=True)
class Namespace:
    """One participant's namespace; `host` is its address, `port` the bridge's end of its link."""

    name: str
    host: str
    port: str

    def command(self, *words: str) -> list[str]:
        """The words of a command, to be run inside. The process stays the same: its pid is the command's."""
        return ["ip", "netns", "exec", self.name, *words]


class Relay:
    """The process that is a net's switch, and delays what passes (diloco/relay.py)."""

    def __init__(self, namespace: str) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", "diloco.relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def add(self, number: int, device: str, delay: float) -> None:
        """Carry the frames of one more port, when this returns. Raises ConfigError if it cannot."""
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None and answers is not None, "both are pipes"
        with suppress(BrokenPipeError):
            commands.write(f"{number} {device} {delay}\n".encode())
            commands.flush()
        ready, _, _ = select.select([answers], [], [], COMMAND_SECONDS)
        if not ready or not answers.readline():
            raise ConfigError("the relay that delays what passes between islands has failed; its error is above")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=COMMAND_SECONDS)


class Net:
    """Namespaces on a bridge of their own, or on a relay. Made by `opened_net`."""

    def __init__(self, prefix: str) -> None:
        self.bridge = f"{prefix}-bridge"
        self.relay: Relay | None = None
        self._prefix = prefix
        self._namespaces: list[Namespace] = []
        self._cuts: Counter[tuple[str, str]] = Counter()
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "up", "type", "bridge")

    def start_relay(self) -> None:
        """From now on namespaces are connected by a relay, which delays what passes."""
        assert not self._namespaces, "a namespace on the bridge does not see those on the relay"
        self.relay = Relay(self.bridge)

    def add(self, delay: float = 0.0) -> Namespace:
        """One more namespace, connected with all others; a relay holds each frame from or to it `delay` seconds."""
        number = len(self._namespaces) + 1
        if number > MAX_NAMESPACES:
            raise ConfigError(f"a simulated network holds {MAX_NAMESPACES} namespaces at most")
        made = Namespace(f"{self._prefix}-{number}", f"10.213.0.{number}", f"v{number}")
        self._namespaces.append(made)
        ip("netns", "add", made.name)
        pair = ("type", "veth", "peer", "name", made.port, "netns", self.bridge)
        ip("-n", made.name, "link", "add", "eth0", "address", address_of(number), *pair)
        ip("-n", made.name, "address", "add", f"{made.host}/24", "dev", "eth0")
        ip("-n", made.name, "link", "set", "lo", "up")
        ip("-n", made.name, "link", "set", "eth0", "up")
        if self.relay is None:
            assert not delay, "a bridge delays nothing"
            ip("-n", self.bridge, "link", "set", made.port, "master", "bridge", "up")
        else:
            ip("-n", self.bridge, "link", "set", made.port, "up")
            self.relay.add(number, made.port, delay)
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
    net = None
    try:
        net = Net(prefix)
        yield net
    finally:
        if net is not None and net.relay is not None:
            net.relay.close()
        remove([name for name in names() if name.startswith(f"{prefix}-")])


def check_possible() -> None:
    """Raise ConfigError unless this process may make namespaces."""
    if os.geteuid() != 0:
        raise ConfigError(
            f"{NEEDED_BY} put each island into a network namespace, which needs root; "
            f"this is user {os.geteuid()}. Run it as root, for example with sudo, or in a container with NET_ADMIN"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"{NEEDED_BY} need the commands `ip` and `tc`; not found: {', '.join(missing)}. "
            "Install iproute2 (where tc is a package of its own: iproute-tc)"
        )


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
