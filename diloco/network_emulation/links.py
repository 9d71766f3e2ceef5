"""The islands' access links: what `--link` says, how they are shaped, and what they have carried.

Both ends of a link are shaped by tc's token bucket, so an island's up and down directions have the rate each. Half of
the round trip between two islands is made on each one's link: by netem, or where the kernel has none by the relay.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from diloco.config import ConfigError
from diloco.fault_spec import Who
from diloco.netns import Namespace, Net, opened_net, run_tool
from diloco.units import parse_bits_per_second, parse_seconds

BURST_SECONDS = 0.004
"""What may leave at once after a pause; a transfer is so much faster than the rate says."""
MIN_BURST, MAX_BURST = 4_000, 131_072
"""Bytes. A frame has up to 1514, and 64 kB of a stream pass as one where the burst lets them."""
TIMER_SECONDS = 0.001
"""A burst lasts at least so long, or late timers cost rate."""
QUEUE_SECONDS = 0.05
MIN_QUEUE = 32_000
"""The longest queue before a link drops frames: QUEUE_SECONDS, or a round trip, or these bytes."""
FRAME_BYTES = 1500
"""netem's queue counts frames, not bytes."""
MIN_RATE, MAX_RATE = 64e3, 100e9
MAX_RTT = 10.0
RELAY_RATE = 2e9
"""What the relay carries in all on two cores, bits a second; measured with scripts/bench/links.py."""
SPELLING = "[ISLAND:]RATE[,rtt=TIME], for example --link 100mbit, --link 1gbit,rtt=50ms or --link 0:50mbit"


@dataclass(frozen=True)
class Link:
    """An access link: bits a second of whole frames, up and down each, and seconds to and from an equal one."""

    rate: float
    rtt: float = 0.0


@dataclass(frozen=True)
class Links:
    """The default, None for not shaped, and the islands that have another."""

    default: Link | None = None
    own: Mapping[int, Link] = field(default_factory=dict)

    def of(self, who: Who) -> Link | None:
        """The link of an island, or of the bootstrap process."""
        return self.default if isinstance(who, str) else self.own.get(who, self.default)

    @property
    def all(self) -> list[Link]:
        """Every kind of link that there is."""
        return [*([self.default] if self.default else []), *self.own.values()]


def parse_links(texts: Sequence[str], num_islands: int) -> Links:
    """What the user wrote, `--link` by `--link`. Raises ConfigError."""
    default, own = None, {}
    for text in texts:
        island, link = parse_link(text)
        if island is None and default is None:
            default = link
        elif island is not None and island not in own and island < num_islands:
            own[island] = link
        elif island is not None and island >= num_islands:
            raise ConfigError(f"--link {text}: there is no island {island}; islands are 0 to {num_islands - 1}")
        else:
            whose = "all islands" if island is None else f"island {island}"
            raise ConfigError(f"--link {text}: the link of {whose} is given twice; give it once")
    return Links(default, own)


def parse_link(text: str) -> tuple[int | None, Link]:
    """One `--link`: the island, None for all, and its link. Raises ConfigError."""
    island, colon, rest = text.rpartition(":")
    rate, *options = rest.split(",")
    if (colon and not island.isdecimal()) or len(options) > 1 or any(not o.startswith("rtt=") for o in options):
        raise ConfigError(f"--link {text}: allowed: {SPELLING}")
    try:
        link = Link(parse_bits_per_second(rate), *(parse_seconds(option.removeprefix("rtt=")) for option in options))
    except ConfigError as error:
        raise ConfigError(f"--link {text}: {error}; in all: {SPELLING}") from None
    if not MIN_RATE <= link.rate <= MAX_RATE or link.rtt > MAX_RTT:
        raise ConfigError(f"--link {text}: allowed: a rate of 64kbit to 100gbit and an rtt of at most {MAX_RTT:.0f}s")
    return (int(island) if colon else None), link


@contextmanager
def opened_links(links: Links) -> Iterator[Net]:
    """A net for these links, on which `connect` puts islands; gone at the end, however it comes. Raises ConfigError."""
    with opened_net() as net:
        if any(link.rtt for link in links.all) and not has_netem(net):
            net.start_relay()
        yield net


@contextmanager
def linked_namespaces(count: int, link: Link) -> Iterator[list[Namespace]]:
    """So many namespaces with a link each; gone at the end, however it comes. Raises ConfigError."""
    with opened_links(Links(link)) as net:
        yield [connect(net, link) for _ in range(count)]


def connect(net: Net, link: Link | None) -> Namespace:
    """One more namespace on a net of `opened_links`; its link is not shaped, only counted, if it has none."""
    delay = link.rtt / 4 if link is not None else 0.0
    made = net.add(delay if net.relay is not None else 0.0)
    for place, device in _ends(net, made):
        add = ("tc", "-n", place, "qdisc", "add", "dev", device)
        if link is None:
            run_tool(*add, "root", "pfifo")  # a veth without a queue counts 64 kB of a stream as one frame
            continue
        burst, queue = burst_bytes(link), queue_bytes(link)
        rate = ("rate", f"{link.rate:.0f}bit", "burst", str(burst), "limit", str(burst + queue))
        run_tool(*add, "root", "handle", "1:", "tbf", *rate)
        if delay and net.relay is None:
            frames = (queue + link.rate / 8 * delay) / FRAME_BYTES
            run_tool(*add, "parent", "1:1", "netem", "delay", f"{delay * 1e6:.0f}us", "limit", f"{frames:.0f}")
    return made


def burst_bytes(link: Link) -> int:
    """What may leave at once."""
    per_second = link.rate / 8
    usual = min(max(per_second * BURST_SECONDS, MIN_BURST), MAX_BURST)
    return round(max(usual, per_second * TIMER_SECONDS))


def queue_bytes(link: Link) -> int:
    """What may wait."""
    return round(max(link.rate / 8 * max(QUEUE_SECONDS, link.rtt), MIN_QUEUE))


def has_netem(net: Net) -> bool:
    """Whether the kernel can delay frames by itself."""
    try:
        run_tool("tc", "-n", net.bridge, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except ConfigError:
        return False
    return True


def relay_warning(net: Net, links: Links, num_islands: int) -> str | None:
    """What to tell the user when the relay may be slower than the links are together."""
    rates = [link.rate for link in map(links.of, range(num_islands)) if link is not None]
    if net.relay is None or sum(rates) <= RELAY_RATE:
        return None
    return (
        f"this kernel has no netem, so a relay makes the round trips of --link; it carries about "
        f"{RELAY_RATE / 1e9:.0f} Gbit/s in all, less than the links together ({sum(rates) / 1e9:.3g} Gbit/s)"
    )


def carried(net: Net, namespace: Namespace) -> tuple[int, int]:
    """Bytes that a namespace's link has carried up and down: whole frames, each with its headers."""
    return sent_bytes(namespace), _counted(net.bridge, namespace.port)


def sent_bytes(namespace: Namespace) -> int:
    """Bytes that a namespace's link has carried up."""
    return _counted(namespace.name, "eth0")


def _ends(net: Net, namespace: Namespace) -> list[tuple[str, str]]:
    """The namespace and the device where a link's frames up leave, and where those down do."""
    return [(namespace.name, "eth0"), (net.bridge, namespace.port)]


def _counted(place: str, device: str) -> int:
    text = run_tool("tc", "-n", place, "-s", "-j", "qdisc", "show", "dev", device, "root")
    return json.loads(text)[0]["bytes"]
