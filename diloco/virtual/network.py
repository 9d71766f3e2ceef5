"""Modelled links between virtual islands. They count bytes without carrying them, and deliver
messages with a delay.

Payloads to the same island are sent one after another. Payloads to different islands are sent at
the same time, with equal shares of the uplink. A payload passes its receiver's downlink after all
payloads that began to arrive earlier. Small messages have separate connections: in each direction
they wait for each other but not for payloads, and neither kind slows the other down. Packets are
never lost, and TCP's slow start is not modelled.
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
    """Number of messages and of their bytes, by kind."""

    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    small_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of all messages except payloads, by the island that sent them."""

    def copy(self) -> "Counts":
        return Counts(self.messages.copy(), self.num_bytes.copy(), self.small_bytes.copy())

    def since(self, earlier: "Counts") -> "Counts":
        """Return what has been sent since `earlier`."""
        small_bytes = self.small_bytes - earlier.small_bytes
        return Counts(
            self.messages - earlier.messages, self.num_bytes - earlier.num_bytes, small_bytes
        )


@dataclass
class Way:
    """One direction of an island's link."""

    free_at: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(get_args(Lane), 0.0))
    """Time at which all messages so far have passed, by lane."""
    busy_seconds: float = 0.0

    def pass_through(self, lane: Lane, now: float, seconds: float) -> float:
        """Let a message pass for `seconds`, after the earlier messages of its lane. Return the time
        at which it has passed.
        """
        self.busy_seconds += seconds
        self.free_at[lane] = max(self.free_at[lane], now) + seconds
        return self.free_at[lane]


@dataclass(frozen=True)
class Sending:
    """A payload in transit over the uplink."""

    to: str
    seconds: float
    """Seconds that the whole link needs for the payload."""
    begin: Action
    """Called when the payload's first byte leaves."""
    end: Action
    """Called when the payload's last byte has left."""


