"""Network namespaces on one machine, joined by a bridge, with links that can be cut. Needs root,
`ip` and `tc`.

    bootstrap  eth0 ---- v1  \\
    island 0   eth0 ---- v2   bridge (in a namespace of its own)
    island 1   eth0 ---- v3  /

Where the kernel cannot delay frames, a delay relay in user space (delay_relay.py) replaces the
bridge. links.py shapes the links and counts their bytes.

A cut maps each side's address, on the other side, to a link-layer address that no interface has.
Frames are lost without notice to the sender, as on a broken link. This needs no packet filter,
which not every kernel has.
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

from diloco.errors import ConfigError
from diloco.network_emulation.delay_relay import link_layer_address
from diloco.watchdog.signals import end_with_parent

PREFIX = "diloco-net"
COMMAND_SECONDS = 60
MAX_NAMESPACES = 250
NOBODY = "02:00:00:00:00:00"
"""A link-layer address (locally administered) that no interface has."""
OWN_NAMESPACE = "/proc/self/ns/net"
NEEDED_BY = "--link, --netns, --nodes, --nat, --proxy and faults of the kind cut"


@dataclass(frozen=True)
class Namespace:
    """A network namespace. `host` is its IP address, `port` the device at the bridge's end of its
    link.
    """

    name: str
    host: str
    port: str

    def command(self, *words: str) -> list[str]:
        """Wrap a command so that it runs in the namespace.

        `ip` replaces itself by the command, so the pid is the command's.
        """
        return ["ip", "netns", "exec", self.name, *words]


class DelayRelay:
    """The process that replaces the bridge and delays every frame
    (diloco/network_emulation/delay_relay.py).
    """

    def __init__(self, namespace: str) -> None:
        self._process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                sys.executable,
                "-m",
                "diloco.network_emulation.delay_relay",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    @property
    def pid(self) -> int:
        """Process id of the relay."""
        return self._process.pid

    def add(self, number: int, device: str, delay: float) -> None:
        """Add a port that delays frames by `delay` seconds. Raises ConfigError if the relay does
        not confirm it.
        """
        commands = self._process.stdin
        answers = self._process.stdout
        assert commands is not None and answers is not None, "both are pipes"
        with suppress(BrokenPipeError):
            commands.write(f"{number} {device} {delay}\n".encode())
            commands.flush()
        ready, _, _ = select.select([answers], [], [], COMMAND_SECONDS)
        if not ready or not answers.readline():
            raise ConfigError(
                "the relay that delays frames between islands has failed; its error is above"
            )

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.communicate(timeout=COMMAND_SECONDS)


class Net:
    """Namespaces joined by a bridge of their own or by a delay relay. Made by `open_net`."""

    def __init__(self, prefix: str) -> None:
        self.bridge = f"{prefix}-bridge"
        self.relay: DelayRelay | None = None
        self._prefix = prefix
        self._namespaces: list[Namespace] = []
        self._routes: list[tuple[str, Namespace]] = []
        self._cuts: Counter[tuple[str, str]] = Counter()
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "up", "type", "bridge")

    def start_relay(self) -> None:
        """Connect all namespaces added from now on by a delay relay."""
        assert not self._namespaces, "namespaces on the bridge cannot reach namespaces on the relay"
        self.relay = DelayRelay(self.bridge)

    def add(self, delay: float = 0.0) -> Namespace:
        """Add a namespace connected to all others. A relay holds each frame from or to it for
        `delay` seconds.
        """
        number = len(self._namespaces) + 1
        if number > MAX_NAMESPACES:
            raise ConfigError(f"a simulated network holds {MAX_NAMESPACES} namespaces at most")
        namespace = Namespace(f"{self._prefix}-{number}", f"10.213.0.{number}", f"v{number}")
        self._namespaces.append(namespace)
        ip("netns", "add", namespace.name)
        pair = ("type", "veth", "peer", "name", namespace.port, "netns", self.bridge)
        ip(
            "-n",
            namespace.name,
            "link",
            "add",
            "eth0",
            "address",
            link_layer_address(number),
            *pair,
        )
        ip("-n", namespace.name, "address", "add", f"{namespace.host}/24", "dev", "eth0")
        ip("-n", namespace.name, "link", "set", "lo", "up")
        ip("-n", namespace.name, "link", "set", "eth0", "up")
        if self.relay is None:
            assert not delay, "a bridge delays nothing"
            ip("-n", self.bridge, "link", "set", namespace.port, "master", "bridge", "up")
        else:
            ip("-n", self.bridge, "link", "set", namespace.port, "up")
            self.relay.add(number, namespace.port, delay)
        for network, router in self._routes:
            add_route(namespace, network, router)
        return namespace

    def route(self, network: str, router: Namespace) -> None:
        """Make a network behind a namespace known to all others, including those added later."""
        for other in self._namespaces:
            if other != router:
                add_route(other, network, router)
        self._routes.append((network, router))

    def cut(self, some: Sequence[Namespace], others: Sequence[Namespace]) -> None:
        """Cut every pair across the two sides. A pair that is cut twice must be healed twice."""
        for one, other in directions(some, others):
            self._cuts[one.name, other.name] += 1
            ip(
                "-n",
                one.name,
                "neigh",
                "replace",
                other.host,
                "lladdr",
                NOBODY,
                "dev",
                "eth0",
                "nud",
                "permanent",
            )

    def heal(self, some: Sequence[Namespace], others: Sequence[Namespace]) -> None:
        """Undo one `cut` of the same sides."""
        for one, other in directions(some, others):
            self._cuts[one.name, other.name] -= 1
            if not self._cuts[one.name, other.name]:
                ip("-n", one.name, "neigh", "delete", other.host, "dev", "eth0")


def add_route(namespace: Namespace, network: str, router: Namespace) -> None:
    """Let a namespace send to a network through a router, which is a namespace beside it."""
    ip("-n", namespace.name, "route", "add", network, "via", router.host)


def enable_forwarding(router: Namespace) -> None:
    """Let a namespace forward packets that are not for itself. Raises ConfigError."""
    run_inside(router, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])


def directions(
    some: Sequence[Namespace], others: Sequence[Namespace]
) -> list[tuple[Namespace, Namespace]]:
    """Return all pairs across the two sides, in both directions."""
    pairs = [(one, other) for one in some for other in others]
    return pairs + [(other, one) for one, other in pairs]


@contextmanager
def open_net() -> Iterator[Net]:
    """Open an empty network and remove it at exit. Raises ConfigError where namespaces are not
    possible.
    """
    check_possible()
    delete_stale_namespaces()
    prefix = f"{PREFIX}-{os.getpid()}"
    net = None
    try:
        net = Net(prefix)
        yield net
    finally:
        if net is not None and net.relay is not None:
            net.relay.close()
        delete_namespaces([name for name in list_namespaces() if name.startswith(f"{prefix}-")])


def check_possible() -> None:
    """Raise ConfigError unless this process may create namespaces."""
    if not os.path.exists(OWN_NAMESPACE):
        raise ConfigError(
            f"{NEEDED_BY} put each island into a network namespace, which Linux alone has; this "
            f"system has no {OWN_NAMESPACE}; leave them out, or run the simulation on Linux"
        )
    if os.geteuid() != 0:
        raise ConfigError(
            f"{NEEDED_BY} put each island into a network namespace, which needs root; "
            f"this is user {os.geteuid()}. Run it as root, for example with sudo, or in a "
            "container with NET_ADMIN"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"{NEEDED_BY} need the commands `ip` and `tc`; not found: {', '.join(missing)}. "
            "Install iproute2 (where tc is a package of its own: iproute-tc)"
        )


def delete_stale_namespaces() -> None:
    """Delete the namespaces of processes that no longer run."""
    delete_namespaces(
        [
            name
            for name in list_namespaces()
            if name.startswith(f"{PREFIX}-") and not is_alive(owner_pid(name))
        ]
    )


def owner_pid(name: str) -> int:
    """Return the pid of the process that made the namespace PREFIX-<pid>-...; 0 for any other
    name.
    """
    pid = name.removeprefix(f"{PREFIX}-").partition("-")[0]
    return int(pid) if pid.isdigit() else 0


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists; False for 0."""
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def list_namespaces() -> list[str]:
    """Return the names of all named namespaces of this machine."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]


def delete_namespaces(namespaces: Sequence[str]) -> None:
    """Delete the namespaces. It is no error if one does not exist."""
    for name in namespaces:
        subprocess.run(
            ["ip", "netns", "delete", name],
            check=False,
            capture_output=True,
            timeout=COMMAND_SECONDS,
        )


def ip(*words: str) -> str:
    """Run `ip` and return its output. Raises ConfigError with its error text."""
    return run_tool("ip", *words)


def run_inside(namespace: Namespace, words: Sequence[str], text: str = "") -> None:
    """Run a command in a namespace, with `text` on stdin. Raises ConfigError with its error
    text.
    """
    run_tool(*namespace.command(*words), text=text)


def run_tool(*words: str, text: str = "") -> str:
    """Run a command with `text` on stdin and return its output. Raises ConfigError with its error
    text.
    """
    done = subprocess.run(
        words, input=text, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    if done.returncode:
        raise ConfigError(
            f"the network of the simulation cannot be set up: {' '.join(words)}: "
            f"{done.stderr.strip()}"
        )
    return done.stdout
