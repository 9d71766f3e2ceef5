"""What a router does with the nodes behind it (sites.py): a real NAT as in a home, or a cluster that lets nothing out.

The kernel's own connection tracking does it (nftables). Nothing from outside reaches the inside of a NAT, unless the
inside has begun it. Needs root, `ip` and `nft`, and `conntrack` where a NAT is to forget its connections.
"""

import shutil

from diloco.errors import ConfigError
from diloco.network_emulation.namespaces import Namespace, check_possible, run_inside
from diloco.network_emulation.sites import BRIDGE

BETWEEN_NODES = f'iifname "{BRIDGE}" oifname "{BRIDGE}" accept; '
"""Where the kernel lets a bridge's frames pass its filters (br_netfilter), those between nodes come by, too."""
NAT = (
    'table ip nat { chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }; }\n'
    f"table ip filter {{ chain through {{ type filter hook forward priority 0; {BETWEEN_NODES}"
    # A connection that the router has forgotten is not taken up again in its middle.
    'iifname "eth0" ct state new drop; tcp flags & syn == 0 ct state new drop; }; }\n'
)
CLOSED = (
    f"table ip filter {{ chain through {{ type filter hook forward priority 0; policy drop; {BETWEEN_NODES}}}; }}\n"
)


def check_nat_possible(option: str, *, forgets: bool = False) -> None:
    """Raise ConfigError unless this machine can make a NAT, which also `forgets`. `option` asks for it."""
    check_possible()
    for tool, package in (("nft", "nftables"), *([("conntrack", "conntrack")] if forgets else [])):
        if shutil.which(tool) is None:
            raise ConfigError(f"{option} needs the command `{tool}`, which is not found: install {package}")


def masquerade(router: Namespace) -> None:
    """Hide all that is behind a router. Raises ConfigError where that is not possible."""
    run_inside(router, ["nft", "-f", "-"], NAT)


def enclose(router: Namespace) -> None:
    """Let a router pass on nothing in either direction. What runs on it, as a proxy, has a network all the same."""
    run_inside(router, ["nft", "-f", "-"], CLOSED)


def forget_connections(router: Namespace) -> None:
    """Let a NAT lose its mappings, as one that is started again. Its connections are dead then, and no end is told."""
    run_inside(router, ["conntrack", "--flush"])
