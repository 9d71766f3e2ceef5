"""How long the islands that have something to give to a round have waited for the others, and whether it is enough.

Islands that are not ready are waited for as long as Deadlines.grace says. Those that still train and listen miss
nothing when the round goes on without them: they are waited for as long as Rules.grace_steps inner steps take.
"""

from outer.deadlines import Deadlines
from outer.protocol import Protocol
from outer.rounds import Ready


def others_ready(protocol: Protocol) -> list[Ready]:
    """Of other islands that live, for the round that this one is in."""
    live, number = protocol.present - protocol.lost, protocol.standing.round
    return [ready for name, ready in protocol.readies.said.items() if name in live and ready.round == number]


def givers(protocol: Protocol) -> list[Ready]:
    """Other islands that have something to give to the round, not only listen."""
    return [ready for ready in others_ready(protocol) if not ready.listens]


def num_absent(protocol: Protocol) -> int:
    """Other islands that live and are not ready."""
    return len(protocol.present - protocol.lost) - len(others_ready(protocol))


class Patience:
    """Of one gathering; times are the event loop's, in seconds."""

    def __init__(self, protocol: Protocol, deadlines: Deadlines) -> None:
        self._protocol, self._deadlines = protocol, deadlines
        self._since: float | None = None
        self.waited = 0.0
        """Since the first island had something to give, or since this one stood still if that is later."""

    def look(self, now: float, woke_at: float) -> None:
        """It is `now`; this island has last stood still until `woke_at`."""
        if self._since is None and self._givers:
            self._since = now
        self.waited = 0.0 if self._since is None else now - max(self._since, woke_at)

    @property
    def is_late(self) -> bool:
        """Whether islands that are not ready are not waited for any longer."""
        grace = self._deadlines.grace(max(1, len(self._givers)), num_absent(self._protocol))
        return self.waited > grace

    @property
    def seconds_left(self) -> float:
        """For islands that listen, until those that give go on without them."""
        fastest = min((ready.step_seconds for ready in self._givers), default=0.0)
        return max(0.0, self._protocol.rules.grace_steps * fastest - self.waited)

    @property
    def _givers(self) -> list[Ready]:
        own = self._protocol.own
        return [*givers(self._protocol), *([] if own is None or own.listens else [own])]
