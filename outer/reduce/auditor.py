"""Audits: after a reduce, recompute means of parts that other islands reduced, from the payloads
that they received.

choose: each part with a certain probability, drawn in private once its mean has arrived; all parts
after a dispute.

fetch: the reducer's signed statement, then each contributor's payload.

judge: every payload must be the one that its contributor signed, and their mean must have the bytes
that the reducer sent.

The reducer has sent the mean before it can know whether it will be audited. This island's vote
accuses an island that an audit finds at fault, so the attempt does not commit. See
docs/decisions/0024-reducers-are-audited.md.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from outer.agreement.messages import Plan
from outer.audits.commitments import (
    Commitments,
    Statement,
    digest_of,
    is_payload_signed,
    is_statement_signed,
)
from outer.audits.kept_payloads import PayloadRequest, StatementRequest
from outer.config import MergeConfig
from outer.errors import AuditError, MessageError, PeerLost, PoisonError, first_cause
from outer.merges import build_merge
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Lane, Messenger
from outer.network.messages import receive, unpack_carriers
from outer.reduce.assignment import Assignment
from outer.reduce.filters import OutlierFilters
from outer.reduce.means import encode_mean_of
from outer.reduce.payloads import Mean, Payloads

AUDITS_AT_ONCE = 4
"""Limit for the audits per rank at a time. Each audit holds the payloads of one part."""
LONGEST_CALL_SECONDS = 3600.0
"""Time limit of a call. The caller of `Auditor.run` limits the time of all calls together."""
SHORT_BYTES = 2048
"""Smallest limit for a reply, so that the text of a refusal fits."""
STATEMENT_BYTES = 512
"""Upper bound of a statement's bytes per payload, and of its other bytes."""
AGAIN_SECONDS = 0.2
PING_SECONDS = 1.0


@dataclass
class Auditor:
    """Audits on one rank, of the parts that it carries. Its methods run on the event loop."""

    probability: float
    """Probability that a part of a round is audited by at least one participant; see
    `audit_rate`."""
    me: Endpoint
    commitments: Commitments
    payloads: Payloads
    config: MergeConfig
    messenger: Messenger
    deadlines: Deadlines
    draws: random.Random = field(default_factory=random.SystemRandom)
    """Random numbers that decide which parts are audited. No other island may be able to predict
    them."""
    awaited: Counter[str] = field(default_factory=Counter)
    """Number of audits for which the last attempt was waiting when it ended, by reducer."""
    disputed: set[str] = field(default_factory=set)
    """Islands that took part in a plan in which digests differed. In the next plan with any of
    them all parts are audited, because a reducer may have sent different means."""

    async def run(self, plan: Plan, means: Mapping[int, Mean]) -> int:
        """Audit some of this rank's parts, and return their number. The caller must set a time
        limit.

        Raises AuditError, which names a reducer, or another TransportError.
        """
        self.awaited = Counter()
        chosen = self.choose(plan, means)
        gate = asyncio.Semaphore(AUDITS_AT_ONCE)
        reducer_of = Assignment(plan).reducer_of
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in chosen:
                    tasks.create_task(self._audit(plan, part, reducer_of(part), means[part], gate))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        self.disputed -= set(plan.names)
        return len(chosen)

    def choose(self, plan: Plan, means: Mapping[int, Mean]) -> list[int]:
        """Draw the parts to audit among the parts in `means` that another island has reduced."""
        rate = (
            1.0
            if self.disputed & set(plan.names)
            else audit_rate(self.probability, len(plan.names))
        )
        reduced = [part for part in sorted(means) if not self.payloads.are_gathered(part)]
        reducer_of = Assignment(plan).reducer_of
        return [
            part
            for part in reduced
            if reducer_of(part) != self.me.island and self.draws.random() < rate
        ]

    @property
    def stalled_by(self) -> str | None:
        """The island that alone delayed the audits of the last attempt, or None."""
        islands = {island for island, count in self.awaited.items() if count}
        return min(islands) if len(islands) == 1 else None

    async def _audit(
        self, plan: Plan, part: int, reducer: str, mean: Mean, gate: asyncio.Semaphore
    ) -> None:
        self.awaited[reducer] += 1
        async with gate:
            case = _Case(self, plan, part, reducer, mean.payload)
            try:
                await case.judge()
            except (PeerLost, MessageError) as error:
                if isinstance(error, AuditError):
                    raise
                # If the attempt is over or the reducer is lost, this becomes known within this time
                # and ends the audit.
                await asyncio.sleep(PING_SECONDS + self.deadlines.limit("call"))
                text = (
                    f"island {reducer!r} does not show the payloads of part {part}, which it "
                    f"reduced: {error}"
                )
                raise AuditError(reducer, text, is_wrong=False) from None
        self.awaited[reducer] -= 1


