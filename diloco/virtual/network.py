"""Modelled links between virtual islands. They carry no bytes: they count them, and deliver each message in its time.

Payloads to the same island leave one after another, and those to different islands at the same time, with equal shares
of the uplink. A payload comes in over its receiver's downlink, after those that began to
arrive before it. Small messages have connections of their own: they wait for each other in both directions, but not for
payloads, and neither slows the other down. Packets are never lost, and TCP's slow start is not modelled.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import get_args

from diloco.network_emulation.links import AccessLink
from diloco.virtual.stand_in import StandIn
from diloco.virtual.world import Action, World
from outer.network.endpoints import Lane, Leg, Tag
from outer.transports.loopback import Parcel

UNSHAPED = AccessLink(rate=float("inf"))


@dataclass
class Counts:
    """Messages and their bytes, by kind."""

    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    small_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of all but payloads, by the island that has sent them."""

    def copy(self) -> "Counts":
        return Counts(self.messages.copy(), self.num_bytes.copy(), self.small_bytes.copy())

    def since(self, earlier: "Counts") -> "Counts":
        """What has been sent since then."""
        small_bytes = self.small_bytes - earlier.small_bytes
        return Counts(self.messages - earlier.messages, self.num_bytes - earlier.num_bytes, small_bytes)


@dataclass
class Way:
    """One direction of an island's link."""

    free_at: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(get_args(Lane), 0.0))
    """When all messages of a lane so far have passed."""
    busy_seconds: float = 0.0

    def pass_through(self, lane: Lane, now: float, seconds: float) -> float:
        """A message takes the way for so long, after those that came before. Returns when it has passed."""
        self.busy_seconds += seconds
        self.free_at[lane] = max(self.free_at[lane], now) + seconds
        return self.free_at[lane]


@dataclass(frozen=True)
class Sending:
    """A payload on its way over the uplink."""

    to: str
    seconds: float
    """Time that the whole link needs for it."""
    begin: Action
    """Called when its first byte leaves."""
    end: Action
    """Called when its last byte has left."""


