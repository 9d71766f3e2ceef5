"""Network namespaces for islands on one machine, joined by a bridge, each link shaped to a rate. Needs root.

    island 0  eth0 ---- v0  \
                             bridge (in a namespace of its own)
    island 1  eth0 ---- v1  /

Both ends of a link are shaped, so an island's up and down directions have the rate each.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_SECONDS = 10
BURST = "128kb"
"""What may leave at once: 10 ms at 100 Mbit/s; less costs rate at 1 Gbit/s."""
QUEUE = "50ms"
"""The longest queue before a link drops packets."""


@dataclass(frozen=True)
class Namespace:
    """One island's namespace; `host` is its address."""

    name: str
    host: str

    def command(self, *words: str) -> list[str]:
        """The words of a command, to be run inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def sent_bytes(self) -> int:
        """Bytes of frames that have left: what the shaper counts, each packet's headers included."""
        text = _run("tc", "-n", self.name, "-s", "-j", "qdisc", "show", "dev", "eth0", "root")
        return json.loads(text)[0]["bytes"]


@contextmanager
def shaped_namespaces(num_islands: int, rate: str) -> Iterator[list[Namespace]]:
    """Namespaces whose links have `rate` in tc's spelling; removed at the end, however it comes."""
    prefix = f"outer-bench-{os.getpid()}"
    bridge = f"{prefix}-bridge"
    islands = [Namespace(f"{prefix}-{i}", f"10.213.0.{i + 1}") for i in range(num_islands)]
    names = [bridge, *(island.name for island in islands)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", bridge, "link", "add", "bridge", "up", "type", "bridge")
        for index, island in enumerate(islands):
            _plug(island, bridge, f"v{index}", rate)
        yield islands
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=COMMAND_SECONDS)


def _plug(island: Namespace, bridge: str, port: str, rate: str) -> None:
    """Connect an island's eth0 with a port of the bridge."""
    _run("ip", "-n", island.name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", bridge)
    _run("ip", "-n", island.name, "address", "add", f"{island.host}/24", "dev", "eth0")
    _run("ip", "-n", island.name, "link", "set", "lo", "up")
    _run("ip", "-n", island.name, "link", "set", "eth0", "up")
    _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
    for name, device in ((island.name, "eth0"), (bridge, port)):
        shape = ("rate", rate, "burst", BURST, "latency", QUEUE)
        _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _run(*words: str) -> str:
    """What the command prints. Raises RuntimeError with its complaint."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
