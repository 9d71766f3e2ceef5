"""How an island's leader runs the round protocol: sends, receives, waits, and finds out who lives.

What follows from a message is in protocol.py; here are the calls, the clocks and the deadlines.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from outer.deadlines import Deadlines
from outer.errors import BehindError, DeadlineError, MessageError, PeerLost, QuorumError
from outer.membership.base import Handler, Member, Membership, Messenger
from outer.patience import Patience, givers
from outer.peers import Peers, kind_of, name_of
from outer.protocol import Protocol
from outer.pulse import BEAT_SECONDS, Pulse
from outer.rounds import Answer, Goodbye, Heard, Message, Plan, Question, Ready, Standing, Vote, parse
from outer.transports.base import Endpoint
from outer.verdicts import Behind, Short

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
"""How often every island tells the others where it stands; also how often what may be lost is said again."""
WARN_SECONDS = 60.0
GOODBYE_SECONDS = 1.5
REPLIES: dict[type[Message], type[Message]] = {Ready: Standing, Standing: Standing, Vote: Heard, Question: Answer}
Interruption = Literal["", "behind", "waited for", "time is up"]


class Agreement:
    """The leader's talk with other leaders. All of it runs on one event loop."""

    def __init__(
        self, protocol: Protocol, messenger: Messenger, membership: Membership, deadlines: Deadlines, config_hash: str
    ) -> None:
        self.protocol = protocol
        self.on_no: Callable[[str, str, str], None] = lambda plan, island, cause: None
        """Called with (plan id, island, cause) for every no, so that a running reduce can end at once."""
        self._peers = Peers(protocol.me, messenger, membership, deadlines, config_hash)
        self._deadlines = deadlines
        self._calls: dict[tuple[str, type[Message]], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._has_left = False
        self._pulse, self._woke_at = Pulse(), float("-inf")
        for model in (Ready, Standing, Plan, Vote, Question, Goodbye):
            messenger.serve(kind_of(model), self._handler(model))

    # -- the calls of the outer loop ------------------------------------------------------------------------------

    async def start(self) -> None:
        """From now on this island tells the others where it stands, and finds out about them."""
        await self._find_members()
        self._watching = asyncio.create_task(self._watch())
        self._beating = asyncio.create_task(self._beat())

    async def stand(self, standing: Standing) -> None:
        """This island holds this state now, and says so."""
        self.protocol.stand(standing)
        self._say_standing()
        self._flush()

    async def plan(self, own: Ready, told: Callable[[], None] = lambda: None) -> Plan:
        """The plan this island takes part in; `told` is called when the others know that it is ready.

        Raises BehindError, or QuorumError when too few islands come.
        """
        self.protocol.prepare(own)
        self._flush()
        told()
        await self._find_members()
        patience, warned = Patience(self.protocol, self._deadlines), _now()
        while True:
            await self._stop_if_left()
            self._notice_freeze()
            patience.look(_now(), self._woke_at)
            left = patience.seconds_left
            verdict = self.protocol.consider(is_late=patience.is_late, is_patient=left > 0)
            self._flush()
            match verdict:
                case Plan():
                    self._warn_below_quorum(verdict)
                    return verdict
                case Behind():
                    raise BehindError(verdict.donors, verdict.cause)
                case Short():
                    self._check_policy(verdict, patience.waited)
                    if _now() - warned > WARN_SECONDS:
                        warned = _now()
                        self._complain(f"{verdict.present} of {verdict.needed} islands came; waiting for the others")
            await self._wait_for_change(min(PING_SECONDS, left or PING_SECONDS))

    async def give(self, own: Ready) -> None:
        """This island listened for a plan, and has done its inner steps now."""
        self.protocol.give(own)
        self._flush()
        self._changed.set()

    async def decide(self, vote: Vote, told: Callable[[], None] = lambda: None) -> bool:
        """Whether the plan commits, by everybody's votes; `told` is called when this island's is on its way."""
        await self._stop_if_left()
        self.protocol.vote(vote)
        self._flush()
        told()
        started, limit = _now(), self._deadlines.limit("reduce")
        while True:
            # All votes may be here since before it stood still, and its own not with the others: it would be alone.
            self._notice_freeze()
            outcome = self.protocol.conclude(is_late=_now() - started > limit)
            if outcome != "open":
                break
            self._flush()
            await self._wait_for_change(PING_SECONDS)
            await self._stop_if_left()
        self._flush()
        self._changed.set()
        return outcome == "commit"

    async def say_goodbye(self, goodbye: Goodbye) -> None:
        """Tell all islands that this one leaves; whoever does not answer at once finds out by itself.

        An attempt that is under way gets a moment to end: its other participants need this island's vote.
        """
        deadline = _now() + GOODBYE_SECONDS
        while self.protocol.phase in ("reducing", "voting") and _now() < deadline:
            await self._wait_for_change(deadline - _now())
        self._has_left = True
        for task in (self._watching, self._beating):
            if task is not None:
                task.cancel()
        # A ping that crosses the goodbye is still answered.
        self.protocol.standing = self.protocol.standing.model_copy(update={"is_coming": False})
        body = goodbye.model_dump_json().encode()
        calls = [self._peers.call(name, "goodbye", body) for name in self.protocol.present - self.protocol.lost]
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.gather(*calls, return_exceptions=True)

    async def interruption(self, seconds_left: float, *, entered_late: bool) -> Interruption:
        """Why inner steps should end now: another history survives, or others wait and it would be in vain.

        It is not in vain while they are too few to go on without this island.
        `seconds_left`: until the round's inner steps are done. `entered_late`: this island took the round's state
        while the others were training; they do not wait for it.
        """
        if self.protocol.behind(is_settled=False) is not None:
            return "behind"
        num_waiting, rules = len(givers(self.protocol)), self.protocol.rules
        may_go_on = num_waiting >= rules.quorum or rules.below_quorum != "wait"
        if num_waiting and (entered_late or (may_go_on and seconds_left > self._deadlines.grace(num_waiting))):
            return "waited for"
        return ""

    async def linger(self, seconds: float) -> bool:
        """Wait until no island that lives holds less than this one; whether another history survives instead."""
        deadline = _now() + seconds
        while _now() < deadline and any(s.rank < self._rank for s in self.protocol.live.values()):
            await self._wait_for_change(deadline - _now())
        return self.protocol.behind(is_settled=True) is not None

    async def find_donors(self) -> list[Member]:
        """Records of the islands that hold the history which survives, if it is another than this island's."""
        await self._find_members()
        behind = self.protocol.behind(is_settled=True)
        if behind is not None:
            return [self._peers.members[name] for name in behind.donors if name in self._peers.members]
        # Nobody has spoken to this island yet: what the records say.
        ahead = [m for m in self._peers.members.values() if (m.tokens, m.round) > self._rank]
        best = max(((m.tokens, m.round) for m in ahead), default=None)
        return [m for m in ahead if (m.tokens, m.round) == best]

    # -- who lives ------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self._find_members()
            if self.protocol.phase != "gathering":
                self._say_standing()
            self.protocol.repeat()
            self._flush()

    async def _beat(self) -> None:
        while True:
            self._notice_freeze()
            await asyncio.sleep(BEAT_SECONDS)

    def _notice_freeze(self) -> None:
        """The others may have given this island up; that they did not answer meanwhile says nothing of them."""
        if self._pulse.has_missed():
            self._woke_at = _now()
            self.protocol.doubt()

    async def _find_members(self) -> None:
        if not await self._peers.find():
            return
        for name in self.protocol.present - frozenset(self._peers.members):
            # Without an address nobody would ever find out whether it lives.
            if name in self.protocol.lost or not self._peers.addresses(name):
                self.protocol.part(name)
                self._peers.forget(name)
                self._changed.set()
        self.protocol.meet(self._peers.members)

    @property
    def _rank(self) -> tuple[int, int]:
        return self.protocol.standing.rank

    def _say_standing(self) -> None:
        self.protocol.outbox += [(name, self.protocol.standing) for name in sorted(self.protocol.present)]

    def _complain(self, text: str) -> None:
        log.warning("round %d: BELOW QUORUM: %s", self.protocol.standing.round, text)

    def _warn_below_quorum(self, plan: Plan) -> None:
        present, quorum = len(plan.givers), self.protocol.rules.quorum
        if present < quorum:
            self._complain(f"{present} of {quorum} islands; going on, for outer.below_quorum is 'continue'")

    def _check_policy(self, short: Short, waited: float) -> None:
        """Raise QuorumError when these few islands are not waited for any longer."""
        if short.is_start and waited > self._deadlines.initial_seconds:
            text = f"{short.present} of {short.needed} islands came within {waited:.0f} s"
            raise QuorumError(f"round 0: {text}; outer.start_islands are needed to begin")
        is_late = waited > self._deadlines.grace(short.present)
        if self.protocol.rules.below_quorum == "stop" and not short.is_start and is_late:
            raise QuorumError(
                f"round {self.protocol.standing.round}: {short.present} of outer.quorum {short.needed} islands after "
                f"{waited:.0f} s, and outer.below_quorum is 'stop'"
            )

    # -- messages -------------------------------------------------------------------------------------------------

    def _handler(self, model: type[Message]) -> Handler:
        async def handle(source: Endpoint, body: bytes) -> bytes:
            message = parse(model, body)
            reply = self.protocol.hear(source.island, message)
            self._learn(source.island, message)
            self._flush()
            self._changed.set()
            return reply.model_dump_json().encode() if reply is not None else b"heard"

        return handle

    def _learn(self, sender: str, message: Message) -> None:
        match message:
            case Ready():
                self._peers.learn(sender, message.control_addresses)
            case Vote(digest=None):
                self.on_no(message.plan, sender, message.cause)
            case Goodbye():
                log.info("%s has left the run", sender)
                self._peers.part(sender, message.incarnation)
                self._end_reduce_with(sender, "it has left the run")

    def _flush(self) -> None:
        """Send what the protocol wants to say; one call of a kind to an island at a time."""
        outbox, self.protocol.outbox = self.protocol.outbox, []
        for island, message in outbox:
            key = island, type(message)
            running = self._calls.get(key)
            is_repeat = running is not None and not running.done() and running.get_name() == name_of(message)
            if not is_repeat and self._peers.addresses(island):
                self._calls[key] = asyncio.create_task(self._tell(island, message), name=name_of(message))

    async def _tell(self, island: str, message: Message) -> None:
        """One call, its reply heard. A no goes to every rank of the island, so that each ends its reduce."""
        kind, body, started = kind_of(type(message)), message.model_dump_json().encode(), _now()
        if isinstance(message, Vote) and message.digest is None:
            self._peers.tell_other_ranks(island, kind, body)
        try:
            reply = await self._peers.call(island, kind, body)
        except (PeerLost, DeadlineError) as error:
            self._notice_freeze()
            if started > self._woke_at:
                self._lose(island, str(error))
        except MessageError as error:
            log.info("%s refused %s: %s", island, kind, error)
        else:
            if (model := REPLIES.get(type(message))) is not None:
                with suppress(MessageError):
                    self.protocol.hear(island, parse(model, reply))
                self._flush()
            else:
                self.protocol.lost -= {island}
        self._changed.set()

    def _lose(self, island: str, cause: str) -> None:
        if island not in self.protocol.lost:
            log.info("%s is lost: %s", island, cause)
        self.protocol.lose(island)
        self._end_reduce_with(island, f"it is lost: {cause}")
        self._changed.set()

    def _end_reduce_with(self, island: str, cause: str) -> None:
        """Its part of the reduce will not come."""
        if self.protocol.phase == "reducing" and self.protocol.plan and island in self.protocol.others:
            self.on_no(self.protocol.plan.id, island, cause)

    async def _stop_if_left(self) -> None:
        """After the goodbye the others go on without this island: it commits nothing more, and its process ends."""
        if self._has_left:
            await asyncio.Event().wait()

    async def _wait_for_change(self, seconds: float) -> None:
        """Return when something was heard, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