class Uplink:
    """An island's uplink for payloads: its connections share the rate equally, and each sends its payloads in order.

    All connections that have something to send progress alike, so one number says how far: `_passed`, the seconds of
    the whole link that each of them has had so far. A payload that begins at p and needs s seconds of the link ends at
    p + s, whatever begins and ends meanwhile, and only how fast `_passed` grows depends on how many there are.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, deque[Sending]] = defaultdict(deque)
        """By receiver, the payloads after the one that is being sent; of receivers to which one is being sent."""
        self._under_way: list[tuple[float, int, Sending]] = []
        """A heap: where `_passed` will be when the payload ends. At most one for each receiver."""
        self._passed, self._as_of = 0.0, 0.0
        self._numbers = count()
        self._next_look = float("inf")

    def send(self, to: str, seconds: float, begin: Action, end: Action) -> None:
        """Send a payload that the whole link needs so long for, after the others to the same island."""
        self._advance()
        sending = Sending(to, seconds, begin, end)
        if to in self._waiting:
            self._waiting[to].append(sending)
        else:
            self._waiting[to] = deque()
            self._start(sending)
            self._plan_look()

    def _start(self, sending: Sending) -> None:
        heappush(self._under_way, (self._passed + sending.seconds, next(self._numbers), sending))
        sending.begin()

    def _advance(self) -> None:
        """Bring `_passed` up to the present."""
        if self._under_way:
            self._passed += (self._world.now - self._as_of) / len(self._under_way)
        self._as_of = self._world.now

    def _plan_look(self) -> None:
        """Look again when the next payload ends. If others begin before that, the look is too early and plans one."""
        if not self._under_way:
            return
        ends_at = self._as_of + max(0.0, self._under_way[0][0] - self._passed) * len(self._under_way)
        if ends_at < self._next_look:
            self._next_look = ends_at
            self._world.at(ends_at, lambda: self._look(ends_at))

    def _look(self, planned: float) -> None:
        if planned != self._next_look:
            return
        self._next_look = float("inf")
        self._advance()
        # What is left in seconds of the clock may be less than the clock can tell.
        while self._under_way and self._is_over(self._under_way[0][0]):
            _, _, sending = heappop(self._under_way)
            self._end(sending)
        self._plan_look()

    def _is_over(self, end: float) -> bool:
        return self._world.now + (end - self._passed) * len(self._under_way) <= self._world.now

    def _end(self, sending: Sending) -> None:
        waiting = self._waiting[sending.to]
        if waiting:
            self._start(waiting.popleft())
        else:
            del self._waiting[sending.to]
        sending.end()


@dataclass
class VirtualNetwork:
    """The links of all islands. `deliver` is the hub's delivery schedule."""

    world: World
    stand_in: StandIn
    link_of: Callable[[str], AccessLink | None]
    """The link of an island, or None if it is not limited."""
    payload_share: float
    """Share of a link's rate that payloads get."""
    counts: Counts = field(default_factory=Counts)
    """What has been sent so far."""
    up: dict[str, Way] = field(default_factory=lambda: defaultdict(Way))
    down: dict[str, Way] = field(default_factory=lambda: defaultdict(Way))

    def __post_init__(self) -> None:
        self._uplinks: dict[str, Uplink] = defaultdict(lambda: Uplink(self.world))

    def deliver(self, parcel: Parcel, deliver: Callable[[], None]) -> None:
        """Count the parcel and call `deliver` when it has arrived."""
        size, num_messages, sent, received = self._weigh(parcel)
        self.counts.messages[parcel.kind] += num_messages
        self.counts.num_bytes[parcel.kind] += size
        source, target = self.link_of(parcel.source) or UNSHAPED, self.link_of(parcel.to) or UNSHAPED
        share = self.payload_share if parcel.lane == "bulk" else 1.0
        sending, receiving = 8 * sent / (source.rate * share), 8 * received / (target.rate * share)
        # Each of two links adds half of its round trip to that between the islands, so a quarter to one way.
        latency = (source.rtt + target.rtt) / 4
        if parcel.lane == "control":
            self.counts.small_bytes[parcel.source] += size
            self.world.at(self._pass_both(parcel, sending, receiving) + latency, deliver)
        else:
            self._send_payload(parcel, sending, receiving, lambda arrived: self.world.at(arrived + latency, deliver))

    @property
    def busiest_seconds(self) -> float:
        """For how long the busiest direction of any link has been in use."""
        return max((way.busy_seconds for way in (*self.up.values(), *self.down.values())), default=0.0)

    def _weigh(self, parcel: Parcel) -> tuple[int, int, float, float]:
        """Bytes of the parcel, how many messages it stands for, and its bytes on the links of both islands."""
        size, share = self.size_of(parcel), self.stand_in.share
        if parcel.tag is None or share == 1.0:
            return size, 1, size, size
        is_to_reducer = parcel.tag.leg is Leg.REDUCE
        return size, round(1 / share), size * (1 if is_to_reducer else share), size * (share if is_to_reducer else 1)

    def size_of(self, parcel: Parcel) -> int:
        """Bytes of what the parcel stands for in a real run."""
        if isinstance(parcel.tag, Tag):
            return self.stand_in.payload_bytes(parcel.tag)
        by_status = {b"part": self.stand_in.part_bytes, b"mean": self.stand_in.mean_bytes}
        return by_status.get(parcel.status, parcel.num_bytes)

    def _pass_both(self, parcel: Parcel, sending: float, receiving: float) -> float:
        """When a small message has passed both links."""
        up, down = self.up[parcel.source], self.down[parcel.to]
        sent_at = up.pass_through(parcel.lane, self.world.now, sending)
        # The first bytes arrive while the last ones are sent.
        down.free_at[parcel.lane] = max(sent_at, down.pass_through(parcel.lane, sent_at - sending, receiving))
        return down.free_at[parcel.lane]

    def _send_payload(self, parcel: Parcel, sending: float, receiving: float, arrive: Callable[[float], None]) -> None:
        """Send over the uplink, and call `arrive` with the time at which the payload has passed both links."""
        down, has_room = self.down[parcel.to], 0.0
        self.up[parcel.source].busy_seconds += sending

        def begin() -> None:
            nonlocal has_room
            has_room = down.pass_through(parcel.lane, self.world.now, receiving)

        self._uplinks[parcel.source].send(parcel.to, sending, begin, lambda: arrive(max(self.world.now, has_room)))
