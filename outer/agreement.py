"""How islands agree on a round: rounds.py's messages, sent and waited for. Runs on each island's leader.

Planner: the island first by name among those alive. It fixes the plan when every live island is ready, or when
the wait for the rest has run out and a quorum is there. If it dies, the next by name is the planner.
Every island tells all others, so that a planner's death costs nobody a message.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outer.deadlines import Deadlines
from outer.errors import DeadlineError, MessageError, OuterError, PeerLost, QuorumError, TransportError
from outer.membership.base import Member, Membership, Messenger
from outer.rounds import Outcome, Plan, Question, Ready, Standing, Vote, check_plan, majority, make_plan, parse, tally
from outer.transports.base import Endpoint

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""A control message is small: a peer that has not answered by then is frozen or cut off."""
REPEAT_SECONDS = 1.0
"""How often an unanswered state of affairs is told again; it also finds out who has died."""


class Behind(OuterError):
    """Other islands have committed what this one has not; `donor` has the state."""

    def __init__(self, donor: str, cause: str) -> None:
        super().__init__(f"this island must take the state of {donor!r}: {cause}")
        self.donor = donor
        self.cause = cause


@dataclass(frozen=True)
class Rules:
    """When a plan may be fixed."""

    quorum: int
    start_islands: int
    num_parts: int


