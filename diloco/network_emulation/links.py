"""The islands' access links: parse `--link`, shape the links with tc, and count the bytes they
carry.

tc's token bucket shapes both ends of a link, so each direction has the full rate. Each of two
islands' links adds half of the round trip between them: netem delays the frames, or the delay relay
where the kernel has no netem.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from diloco.errors import ConfigError
from diloco.faults.spec import Target
from diloco.formatting import parse_bits_per_second, parse_seconds
from diloco.network_emulation.namespaces import Namespace, Net, open_net, run_tool

BURST_SECONDS = 0.004
"""Length of the burst that a link lets through after a pause.

A transfer may end earlier by this time.
"""
MIN_BURST = 4_000
MAX_BURST = 131_072
"""Limits of the burst, in bytes. A frame has up to 1514 bytes.

If the burst allows it, 64 kB of a TCP stream pass as one frame.
"""
TIMER_SECONDS = 0.001
"""Shortest burst. With a shorter one, late timers would lower the rate."""
QUEUE_SECONDS = 0.05
MIN_QUEUE = 32_000
"""A link drops frames when its queue exceeds QUEUE_SECONDS, a round trip, and MIN_QUEUE bytes."""
FRAME_BYTES = 1500
"""Bytes per frame, because netem counts its queue in frames."""
MIN_RATE = 64e3
MAX_RATE = 100e9
MAX_RTT = 10.0
RELAY_RATE = 2e9
"""Total throughput of the delay relay on two cores, bits per second; measured with
scripts/bench/outer/links.py.
"""
SPELLING = (
    "[ISLAND:]RATE[,rtt=TIME], for example --link 100mbit, --link 1gbit,rtt=50ms or --link 0:50mbit"
)


@dataclass(frozen=True)
class AccessLink:
    """An access link. `rate`: bit/s in each direction, of whole frames.

    `rtt`: seconds between two islands that have this link.
    """

    rate: float
    rtt: float = 0.0


@dataclass(frozen=True)
class Links:
    """The links of a run: a default one, and the links of islands that have their own, by index.

    Without a default, other links are not shaped.
    """

    default: AccessLink | None = None
    own: Mapping[int, AccessLink] = field(default_factory=dict)

    def of(self, target: Target) -> AccessLink | None:
        """Return the link of an island, or of the bootstrap process."""
        return self.default if isinstance(target, str) else self.own.get(target, self.default)

    @property
    def all(self) -> list[AccessLink]:
        """All links that are configured."""
        return [*([self.default] if self.default else []), *self.own.values()]


def parse_links(texts: Sequence[str], num_islands: int) -> Links:
    """Parse all `--link` options of a run. Raises ConfigError."""
    default = None
    own = {}
    for text in texts:
        island, link = parse_link(text)
        if island is None and default is None:
            default = link
        elif island is not None and island not in own and island < num_islands:
            own[island] = link
        elif island is not None and island >= num_islands:
            raise ConfigError(
                f"--link {text}: there is no island {island}; islands are 0 to {num_islands - 1}"
            )
        else:
            whose = "all islands" if island is None else f"island {island}"
            raise ConfigError(f"--link {text}: the link of {whose} is given twice; give it once")
    return Links(default, own)


def parse_link(text: str) -> tuple[int | None, AccessLink]:
    """Parse one `--link` option. Return the island's index (None: all islands) and the link.

    Raises ConfigError.
    """
    island, colon, rest = text.rpartition(":")
    rate, *options = rest.split(",")
    if (
        (colon and not island.isdecimal())
        or len(options) > 1
        or any(not o.startswith("rtt=") for o in options)
    ):
        raise ConfigError(f"--link {text}: allowed: {SPELLING}")
    try:
        link = AccessLink(
            parse_bits_per_second(rate),
            *(parse_seconds(option.removeprefix("rtt=")) for option in options),
        )
    except ConfigError as error:
        raise ConfigError(f"--link {text}: {error}; allowed: {SPELLING}") from None
    if not MIN_RATE <= link.rate <= MAX_RATE or link.rtt > MAX_RTT:
        raise ConfigError(
            f"--link {text}: allowed: a rate of 64kbit to 100gbit and an rtt of at most "
            f"{MAX_RTT:.0f}s"
        )
    return (int(island) if colon else None), link


@contextmanager
def open_links(links: Links) -> Iterator[Net]:
    """Open a network for these links and remove it at exit. `attach` adds islands to it. Raises
    ConfigError.
    """
    with open_net() as net:
        if any(link.rtt for link in links.all) and not has_netem(net):
            net.start_relay()
        yield net


@contextmanager
def open_linked_namespaces(count: int, link: AccessLink) -> Iterator[list[Namespace]]:
    """Open `count` namespaces with a link each and remove them at exit. Raises ConfigError."""
    with open_links(Links(link)) as net:
        yield [attach(net, link) for _ in range(count)]


def attach(net: Net, link: AccessLink | None) -> Namespace:
    """Add a namespace to a network made by `open_links`. Without a link its traffic is counted but
    not shaped.
    """
    # A round trip passes four link ends: both ends of both islands' links.
    delay = link.rtt / 4 if link is not None else 0.0
    namespace = net.add(delay if net.relay is not None else 0.0)
    for location, device in ((namespace.name, "eth0"), (net.bridge, namespace.port)):
        shape(location, device, link, delay if net.relay is None else 0.0)
    return namespace


def shape(location: str, device: str, link: AccessLink | None, delay: float = 0.0) -> None:
    """Limit what a device in a namespace sends to the link's rate, and delay it by `delay`.

    The delay is in seconds.
    """
    add = ("tc", "-n", location, "qdisc", "add", "dev", device)
    if link is None:
        # A veth without a queue would count 64 kB of a stream as one frame.
        run_tool(*add, "root", "pfifo")
        return
    burst = burst_bytes(link)
    queue = queue_bytes(link)
    rate = ("rate", f"{link.rate:.0f}bit", "burst", str(burst), "limit", str(burst + queue))
    run_tool(*add, "root", "handle", "1:", "tbf", *rate)
    if delay:
        frames = (queue + link.rate / 8 * delay) / FRAME_BYTES
        run_tool(
            *add,
            "parent",
            "1:1",
            "netem",
            "delay",
            f"{delay * 1e6:.0f}us",
            "limit",
            f"{frames:.0f}",
        )


def burst_bytes(link: AccessLink) -> int:
    """Return the size of the token bucket in bytes."""
    per_second = link.rate / 8
    usual = min(max(per_second * BURST_SECONDS, MIN_BURST), MAX_BURST)
    return round(max(usual, per_second * TIMER_SECONDS))


def queue_bytes(link: AccessLink) -> int:
    """Return the length in bytes of the longest queue before frames are dropped."""
    return round(max(link.rate / 8 * max(QUEUE_SECONDS, link.rtt), MIN_QUEUE))


def has_netem(net: Net) -> bool:
    """Return whether the kernel has netem."""
    try:
        run_tool(
            "tc", "-n", net.bridge, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"
        )
    except ConfigError:
        return False
    return True


def relay_warning(net: Net, links: Links, num_islands: int) -> str | None:
    """Return a warning if all links together are faster than the delay relay, else None."""
    rates = [link.rate for link in map(links.of, range(num_islands)) if link is not None]
    if net.relay is None or sum(rates) <= RELAY_RATE:
        return None
    return (
        "this kernel has no netem, so a process in user space delays the frames of --link; it "
        f"carries about {RELAY_RATE / 1e9:.0f} Gbit/s in all, less than the links together "
        f"({sum(rates) / 1e9:.3g} Gbit/s)"
    )


def count_bytes(net: Net, namespace: Namespace) -> tuple[int, int]:
    """Return the bytes that a namespace's link has carried up and down, in frames with headers."""
    return sent_bytes(namespace), _read_byte_counter(net.bridge, namespace.port)


def sent_bytes(namespace: Namespace) -> int:
    """Return the bytes that a namespace has sent on its link, in frames with headers."""
    return _read_byte_counter(namespace.name, "eth0")


def _read_byte_counter(location: str, device: str) -> int:
    text = run_tool("tc", "-n", location, "-s", "-j", "qdisc", "show", "dev", device, "root")
    return json.loads(text)[0]["bytes"]
