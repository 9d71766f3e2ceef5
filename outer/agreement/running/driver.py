"""Runs the round protocol (state_machine.py) on an island's leader: adds the calls, the clock and
the deadlines.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from outer.agreement.messages import Goodbye, Plan, Ready, Status, Vote, VoteList, VoteReceipt
from outer.agreement.planner import GiveUp, TooFew
from outer.agreement.rules import Behind
from outer.agreement.running.calls import CALLS, REPLIES, OpenCalls
from outer.agreement.running.changes import VOTE_SECONDS, Changes
from outer.agreement.running.doubts import Doubts
from outer.agreement.running.failure_detector import PING_SECONDS, FailureDetector
from outer.agreement.running.grace import GraceTimer, HeldUpTimer, MissedRounds, find_contributors
from outer.agreement.running.limits import plan_limit, query_limit, vote_limit
from outer.agreement.running.peers import Peers, kind_of
from outer.agreement.running.too_few import FewIslands
from outer.agreement.running.waiting import WaitReporter, describe_gathering, describe_vote
from outer.agreement.state_machine import RoundProtocol
from outer.errors import BehindError, DeadlineError, MessageError, OuterError, PeerLost
from outer.membership.base import Member
from outer.network.endpoints import Endpoint
from outer.network.event_loop import assert_on_loop, loop_time
from outer.network.messages import Message, receive
from outer.network.rejections import Rejections
from outer.report import Waiting

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 1.5
Interruption = Literal["", "behind", "waited for", "time is up"]
"""The reason why inner steps end early; empty if they continue."""


class ProtocolDriver:
    """Conversation of this island's leader with the other leaders. All methods run on one event
    loop.

    `on_no` is called with (plan id, island, cause) for every no vote and lost participant, to end a
    running reduce. `on_wait` is called every few seconds while a round makes no progress, and with
    None when it continues. `on_lost` is called with an island that has just become lost, and the
    cause. `rejections` counts claims without proof.
    """

    def __init__(
        self,
        protocol: RoundProtocol,
        peers: Peers,
        *,
        on_no: Callable[[str, str, str], None],
        on_wait: Callable[[Waiting | None], None] = lambda waiting: None,
        on_lost: Callable[[str, str], None] = lambda island, cause: None,
        rejections: Rejections | None = None,
    ) -> None:
        self._on_wait = on_wait
        self._rejections = rejections or Rejections()
        self._protocol = protocol
        self._knowledge = protocol.knowledge
        self._peers = peers
        self._deadlines = peers.deadlines
        self._on_no = on_no
        self._calls = OpenCalls(peers, self._call)
        self._changes = Changes(self._knowledge)
        self._has_left = False
        self._planned_at = 0.0
        self._held_up = HeldUpTimer(self._knowledge, peers.deadlines)
        self._few = FewIslands(self._knowledge, peers.deadlines, lambda: peers.trouble)
        self._missed = MissedRounds(self._knowledge)
        self._doubts = Doubts(self._knowledge)
        send = self._send_outbox
        changed = self._changes.add
        self._detector = FailureDetector(
            protocol, peers, send, self._end_reduce_with, changed, on_lost
        )
        for model in CALLS:
            peers.messenger.serve(kind_of(model), partial(self._on_message, model))

    @property
    def protocol(self) -> RoundProtocol:
        """What this island knows and decides. The event loop alone may touch it."""
        assert_on_loop()
        return self._protocol

    # -- the calls of the outer loop ---------------------------------------------------------------

    async def start(self) -> None:
        await self._detector.start()

    async def update_status(self, status: Status) -> None:
        self._protocol.update_status(status)
        self._detector.announce()
        self._send_outbox()

    async def plan(self, own: Ready, on_sent: Callable[[], None] = lambda: None) -> Plan:
        """Announce that this island is ready, call `on_sent`, and return the plan in which it takes
        part.

        Raises BehindError if another history survives, and QuorumError if too few islands join.
        """
        self._protocol.prepare(own)
        self._send_outbox()
        on_sent()
        await self._detector.find_members()
        grace = GraceTimer(self._protocol, self._deadlines, self._missed)
        warned_at = loop_time()
        waits = WaitReporter(loop_time(), self._on_wait)
        started = loop_time()
        planless_since = None
        while True:
            await self._stop_if_left()
            self._detector.check_freeze()
            grace.update(loop_time(), self._detector.woke_at)
            self._held_up.update(loop_time(), self._detector.woke_at)
            patience = grace.seconds_left
            decision = self._protocol.try_plan(is_late=grace.is_late, is_patient=patience > 0)
            self._send_outbox()
            match decision:
                case Plan():
                    waits.end()
                    self._planned_at = loop_time()
                    self._few.on_plan(decision)
                    return decision
                case Behind():
                    waits.end()
                    raise BehindError(decision.donors, decision.cause)
                case GiveUp(cause):
                    raise OuterError(cause)
                case TooFew():
                    warned_at = self._few.check(decision, grace.waited, warned_at, loop_time())
            planless_since = (
                self._pass_over(planless_since, is_late=grace.is_late) if decision is None else None
            )
            about = self._protocol, decision, self._detector.losses, loop_time() - started
            waits.report(loop_time(), partial(describe_gathering, *about, is_late=grace.is_late))
            await self._changes.wait(min(PING_SECONDS, patience or PING_SECONDS))

    async def contribute(self, own: Ready) -> None:
        """Change from an observer that waits in `plan` to a contributor, because the inner steps
        are done.
        """
        self._protocol.contribute(own)
        self._send_outbox()
        self._changes.add()

    async def decide(self, vote: Vote, on_sent: Callable[[], None] = lambda: None) -> bool:
        """Vote on the plan and return whether it commits. `on_sent` is called once the vote is
        being sent.
        """
        await self._stop_if_left()
        self._protocol.vote(vote)
        self._send_outbox()
        on_sent()
        started = loop_time()
        plan = self._protocol.plan
        num_freezes = self._deadlines.num_freezes
        limit = vote_limit(self._deadlines, started - self._planned_at)
        waits = WaitReporter(started, self._on_wait)
        assert plan is not None, "an island votes on the plan it takes part in"
        while True:
            # After a freeze all votes may have arrived although this island's own vote has reached
            # no other island.
            self._detector.check_freeze()
            late = loop_time() - max(started, self._detector.woke_at) - limit
            is_slow = late > -limit / 2
            is_over = late > query_limit(self._deadlines)
            outcome = self._protocol.conclude(is_late=late > 0, is_over=is_over, is_slow=is_slow)
            if outcome != "open":
                break
            self._send_outbox()
            waits.report(
                loop_time(), partial(describe_vote, self._protocol, plan, loop_time() - started)
            )
            await self._changes.wait(PING_SECONDS)
            await self._stop_if_left()
        waits.end()
        self._send_outbox()
        self._changes.add()
        if outcome == "commit":
            self._deadlines.observe("vote", loop_time() - started, num_freezes)
            self._few.on_commit(plan)
            self._missed.on_commit(plan)
        return outcome == "commit"

    async def say_goodbye(self, goodbye: Goodbye) -> None:
        """Notify all islands that this one leaves. Islands that do not answer soon will find it
        lost.
        """
        # An attempt in progress may end first, because the other participants need this island's
        # vote.
        deadline = loop_time() + GOODBYE_SECONDS
        while self._protocol.state in ("reducing", "voting") and loop_time() < deadline:
            await self._changes.wait(deadline - loop_time())
        self._has_left = True
        self._detector.stop()
        # Pings that arrive during the goodbye are still answered, with a status that tells others
        # not to wait for this island.
        self._knowledge.status = self._knowledge.status.model_copy(update={"is_coming": False})
        body = goodbye.encode()
        calls = [
            self._peers.call(name, "goodbye", body) for name in self._protocol.find_left_behind()
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.gather(*calls, return_exceptions=True)

    async def interruption(self, seconds_left: float, *, entered_late: bool) -> Interruption:
        """Return why inner steps should end now: another history survives, or contributors would
        continue without this island.

        `seconds_left`: the time until the inner steps are done. `entered_late`: the island took the
        round's state while others were already training.
        """
        if self._knowledge.behind(is_settled=False) is not None:
            return "behind"
        num_ready = self._protocol.coordination.num_ready
        rules = self._knowledge.rules
        num_waiting = max(len(find_contributors(self._protocol)), num_ready)
        may_go_on = num_waiting >= rules.quorum or rules.below_quorum != "wait"
        if num_waiting and (
            entered_late or (may_go_on and seconds_left > self._deadlines.grace(num_waiting))
        ):
            return "waited for"
        return ""

    async def linger(self, seconds: float) -> bool:
        """Wait until all live islands have caught up. Return True if this island's history does not
        survive.
        """
        deadline = loop_time() + seconds
        coordination = self._protocol.coordination
        if len(self._knowledge.present) < self._knowledge.rules.tree_islands:
            self._protocol.write_to_all()  # No other island requests the status of all of them.
        asked: str | None = "nobody"
        while loop_time() < deadline and (asked == "nobody" or self._protocol.is_waited_for):
            if asked != (asked := coordination.coordinator):
                self._detector.ping()
                self._send_outbox()
            if self._protocol.is_waited_for:
                await self._changes.wait(deadline - loop_time())
        return self._knowledge.behind(is_settled=True) is not None

    async def find_donors(self) -> list[Member]:
        """Return the membership records of the islands that hold the surviving history; empty if
        this island holds it.
        """
        await self._detector.find_members()
        return self._doubts.find_donors(self._peers.members)

    async def disbelieve(self, donors: Sequence[Member]) -> None:
        """Ignore these islands' claims for a while, because the claimed state could not be taken.

        Until then they are neither donors nor waited for, unless they claim no more than this
        island holds.
        """
        for donor in donors:
            claimed = Status(
                round=donor.round, tokens=donor.tokens, digest=donor.digest or "0" * 16
            )
            self._doubts.add(donor.island, self._knowledge.statuses.get(donor.island, claimed))
        self._changes.add()

    async def believe(self, donors: Sequence[Member]) -> None:
        """Accept these islands' claims, because their state has been taken, and forget earlier
        failures.
        """
        for donor in donors:
            self._doubts.clear(donor.island)

    def _pass_over(self, since: float | None, *, is_late: bool) -> float | None:
        """Make the next island the planner if the current one is late. Return the start of the
        wait.
        """
        planner = self._protocol.gathering.find_planner(is_late=is_late)
        since = None if planner in (None, self._knowledge.me) else since or loop_time()
        if since is None or loop_time() - max(since, self._detector.woke_at) < plan_limit(
            self._deadlines
        ):
            return since
        planner = self._protocol.pass_over(is_late=is_late)
        log.warning(
            "round %d: %s makes no plan; the next by name does",
            self._knowledge.status.round,
            planner,
        )
        self._changes.add()
        return None

    # -- messages ----------------------------------------------------------------------------------

    async def _on_message(self, model: type[Message], source: Endpoint, body: bytes) -> bytes:
        message = await receive(model, body)
        sender = source.island
        reply = self._protocol.receive(sender, message)
        self._detector.hear(sender)
        self._few.hear(sender)
        match message:
            case Ready():
                self._peers.direct_addresses[sender] = message.control_addresses
            case Vote(digest=None):
                self._on_no(message.plan, sender, message.cause)
            case Goodbye():
                log.info("%s has left the run", sender)
                self._few.on_goodbye(sender)
                self._peers.remove(sender, message.incarnation)
                self._end_reduce_with(sender, "it has left the run")
        self._send_outbox()
        self._add_change(message)
        return reply.encode() if reply is not None else b"heard"

    def _send_outbox(self) -> None:
        """Send the protocol's messages, except for repetitions of a call that has not ended yet."""
        self._doubts.report_refused(self._rejections)
        outbox = self._protocol.outbox
        self._protocol.outbox = []
        self._calls.send(outbox)

    async def _call(self, island: str, message: Message, body: bytes) -> None:
        """Make the call for a message. A no vote goes to all ranks of the island, because each must
        end its reduce.
        """
        kind = kind_of(type(message))
        called_at = loop_time()
        if isinstance(message, Vote) and message.digest is None:
            self._peers.notify_other_ranks(island, kind, body)
        try:
            reply = await self._peers.call(island, kind, body, REPLIES.get(type(message)))
        except (PeerLost, DeadlineError) as error:
            self._detector.report_failure(island, str(error), called_at)
            self._changes.add()
        except MessageError as error:
            log.info("%s refused %s: %s", island, kind, error)
        else:
            self._detector.hear(island)
            if (model := REPLIES.get(type(message))) is not None:
                try:
                    self._protocol.receive(
                        island, await self._peers.read_reply(island, model, reply)
                    )
                except MessageError as error:
                    self._rejections.add_error(island, error)
                self._few.hear(island)
                self._send_outbox()
            else:
                self._knowledge.lost -= {island}
        self._add_change(message)

    def _add_change(self, message: Message) -> None:
        """Note that a message has been received or answered."""
        if isinstance(message, Ready | Status):
            self._changes.add_report()
        elif isinstance(message, VoteList | VoteReceipt) or (
            isinstance(message, Vote) and message.digest
        ):
            self._changes.add_report(VOTE_SECONDS)
        else:
            self._changes.add()

    def _end_reduce_with(self, island: str, cause: str) -> None:
        if (
            self._protocol.state == "reducing"
            and self._protocol.plan
            and island in self._protocol.others
        ):
            self._on_no(self._protocol.plan.id, island, cause)

    async def _stop_if_left(self) -> None:
        """Wait for the end of the process if the goodbye has been sent: this island must not commit
        any more.
        """
        if self._has_left:
            await asyncio.Event().wait()