@dataclass(frozen=True)
class _Case:
    """The audit of one part in one attempt."""

    auditor: Auditor
    plan: Plan
    part: int
    reducer: str
    mean: torch.Tensor
    """The encoded mean that the reducer sent."""

    async def judge(self) -> None:
        """Check the mean. Raises AuditError if it is wrong; PeerLost or MessageError if the
        reducer does not show its payloads.
        """
        request = StatementRequest(plan=self.plan.id, part=self.part)
        longest = STATEMENT_BYTES * (4 + len(self.plan.contributors))
        statement = await receive(
            Statement, await self._call("statement", request.encode(), longest, bulk=False)
        )
        await asyncio.to_thread(self._check_statement, statement)
        shown = []
        for contributor, signed in zip(self.plan.contributors, statement.payloads, strict=True):
            shown.append(await self._fetch(contributor.island, signed.digest))
        recomputed = await asyncio.to_thread(self._recompute, shown)
        if not torch.equal(recomputed, self.mean):
            raise self._wrong(
                "is not the mean of the payloads that it received, as it shows them itself"
            )

    def _check_statement(self, statement: Statement) -> None:
        """Raise AuditError unless the statement is about the mean that was sent, and about
        payloads that contributors signed.
        """
        commitments = self.auditor.commitments
        contributors = [p.island for p in self.plan.contributors]
        is_about = (statement.plan, statement.part, len(statement.payloads))
        if is_about != (self.plan.id, self.part, len(contributors)):
            raise MessageError("its statement is about another part, plan or number of payloads")
        if not is_statement_signed(commitments.key_of(self.reducer), statement):
            raise MessageError("its statement is not signed with its key")
        if statement.mean != digest_of(self.mean):
            raise self._wrong("is not the one in its statement")
        for name, each in zip(contributors, statement.payloads, strict=True):
            public = commitments.key_of(name)
            signature = bytes.fromhex(each.signature)
            if not is_payload_signed(public, self.plan, self.part, each.digest, signature):
                raise self._wrong(f"includes a payload that island {name!r} has not sent")

    async def _fetch(self, island: str, digest: str) -> torch.Tensor:
        """Return a contributor's payload, as the reducer shows it. It must be the payload that
        the contributor signed.
        """
        request = PayloadRequest(plan=self.plan.id, part=self.part, island=island)
        longest = max(SHORT_BYTES, self.auditor.payloads.num_bytes(self.part, of_mean=False))
        body = await self._call("shown", request.encode(), longest, bulk=True)
        payload = (
            torch.frombuffer(bytearray(body), dtype=torch.uint8)
            if body
            else torch.empty(0, dtype=torch.uint8)
        )
        if await asyncio.to_thread(digest_of, payload) != digest:
            raise MessageError(
                f"the payload that it shows of island {island!r} is not the one that it has signed"
            )
        return payload

    def _recompute(self, shown: list[torch.Tensor]) -> torch.Tensor:
        """Return the encoded mean, computed in the same way as by its reducer."""
        auditor = self.auditor
        plan = self.plan
        # Rules and filters that remember earlier rounds cannot be combined with audits
        # (outer/config/outer.py).
        filters = OutlierFilters(auditor.config).begin(plan.round, plan.names)
        merge = build_merge(auditor.config)
        try:
            return encode_mean_of(self.part, shown, plan, auditor.payloads, merge, filters, None)[0]
        except PoisonError as error:
            raise self._wrong(f"includes a payload that it had to refuse ({error})") from None

    async def _call(self, kind: str, body: bytes, longest: int, *, bulk: bool) -> bytes:
        """Call the rank that reduced the part, for at most `longest` bytes. Call once more if
        its connection breaks.
        """
        participant = self.plan.participants[self.plan.names.index(self.reducer)]
        address = participant.control_addresses[unpack_carriers(participant.carriers)[self.part]]
        lane: Lane = "bulk" if bulk else "control"
        limits = {"timeout_seconds": LONGEST_CALL_SECONDS, "longest": longest}
        try:
            return await self.auditor.messenger.call(address, kind, body, lane=lane, **limits)
        except PeerLost:
            await asyncio.sleep(AGAIN_SECONDS)
            return await self.auditor.messenger.call(address, kind, body, lane=lane, **limits)

    def _wrong(self, what: str) -> AuditError:
        text = f"the mean of part {self.part} that island {self.reducer!r} sent {what}"
        return AuditError(self.reducer, text, is_wrong=True)


def audit_rate(probability: float, num_participants: int) -> float:
    """Return the probability with which each participant except the reducer audits a part. Each
    draws for itself.

    The probability of at least one audit is then `probability`. Accomplices of the reducer do not
    audit: with h honest participants among n - 1 it is 1 - (1 - probability)^(h / (n - 1)).

    >>> [round(audit_rate(0.1, n), 4) for n in (2, 4, 8)]
    [0.1, 0.0345, 0.0149]
    """
    if num_participants < 2:
        return 0.0
    return 1 - (1 - probability) ** (1 / (num_participants - 1))