class Agreement:
    """The leader's talk with other leaders. All state lives on the event loop; `round` is set by the outer loop."""

    def __init__(
        self, island: str, rules: Rules, messenger: Messenger, membership: Membership, deadlines: Deadlines
    ) -> None:
        self._island, self._rules, self._deadlines = island, rules, deadlines
        self._messenger, self._membership = messenger, membership
        self.round = 0
        self.on_abort: Callable[[Vote], None] = lambda vote: None
        """Called with every no that is heard, so that a running reduce can end at once."""
        self._own: Ready | None = None
        self._accepted: Plan | None = None
        self._last_attempt: dict[int, int] = {}
        self._readies: dict[str, Ready] = {}
        self._rounds: dict[str, int] = {}
        self._lost: set[str] = set()
        self._votes: dict[tuple[int, int], dict[str, Vote]] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._pledged: set[tuple[int, int]] = set()
        self._members: dict[str, Member] = {}
        self._told_at = -REPEAT_SECONDS
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        messenger.serve("ready", self._on_ready)
        messenger.serve("plan", self._on_plan)
        messenger.serve("vote", self._on_vote)
        messenger.serve("outcome", self._on_outcome)

    # -- plan ---------------------------------------------------------------------------------------------

    async def plan(self, own: Ready) -> Plan:
        """The plan this island takes part in. Raises Behind, or QuorumError when too few islands come."""
        self._own, self._accepted, self._told_at = own, None, -REPEAT_SECONDS
        self._readies[self._island] = own
        now = asyncio.get_running_loop().time
        started = waiting_since = now()
        try:
            while True:
                await self._tell_ready(own)
                if self._accepted is None:
                    waited = now() - waiting_since
                    self._check_standing(own, waited)
                    # An attempt was refused: whoever refused it may say ready again, so the wait starts again.
                    if (plan := self._due(own, waited)) and not await self._offer(plan):
                        waiting_since = now()
                if self._accepted is not None:
                    self._deadlines.observe("ready", now() - started)
                    return self._accepted
                await self._wait_for_change(REPEAT_SECONDS)
        finally:
            self._own = None

    def _check_standing(self, own: Ready, waited: float) -> None:
        known = set(self._members) - self._lost
        ahead = {name: r for name, r in self._rounds.items() if r > own.round and name in known}
        if ahead:
            donor = max(sorted(ahead), key=lambda name: ahead[name])
            raise Behind(donor, f"it is in round {ahead[donor]}, this island in round {own.round}")
        peers = self._ready_now(own.round)
        if self._absent(peers) and not self._is_late(waited):
            return  # They count in the majority, too.
        digest = majority(peers.values())
        if digest != own.digest:
            donor = min(name for name, r in peers.items() if r.digest == digest)
            raise Behind(donor, f"the digests of round {own.round} differ and most islands hold {digest}")

    def _ready_now(self, round_number: int) -> dict[str, Ready]:
        return {n: r for n, r in self._readies.items() if r.round == round_number and n not in self._lost}

    def _absent(self, ready: Mapping[str, Ready]) -> set[str]:
        """Islands that are alive as far as this one knows, and not ready."""
        return set(self._members) - self._lost - set(ready)

    def _is_late(self, waited: float) -> bool:
        return waited > self._deadlines.limit("ready")

    def _due(self, own: Ready, waited: float) -> Plan | None:
        """The plan this island should offer now, if it is the planner and it is time."""
        ready, is_late = self._ready_now(own.round), self._is_late(waited)
        absent = self._absent(ready)
        # Others are about to take the majority's state: they neither plan nor count.
        ready = {name: r for name, r in ready.items() if r.digest == own.digest}
        planner = min(ready) if is_late else min(set(ready) | absent)
        # Once the first round has been planned they have come; a lost one is not waited for.
        is_start = own.round == 0 and own.round not in self._last_attempt
        needed = max(self._rules.quorum, self._rules.start_islands if is_start else 1)
        if len(ready) < needed:
            # A derived limit is for islands that are there; one that must first come back gets the whole wait.
            if waited > self._deadlines.initial_seconds:
                raise QuorumError(f"round {own.round}: {len(ready)} of {needed} islands came within {waited:.0f} s")
            return None
        if planner != self._island or (absent and not is_late):
            return None
        return make_plan(self._island, self._last_attempt.get(own.round, -1) + 1, ready)

    async def _tell_ready(self, own: Ready) -> None:
        """Tell every member, again after REPEAT_SECONDS; a frozen one must not hold up the others' plan."""
        now = asyncio.get_running_loop().time()
        if now - self._told_at < REPEAT_SECONDS:
            return
        self._told_at = now
        self._members = await self._membership.members()
        body = own.model_dump_json().encode()
        for name, member in self._members.items():
            if name != self._island and name not in self._telling:
                self._telling[name] = asyncio.create_task(self._tell_one(member, body))

    async def _tell_one(self, member: Member, body: bytes) -> None:
        try:
            reply = await self._call(member.island, member.control_addresses[0], "ready", body)
            self._rounds[member.island] = parse(Standing, reply).round
        except TransportError as error:
            log.debug("%s did not take our ready: %s", member.island, error)
        finally:
            self._telling.pop(member.island, None)
            self._changed.set()

    async def _offer(self, plan: Plan) -> bool:
        """Whether every other participant accepts; if not, those that did are told that the attempt is off."""
        self._accept(plan)
        body = plan.model_dump_json().encode()
        others = [p for p in plan.participants if p.island != self._island]
        calls = (self._call(p.island, p.control_addresses[0], "plan", body) for p in others)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        refused = [(p, r) for p, r in zip(others, replies, strict=True) if isinstance(r, BaseException)]
        for participant, error in refused:
            if not isinstance(error, TransportError):
                raise error
            log.info("round %d attempt %d: %s: %s", *plan.key, participant.island, error)
        if refused:
            cause = "; ".join(str(error) for _, error in refused)
            await self._send_vote(plan, self._no(plan, cause))
            self._accepted = None
        return not refused

    def _accept(self, plan: Plan) -> None:
        """Take part in this plan and no other. The readies in it are used up: the next attempt needs new ones."""
        self._accepted = plan
        self._last_attempt[plan.round] = plan.attempt
        for participant in plan.participants:
            if self._readies.get(participant.island) == participant and participant.island != self._island:
                del self._readies[participant.island]

    # -- vote ---------------------------------------------------------------------------------------------

    async def decide(self, plan: Plan, digest: str | None, cause: str = "") -> bool:
        """Whether the attempt commits, by everybody's votes. `digest` is this island's result, None a failure."""
        own = self._no(plan, cause) if digest is None else self._yes(plan, digest)
        self._hear(own)
        await self._send_vote(plan, own)
        started = asyncio.get_running_loop().time()
        limit = self._deadlines.limit("reduce")
        while (outcome := self._tally(plan)) == "open" and plan.key not in self._pledged:
            missing = set(plan.names) - set(self._votes[plan.key])
            if missing <= self._lost or asyncio.get_running_loop().time() - started > limit:
                break
            if not await self._wait_for_change(REPEAT_SECONDS):
                await self._send_vote(plan, own)
        if outcome == "open" or (outcome == "commit" and plan.key in self._pledged):
            outcome = await self._resolve(plan)
        self._outcomes[plan.key] = outcome
        self._forget(plan.round)
        return outcome == "commit"

    async def _resolve(self, plan: Plan) -> Outcome:
        """Votes are missing: whoever has committed settles it; if nobody has, nobody will."""
        body = Question(round=plan.round, attempt=plan.attempt).model_dump_json().encode()
        others = [p for p in plan.participants if p.island != self._island and p.island not in self._lost]
        calls = (self._call(p.island, p.control_addresses[0], "outcome", body) for p in others)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        return "commit" if b"commit" in replies else "abort"

    async def _send_vote(self, plan: Plan, vote: Vote) -> None:
        """To the leaders that may not have it yet; a no goes to every rank, so that each ends its reduce."""
        body = vote.model_dump_json().encode()
        addresses = [
            (p.island, address)
            for p in plan.participants
            if p.island != self._island and p.island not in self._lost
            for address in (p.control_addresses if vote.digest is None else p.control_addresses[:1])
        ]
        calls = (self._call(island, address, "vote", body) for island, address in addresses)
        await asyncio.gather(*calls, return_exceptions=True)

    def _tally(self, plan: Plan) -> Outcome:
        return tally(plan, self._votes.get(plan.key, {}))

    def _yes(self, plan: Plan, digest: str) -> Vote:
        return Vote(round=plan.round, attempt=plan.attempt, island=self._island, digest=digest)

    def _no(self, plan: Plan, cause: str) -> Vote:
        return Vote(round=plan.round, attempt=plan.attempt, island=self._island, cause=cause[:2000])

    def _hear(self, vote: Vote) -> None:
        self._votes.setdefault(vote.key, {}).setdefault(vote.island, vote)
        if vote.digest is None:
            self.on_abort(vote)
        self._changed.set()

    def _forget(self, before_round: int) -> None:
        for table in (self._votes, self._outcomes):
            for key in [k for k in table if k[0] < before_round - 1]:
                del table[key]
        self._pledged = {key for key in self._pledged if key[0] >= before_round - 1}
        self._last_attempt = {r: a for r, a in self._last_attempt.items() if r >= before_round - 1}

    # -- what peers say -----------------------------------------------------------------------------------

    async def _on_ready(self, source: Endpoint, body: bytes) -> bytes:
        ready = parse(Ready, body)
        ready.check(self._rules.num_parts)
        self._readies[ready.island] = ready
        self._rounds[ready.island] = ready.round
        self._lost.discard(ready.island)
        self._changed.set()
        return Standing(round=self.round).model_dump_json().encode()

    async def _on_plan(self, source: Endpoint, body: bytes) -> bytes:
        plan = parse(Plan, body)
        if self._own is None:
            raise MessageError(f"{self._island!r} is not ready for round {plan.round}")
        if self._accepted is not None:
            raise MessageError(f"{self._island!r} has accepted attempt {self._accepted.attempt}")
        check_plan(plan, self._own, self._last_attempt.get(plan.round, -1), self._rules.num_parts)
        self._accept(plan)
        self._changed.set()
        return b"accepted"

    async def _on_vote(self, source: Endpoint, body: bytes) -> bytes:
        vote = parse(Vote, body)
        self._check_round(vote.round)
        self._hear(vote)
        return b"heard"

    async def _on_outcome(self, source: Endpoint, body: bytes) -> bytes:
        question = parse(Question, body)
        self._check_round(question.round)
        if question.key not in self._outcomes:
            # The asker will abort on our "open": from now on we do not commit on votes alone.
            self._pledged.add(question.key)
            self._changed.set()
        return self._outcomes.get(question.key, "open").encode()

    def _check_round(self, round_number: int) -> None:
        # A peer may run ahead by a round, never by more: anything else would fill memory.
        if not self.round - 1 <= round_number <= self.round + 1:
            raise MessageError(f"asked about round {round_number}, this island is in round {self.round}")

    # -- plumbing -----------------------------------------------------------------------------------------

    async def _call(self, island: str, address: str, kind: str, body: bytes) -> bytes:
        try:
            reply = await self._messenger.call(address, kind, body, timeout_seconds=CALL_SECONDS)
        except (PeerLost, DeadlineError):
            self._lost.add(island)
            self._changed.set()
            raise
        self._lost.discard(island)
        return reply

    async def _wait_for_change(self, seconds: float) -> bool:
        """Whether something was heard within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True
