"""The leader's calls to other islands of a gossip run: which are in the run, which are present,
whose shares count.

Everything runs on one event loop. outer/gossip/server.py defines the messages and answers them.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outer.agreement.running.peers import Identity, Peers
from outer.connect.settings import Network
from outer.errors import DeadlineError, TransportError
from outer.gossip.server import GossipServer, Meet, MeetReply, Tell, TellReply
from outer.membership.base import Member
from outer.network.deadlines import Deadlines
from outer.network.event_loop import loop_time
from outer.network.messages import MAX_RANKS, check_carriers, receive, unpack_carriers
from outer.network.retry import retry
from outer.state.part_state import Position

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class PartnerRoute:
    """The route to a partner's ranks: the carrier rank of each part, and the control address of
    each rank.
    """

    carriers: list[int]
    addresses: list[str]


@dataclass(frozen=True)
class Met:
    """The partners that are present in a round, and the reasons why the others are not."""

    routes: dict[str, PartnerRoute] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    is_behind: bool = False
    """Whether all partners were ahead by more than one round, and one of them can provide its
    state."""


class Partners:
    """Communicates for one island. `addresses` are the (transport, control) addresses of each of
    its ranks.
    """

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[tuple[str, str]],
        server: GossipServer,
        network: Network,
        deadlines: Deadlines,
    ) -> None:
        assert network.membership is not None, "the leader has a membership"
        self._identity = identity
        self._addresses = addresses
        self._server = server
        self._deadlines = deadlines
        self._membership = network.membership
        self._peers = Peers(
            identity.island, network.messenger, network.membership, deadlines, identity.config_hash
        )
        self._own: Member | None = None
        self._tries = 0

    async def announce(self, position: Position, since: int) -> None:
        """Enter the membership. Other islands expect this island from round `since`. Raises
        InputError if the name is taken.
        """
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

    async def update_status(self, position: Position, step_seconds: float) -> None:
        """Update the membership record, if there is one. It has no digest, because each island has
        its own state.
        """
        if self._own is not None:
            changes = {
                "round": position.round,
                "tokens": position.tokens,
                "step_seconds": step_seconds,
            }
            self._own = self._own.model_copy(update=changes)
            self._membership.update(self._own)

    async def leave(self) -> None:
        """Withdraw the membership record."""
        await self._membership.leave()

    async def wait_for(self, num_islands: int, seconds: float) -> int:
        """Wait up to `seconds` for `num_islands`. Return the number of islands that have joined,
        this one included.
        """

        async def have_come() -> bool:
            return await self._peers.refresh() and 1 + len(self._peers.members) >= num_islands

        await retry(have_come, seconds=seconds, pause_seconds=POLL_SECONDS)
        return 1 + len(self._peers.members)

    async def linger(self, position: int) -> None:
        """Wait until no live island has committed fewer rounds than `position`, at most for the
        duration of a round.

        Leaving early would change the groups of the remaining rounds.
        """

        async def have_caught_up() -> bool:
            await self._peers.refresh()
            return all(member.round >= position for member in self._peers.members.values())

        await retry(have_caught_up, seconds=self._deadlines.grace(1), pause_seconds=POLL_SECONDS)

    async def names(self, round_number: int) -> list[str]:
        """Return the sorted names of the islands in this round; only this island before the
        round from which it counts.
        """
        await self._peers.refresh()
        own = self._own
        assert own is not None, "the island has been announced"
        known = [*self._peers.members.values(), own] if own.since <= round_number else [own]
        return sorted(
            member.island for member in known if member is own or member.since <= round_number
        )

    async def find_donors(self, position: int) -> list[Member]:
        """Return at most one island that has committed more than `position` rounds, a different
        one in each call.
        """
        await self._peers.refresh()
        ahead = sorted(
            (m for m in self._peers.members.values() if m.round > position), key=lambda m: -m.round
        )
        self._tries += 1
        return [ahead[(self._tries - 1) % len(ahead)]] if ahead else []

    async def meet(self, names: Collection[str], round_number: int, num_parts: int) -> Met:
        """Find out which of these partners reach the end of the round. Wait for each at most as
        long as a round takes.
        """
        replies = await asyncio.gather(*(self._meet(name, round_number) for name in names))
        routes = {}
        lost = {}
        num_ahead = 0
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, str):
                lost[name] = reply
            elif reply.status != "here":
                lost[name] = f"it is in round {reply.round}" + ", in another group" * (
                    reply.status == "apart"
                )
                num_ahead += reply.status == "past" and reply.round > round_number + 1
            else:
                try:
                    routes[name] = self._route(name, reply, num_parts)
                except TransportError as error:
                    lost[name] = str(error)
        is_behind = (
            bool(names)
            and num_ahead == len(names)
            and bool(await self.find_donors(round_number + 1))
        )
        return Met(routes, lost, is_behind)

    async def confirm(self, has_all: dict[str, bool], round_number: int) -> dict[str, str]:
        """Return why partners whose share has arrived do not count, by name. All others have
        this island's share, too.
        """
        await self._server.judge(has_all)
        names = [name for name, has in has_all.items() if has]
        causes = await asyncio.gather(*(self._confirm(name, round_number) for name in names))
        return {name: cause for name, cause in zip(names, causes, strict=True) if cause}

    async def _meet(self, name: str, round_number: int) -> MeetReply | str:
        """Return the partner's reply, or the reason why there is none."""
        limit = self._deadlines.grace(1)
        deadline = loop_time() + limit
        body = Meet(round=round_number).encode()
        try:
            while True:
                reply = await receive(
                    MeetReply, await self._peers.call(name, "meet", body, MeetReply)
                )
                if reply.status != "not yet":
                    return reply
                if loop_time() > deadline:
                    return (
                        f"it has not reached the end of round {round_number} within {limit:.0f} s"
                    )
        except TransportError as error:
            return str(error)

    def _route(self, name: str, reply: MeetReply, num_parts: int) -> PartnerRoute:
        addresses = self._peers.addresses(name)
        check_carriers(reply.carriers, num_parts, min(len(addresses), MAX_RANKS))
        return PartnerRoute(list(unpack_carriers(reply.carriers)), addresses)

    async def _confirm(self, name: str, round_number: int) -> str:
        """Return why the pair does not count, or "" if the partner reports that it has this
        island's whole share.
        """
        body = Tell(round=round_number, has_all=True).encode()
        limit = self._deadlines.limit("gossip")
        deadline = loop_time() + limit
        theirs = self._server.theirs
        try:
            while name not in theirs:
                reply = await receive(
                    TellReply, await self._peers.call(name, "tell", body, TellReply)
                )
                if reply.status != "open":
                    theirs.setdefault(name, reply.status == "yes")
                elif loop_time() > deadline:
                    raise DeadlineError(
                        f"it has not fetched this island's share within {limit:.0f} s"
                    )
        except TransportError as error:
            # It may have sent its answer before it was lost. In this case its answer counts.
            if name not in theirs:
                return str(error)
        return "" if theirs[name] else "it continues without this island"
