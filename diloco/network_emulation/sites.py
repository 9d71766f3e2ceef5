"""The nodes of one island: each in a namespace of its own, joined by a fast network, behind a
router.

    node 0  eth0 ---- n0  \\
    node 1  eth0 ---- n1   bridge "site" in the router's namespace   eth0 ---- the bridge between
            islands
    10.214.K.1, .2         10.214.K.254                              10.213.0.K

The router's link is the island's to all others, so the nodes share its rate. Their own links are
shaped to NODE_LINK.
"""

from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco.network_emulation.links import AccessLink, shape
from diloco.network_emulation.namespaces import Namespace, enable_forwarding, ip

NODE_LINK = AccessLink(10e9)
"""Link of a node to the other nodes of its island."""
BRIDGE = "site"
ROUTER = 254
MAX_NODES = 250


@dataclass(frozen=True)
class Site:
    """The nodes of an island, in order, behind their router.

    `network` is the range of their addresses, 10.214.K.0/24.
    """

    router: Namespace
    network: str
    nodes: tuple[Namespace, ...]

    @property
    def gateway(self) -> str:
        """Address of the router, as its nodes see it."""
        return f"{self.network.rpartition('.')[0]}.{ROUTER}"


def build_site(router: Namespace, num_nodes: int) -> Site:
    """Add namespaces for the nodes behind a router. They are removed with the router's network.

    The nodes reach everything. Nothing outside reaches them until `Net.route` makes their network
    known. Raises ConfigError.
    """
    if num_nodes > MAX_NODES:
        raise ConfigError(
            f"an island of a simulated network has {MAX_NODES} nodes at most; got {num_nodes}"
        )
    prefix = f"10.214.{router.host.rpartition('.')[2]}"
    ip("-n", router.name, "link", "add", BRIDGE, "up", "type", "bridge")
    ip("-n", router.name, "address", "add", f"{prefix}.{ROUTER}/24", "dev", BRIDGE)
    enable_forwarding(router)
    names = [
        Namespace(f"{router.name}-n{k}", f"{prefix}.{k + 1}", f"n{k}") for k in range(num_nodes)
    ]
    for node in names:
        _add_node(router, node, f"{prefix}.{ROUTER}")
    return Site(router, f"{prefix}.0/24", tuple(names))


def _add_node(router: Namespace, node: Namespace, gateway: str) -> None:
    ip("netns", "add", node.name)
    ip(
        "-n",
        node.name,
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        node.port,
        "netns",
        router.name,
    )
    ip("-n", node.name, "address", "add", f"{node.host}/24", "dev", "eth0")
    for location, device in ((node.name, "lo"), (node.name, "eth0"), (router.name, node.port)):
        ip("-n", location, "link", "set", device, "up")
    ip("-n", router.name, "link", "set", node.port, "master", BRIDGE)
    ip("-n", node.name, "route", "add", "default", "via", gateway)
    for location, device in ((node.name, "eth0"), (router.name, node.port)):
        shape(location, device, NODE_LINK)
