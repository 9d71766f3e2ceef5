"""An island's uplink for payloads: its connections share the rate equally, and each sends its payloads in order.

All connections that have something to send progress alike, so one number says how far: `_passed`, the seconds of the
whole link that each of them has had so far. A payload that begins at p and needs s seconds of the link ends at p + s,
whatever begins and ends meanwhile, and only how fast `_passed` grows depends on how many there are.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from diloco.virtual.world import Action, World


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
    """Sends payloads to many islands at the same time."""

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
