"""A real NAT: a router masquerades what the nodes behind it (sites.py) send, as a home router does.

The kernel's own connection tracking does it (nftables). Nothing from outside reaches the inside, unless the inside has
begun it. Needs root, `ip` and `nft`.
"""

import shutil

from diloco.errors import ConfigError
from diloco.network_emulation.namespaces import Namespace, check_possible, run_inside

RULES = (
    'table ip nat { chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }; }\n'
    'table ip filter { chain through { type filter hook forward priority 0; iifname "eth0" ct state new drop; }; }\n'
)


def check_nat_possible() -> None:
    """Raise ConfigError unless this machine can make a NAT."""
    check_possible()
    if shutil.which("nft") is None:
        raise ConfigError("--nat needs the command `nft`, which is not found: install nftables")


def masquerade(router: Namespace) -> None:
    """Hide all that is behind a router. Raises ConfigError where that is not possible."""
    run_inside(router, ["nft", "-f", "-"], RULES)