class Uplink:
    """An island's uplink for payloads. Its connections share the rate equally, and each sends its
    payloads in order.

    All active connections progress alike, so one number describes their progress: `_passed`, the
    seconds of the whole link that each active connection has received so far. A payload that begins
    at p and needs s seconds of the link ends at p + s, whatever other payloads begin and end in
    between. Only the speed at which `_passed` grows depends on their number.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, deque[Sending]] = defaultdict(deque)
        """Payloads that wait, by receiver. It has the receivers to which a payload is being
        sent.
        """
        self._under_way: list[tuple[float, int, Sending]] = []
        """A heap of payloads in transit, by the value of `_passed` at which they end. At most one
        for each receiver."""
        self._passed = 0.0
        self._as_of = 0.0
        self._numbers = count()
        self._next_look = float("inf")

    def send(self, to: str, seconds: float, begin: Action, end: Action) -> None:
        """Send a payload that needs `seconds` of the whole link, after the earlier payloads to the
        same island.
        """
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
        """Advance `_passed` to the present time."""
        if self._under_way:
            self._passed += (self._world.now - self._as_of) / len(self._under_way)
        self._as_of = self._world.now

    def _plan_look(self) -> None:
        """Plan a check at the end of the next payload. If other payloads begin earlier, the check
        plans another one.
        """
        if not self._under_way:
            return
        ends_at = self._as_of + max(0.0, self._under_way[0][0] - self._passed) * len(
            self._under_way
        )
        if ends_at < self._next_look:
            self._next_look = ends_at
            self._world.at(ends_at, lambda: self._look(ends_at))

    def _look(self, planned: float) -> None:
        if planned != self._next_look:
            return
        self._next_look = float("inf")
        self._advance()
        # The remaining seconds may be less than the resolution of the clock.
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
    """The links of all islands. `deliver` schedules the deliveries of the hub."""

    world: World
    stand_in: StandIn
    link_of: Callable[[str], AccessLink | None]
    """Returns the link of an island, or None if it is not limited."""
    payload_share: float
    """Share of a link's rate that payloads get."""
    counts: Counts = field(default_factory=Counts)
    """Totals of what has been sent so far."""
    up: dict[str, Way] = field(default_factory=lambda: defaultdict(Way))
    down: dict[str, Way] = field(default_factory=lambda: defaultdict(Way))

    def __post_init__(self) -> None:
        self._uplinks: dict[str, Uplink] = defaultdict(lambda: Uplink(self.world))

    def deliver(self, parcel: Parcel, deliver: Callable[[], None]) -> None:
        """Count the parcel, and call `deliver` when it has arrived."""
        size, num_messages, sent, received = self._weigh(parcel)
        self.counts.messages[parcel.kind] += num_messages
        self.counts.num_bytes[parcel.kind] += size
        source = self.link_of(parcel.source) or UNSHAPED
        target = self.link_of(parcel.to) or UNSHAPED
        share = self.payload_share if parcel.lane == "bulk" else 1.0
        sending = 8 * sent / (source.rate * share)
        receiving = 8 * received / (target.rate * share)
        # Each of the two links adds half of its round trip to the round trip between the islands,
        # and so a quarter per direction.
        latency = (source.rtt + target.rtt) / 4
        if parcel.lane == "control":
            self.counts.small_bytes[parcel.source] += size
            self.world.at(self._pass_both(parcel, sending, receiving) + latency, deliver)
        else:
            self._send_payload(
                parcel,
                sending,
                receiving,
                lambda arrived: self.world.at(arrived + latency, deliver),
            )

    @property
    def busiest_seconds(self) -> float:
        """Return the seconds for which the busiest direction of any link has been in use."""
        return max(
            (way.busy_seconds for way in (*self.up.values(), *self.down.values())), default=0.0
        )

    def _weigh(self, parcel: Parcel) -> tuple[int, int, float, float]:
        """Return the parcel's bytes, the number of messages it stands for, and its bytes on the
        sender's and receiver's link.
        """
        size = self.size_of(parcel)
        share = self.stand_in.share
        if parcel.tag is None or share == 1.0:
            return size, 1, size, size
        is_to_reducer = parcel.tag.leg is Leg.REDUCE
        return (
            size,
            round(1 / share),
            size * (1 if is_to_reducer else share),
            size * (share if is_to_reducer else 1),
        )

    def size_of(self, parcel: Parcel) -> int:
        """Return the bytes of the data for which the parcel stands in a real run."""
        if isinstance(parcel.tag, Tag):
            return self.stand_in.payload_bytes(parcel.tag)
        by_status = {b"part": self.stand_in.part_bytes, b"mean": self.stand_in.mean_bytes}
        return by_status.get(parcel.status, parcel.num_bytes)

    def _pass_both(self, parcel: Parcel, sending: float, receiving: float) -> float:
        """Return the time at which a small message has passed both links."""
        up = self.up[parcel.source]
        down = self.down[parcel.to]
        sent_at = up.pass_through(parcel.lane, self.world.now, sending)
        # The first bytes arrive while the last bytes are still being sent.
        down.free_at[parcel.lane] = max(
            sent_at, down.pass_through(parcel.lane, sent_at - sending, receiving)
        )
        return down.free_at[parcel.lane]

    def _send_payload(
        self, parcel: Parcel, sending: float, receiving: float, arrive: Callable[[float], None]
    ) -> None:
        """Send over the uplink, and call `arrive` with the time at which the payload has passed
        both links.
        """
        down = self.down[parcel.to]
        has_room = 0.0
        self.up[parcel.source].busy_seconds += sending

        def begin() -> None:
            nonlocal has_room
            has_room = down.pass_through(parcel.lane, self.world.now, receiving)

        self._uplinks[parcel.source].send(
            parcel.to, sending, begin, lambda: arrive(max(self.world.now, has_room))
        )
