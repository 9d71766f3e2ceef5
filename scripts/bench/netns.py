"""Network namespaces whose links are shaped to a rate, and their counters. Needs root; diloco/netns.py makes them.

Both ends of a link are shaped, so an island's up and down directions have the rate each.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.netns import Namespace, opened_net, run_tool

BURST = "128kb"
"""What may leave at once: 10 ms at 100 Mbit/s; less costs rate at 1 Gbit/s."""
QUEUE = "50ms"
"""The longest queue before a link drops packets."""


@contextmanager
def shaped_namespaces(num_islands: int, rate: str) -> Iterator[list[Namespace]]:
    """Namespaces whose links have `rate` in tc's spelling; removed at the end, however it comes."""
    with opened_net() as net:
        islands = [net.add() for _ in range(num_islands)]
        for island in islands:
            for name, device in ((island.name, "eth0"), (net.bridge, island.port)):
                shape = ("rate", rate, "burst", BURST, "latency", QUEUE)
                run_tool("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield islands


def sent_bytes(island: Namespace) -> int:
    """Bytes of frames that have left: what the shaper counts, each packet's headers included."""
    text = run_tool("tc", "-n", island.name, "-s", "-j", "qdisc", "show", "dev", "eth0", "root")
    return json.loads(text)[0]["bytes"]
