"""A real NAT: a namespace behind another one, which forwards and masquerades what it sends, as a home router does.

    inside   eth0 ---- inside   the namespace at the bridge   eth0 ---- bridge
    192.168.77.2       192.168.77.1

The kernel's own connection tracking does it (nftables). Nothing from outside reaches the inside, unless the inside has
begun it. Needs root, `ip` and `nft`.
"""

import shutil
import subprocess

from diloco.errors import ConfigError
from diloco.network_emulation.namespaces import COMMAND_SECONDS, Namespace, check_possible, ip

ROUTER, INSIDE = "192.168.77.1", "192.168.77.2"
RULES = (
    'table ip nat { chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }; }\n'
    'table ip filter { chain through { type filter hook forward priority 0; iifname "eth0" ct state new drop; }; }\n'
)


def check_nat_possible() -> None:
    """Raise ConfigError unless this machine can make a NAT."""
    check_possible()
    if shutil.which("nft") is None:
        raise ConfigError("--nat needs the command `nft`, which is not found: install nftables")


def put_behind_nat(router: Namespace) -> Namespace:
    """Add a namespace whose only way out is `router`, which masquerades for it, and return it.

    It is removed with the others of its network. Raises ConfigError where that is not possible.
    """
    inside = Namespace(f"{router.name}-inside", INSIDE, "inside")
    ip("netns", "add", inside.name)
    pair = ("type", "veth", "peer", "name", inside.port, "netns", router.name)
    ip("-n", inside.name, "link", "add", "eth0", *pair)
    for place, device, host in ((inside, "eth0", INSIDE), (router, inside.port, ROUTER)):
        ip("-n", place.name, "address", "add", f"{host}/24", "dev", device)
        ip("-n", place.name, "link", "set", device, "up")
    ip("-n", inside.name, "link", "set", "lo", "up")
    ip("-n", inside.name, "route", "add", "default", "via", ROUTER)
    _run_in(router, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    _run_in(router, ["nft", "-f", "-"], RULES)
    return inside


def _run_in(place: Namespace, words: list[str], said: str = "") -> None:
    command = place.command(*words)
    done = subprocess.run(command, input=said, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise ConfigError(f"the NAT cannot be set up: {' '.join(words)}: {done.stderr.strip()}")
