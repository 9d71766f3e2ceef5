"""The leader's talk with the other islands of a gossip run: who is in it, who is there, whose share counts.

All of it runs on one event loop. What the messages are is in outer/desk.py.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outer.deadlines import Deadlines
from outer.desk import Desk, Meet, Place, Tell, Word
from outer.errors import DeadlineError, TransportError
from outer.membership.base import Member
from outer.network import Network
from outer.peers import Peers
from outer.presence import Identity
from outer.rounds import MAX_RANKS, check_carriers, parse, unpack_carriers
from outer.state import Position

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Route:
    """To a partner's ranks: who carries each part, and the ranks' control addresses."""

    carriers: list[int]
    addresses: list[str]


@dataclass(frozen=True)
class Met:
    """Which partners are in the round, and why the others are not."""

    routes: dict[str, Route] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    is_behind: bool = False
    """All partners have been a round or more beyond this one before this island came to its end."""


class Partners:
    """Of one island; `addresses` are (transport, control) of each of its ranks."""

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[tuple[str, str]],
        desk: Desk,
        network: Network,
        deadlines: Deadlines,
    ) -> None:
        assert network.membership is not None, "the leader has a membership"
        self._identity, self._addresses, self._desk, self._deadlines = identity, addresses, desk, deadlines
        self._membership = network.membership
        self._peers = Peers(identity.island, network.messenger, network.membership, deadlines, identity.config_hash)
        self._own: Member | None = None
        self._tries = 0

    async def announce(self, position: Position, since: int) -> None:
        """Enter the membership; the others count on this island from round `since`. Raises InputError for the name."""
        self._own = Member(
            island=self._identity.island,
            incarnation=self._identity.incarnation,
            identity=self._identity.identity,
            config_hash=self._identity.config_hash,
            control_addresses=[control for _, control in self._addresses],
            transport_addresses=[transport for transport, _ in self._addresses],
            round=position.round,
            tokens=position.tokens,
            since=since,
        )
        await self._membership.announce(self._own)

    async def stand(self, position: Position, step_seconds: float) -> None:
        """Bring the record up to date, if there is one. It has no digest: each island has its own."""
        if self._own is not None:
            changes = {"round": position.round, "tokens": position.tokens, "step_seconds": step_seconds}
            self._own = self._own.model_copy(update=changes)
            self._membership.update(self._own)

    async def leave(self) -> None:
        """Withdraw the record."""
        await self._membership.leave()

    async def wait_for(self, num_islands: int, seconds: float) -> int:
        """How many islands have come: so many at least, or fewer after `seconds`."""
        deadline = _now() + seconds
        while not await self._peers.find() or 1 + len(self._peers.members) < num_islands:
            if _now() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
        return 1 + len(self._peers.members)

    async def linger(self, position: int) -> None:
        """Return when nobody lives who has committed fewer rounds, or after as long as a round takes.

        Who leaves earlier changes the groups of the others' last rounds.
        """
        deadline = _now() + self._deadlines.grace(1)
        while _now() < deadline:
            await self._peers.find()
            if all(member.round >= position for member in self._peers.members.values()):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def names(self, round_number: int) -> list[str]:
        """The islands in the run in this round, sorted; this one alone before the round that it counts from."""
        await self._peers.find()
        own = self._own
        assert own is not None, "the island has been announced"
        known = [*self._peers.members.values(), own] if own.since <= round_number else [own]
        return sorted(member.island for member in known if member is own or member.since <= round_number)

    async def donors(self, position: int) -> list[Member]:
        """One island that has committed more rounds than `position`, another at each call; none when there is none."""
        await self._peers.find()
        ahead = sorted((m for m in self._peers.members.values() if m.round > position), key=lambda m: -m.round)
        self._tries += 1
        return [ahead[(self._tries - 1) % len(ahead)]] if ahead else []

    async def meet(self, names: Collection[str], round_number: int, num_parts: int) -> Met:
        """Who of these comes to the end of the round, each waited for as long as a round takes."""
        places = await asyncio.gather(*(self._meet(name, round_number) for name in names))
        routes, lost, num_ahead = {}, {}, 0
        for name, place in zip(names, places, strict=True):
            if isinstance(place, str):
                lost[name] = place
            elif place.status != "here":
                lost[name] = f"it is in round {place.round}" + ", in another group" * (place.status == "apart")
                num_ahead += place.status == "past" and place.round > round_number + 1
            else:
                try:
                    routes[name] = self._route(name, place, num_parts)
                except TransportError as error:
                    lost[name] = str(error)
        is_behind = bool(names) and num_ahead == len(names) and bool(await self.donors(round_number + 1))
        return Met(routes, lost, is_behind)

    async def agree(self, has_all: dict[str, bool], round_number: int) -> dict[str, str]:
        """Of the partners whose share is here, those that do not count, and why; the rest have all of this island's."""
        await self._desk.judge(has_all)
        names = [name for name, has in has_all.items() if has]
        causes = await asyncio.gather(*(self._agree(name, round_number) for name in names))
        return {name: cause for name, cause in zip(names, causes, strict=True) if cause}

    async def _meet(self, name: str, round_number: int) -> Place | str:
        """Where a partner is in the end, or why that is not known."""
        limit = self._deadlines.grace(1)
        deadline = _now() + limit
        body = Meet(round=round_number).model_dump_json().encode()
        try:
            while True:
                place = parse(Place, await self._peers.call(name, "meet", body))
                if place.status != "not yet":
                    return place
                if _now() > deadline:
                    return f"it has not come to the end of round {round_number} within {limit:.0f} s"
        except TransportError as error:
            return str(error)

    def _route(self, name: str, place: Place, num_parts: int) -> Route:
        addresses = self._peers.addresses(name)
        pairs = [(pair[0], pair[1]) for pair in place.carriers if len(pair) == 2]
        check_carriers(pairs, num_parts, min(len(addresses), MAX_RANKS))
        return Route(unpack_carriers(pairs), addresses)

    async def _agree(self, name: str, round_number: int) -> str:
        """ "" when the partner says that it has all; or why it does not count."""
        body = Tell(round=round_number, has_all=True).model_dump_json().encode()
        limit = self._deadlines.limit("gossip")
        deadline = _now() + limit
        theirs = self._desk.theirs
        try:
            while name not in theirs:
                word = parse(Word, await self._peers.call(name, "tell", body))
                if word.status != "open":
                    theirs.setdefault(name, word.status == "yes")
                elif _now() > deadline:
                    raise DeadlineError(f"it has not taken this island's share within {limit:.0f} s")
        except TransportError as error:
            # It may have told this island before it went: then its word stands.
            if name not in theirs:
                return str(error)
        return "" if theirs[name] else "it goes on without this island"


def _now() -> float:
    return asyncio.get_running_loop().time()
