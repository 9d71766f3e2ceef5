"""Rules for the router of an island's nodes (sites.py): a home's NAT, or a closed cluster.

The kernel's own connection tracking applies them (nftables). Nothing from outside a NAT reaches the
inside, unless the inside has begun the connection. Needs root, `ip` and `nft`, and `conntrack` for
a NAT that is to forget its connections.
"""

import shutil

from diloco.errors import ConfigError
from diloco.network_emulation.namespaces import Namespace, check_possible, run_inside
from diloco.network_emulation.sites import BRIDGE

BETWEEN_NODES = f'iifname "{BRIDGE}" oifname "{BRIDGE}" accept; '
"""Accepts frames between nodes: some kernels filter a bridge's frames, too (br_netfilter)."""
NAT = (
    'table ip nat { chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; '
    "}; }\n"
    f"table ip filter {{ chain through {{ type filter hook forward priority 0; {BETWEEN_NODES}"
    # A connection that the router has forgotten cannot go on: a new one must begin with a SYN.
    'iifname "eth0" ct state new drop; tcp flags & syn == 0 ct state new drop; }; }\n'
)
CLOSED = (
    f"table ip filter {{ chain through {{ type filter hook forward priority 0; policy drop; "
    f"{BETWEEN_NODES}}}; }}\n"
)


def check_nat_possible(option: str, *, forgets: bool = False) -> None:
    """Raise ConfigError unless this machine can make the NAT that `option` needs.

    `forgets`: the NAT must be able to forget its connections.
    """
    check_possible()
    for tool, package in (("nft", "nftables"), *([("conntrack", "conntrack")] if forgets else [])):
        if shutil.which(tool) is None:
            raise ConfigError(
                f"{option} needs the command `{tool}`, which is not found: install {package}"
            )


def masquerade(router: Namespace) -> None:
    """Make a router hide all nodes behind it. Raises ConfigError where that is not possible."""
    run_inside(router, ["nft", "-f", "-"], NAT)


def enclose(router: Namespace) -> None:
    """Make a router forward nothing in either direction.

    A program on the router itself, such as a proxy, still has a network.
    """
    run_inside(router, ["nft", "-f", "-"], CLOSED)


def forget_connections(router: Namespace) -> None:
    """Make a NAT lose its mappings, as if it had been restarted.

    Its connections are then dead, and neither end is notified.
    """
    run_inside(router, ["conntrack", "--flush"])
