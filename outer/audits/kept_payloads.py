"""The payloads that a reducer keeps until an attempt's outcome is known, and shows to participants
that audit it.

    statement {plan, part}            the reducer's signed account of the part's mean
                                      (control lane)
    shown     {plan, part, island}    the payload that this contributor sent for the part    (bulk
              lane)

Both are called on the rank that carries the part. While audits are on, the payloads that a rank
receives as a reducer stay in memory until the attempt ends: in total about the size of one encoded
pseudo-gradient of the round's fragment.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from outer.agreement.messages import Plan
from outer.agreement.proofs.certificate import PlanId
from outer.audits.commitments import (
    Commitments,
    SignedDigest,
    SignedPayload,
    Statement,
    build_statement,
    digest_of,
    sign_payload,
)
from outer.errors import TransportError
from outer.identity.island_key import IslandKey
from outer.network.endpoints import Endpoint, Messenger
from outer.network.messages import IslandName, Message, receive

MAX_SHOWN = 2
"""The number of times that an island may fetch the same payload. The second is for a connection
that broke."""


class StatementRequest(Message):
    """Request for the statement about a part."""

    plan: PlanId
    part: int = Field(ge=0, lt=1 << 32)


class PayloadRequest(Message):
    """Request for the payload that `island` sent for a part."""

    plan: PlanId
    part: int = Field(ge=0, lt=1 << 32)
    island: IslandName


@dataclass(frozen=True)
class _KeptPart:
    payloads: Mapping[str, SignedPayload]
    """Payloads by contributor, in the order of the plan."""
    mean: torch.Tensor


class KeptPayloads:
    """The payloads of one rank's last attempt. All methods but `clear` must be called on the
    event loop.
    """

    def __init__(self, commitments: Commitments) -> None:
        self.commitments = commitments
        self._plan: Plan | None = None
        self._parts: dict[int, _KeptPart] = {}
        self._statements: dict[int, bytes] = {}
        """Encoded statements that were requested, by part."""
        self._shown: Counter[tuple[str, int, str]] = Counter()
        """Number of times that a payload was shown, by requesting island, part and contributor."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads that are kept now."""
        return sum(
            each.payload.numel() for part in self._parts.values() for each in part.payloads.values()
        )

    def begin(self, plan: Plan) -> None:
        """Begin a new attempt and drop the payloads of an earlier one."""
        self.clear()
        self._plan = plan

    def keep(self, part: int, payloads: Mapping[str, SignedPayload], mean: torch.Tensor) -> None:
        """Keep the payloads of which this rank, as the part's reducer, computed the encoded
        `mean`. `payloads`: in the plan's order.
        """
        self._parts[part] = _KeptPart(payloads, mean)

    def clear(self) -> None:
        """Drop everything, because the attempt is over. Any thread may call it."""
        self._plan = None
        self._parts = {}
        self._statements = {}
        self._shown = Counter()

    def serve(self, messenger: Messenger) -> None:
        """Answer the auditors' calls."""
        messenger.serve("statement", self._on_statement)
        messenger.serve("shown", self._on_shown)

    async def _on_statement(self, source: Endpoint, body: bytes) -> bytes:
        request = await receive(StatementRequest, body)
        plan, kept = self._find(source, request.plan, request.part)
        known = self._statements
        if request.part not in known:
            statement = await asyncio.to_thread(self._build_statement, plan, request.part, kept)
            known[request.part] = statement.encode()
        return known[request.part]

    async def _on_shown(self, source: Endpoint, body: bytes) -> bytes:
        request = await receive(PayloadRequest, body)
        _, kept = self._find(source, request.plan, request.part)
        if (found := kept.payloads.get(request.island)) is None:
            raise TransportError(
                f"island {request.island!r} contributed nothing to part {request.part}"
            )
        asked = source.island, request.part, request.island
        self._shown[asked] += 1
        if self._shown[asked] > MAX_SHOWN:
            raise TransportError(
                f"this payload was shown to island {source.island!r} {MAX_SHOWN} times already"
            )
        return await asyncio.to_thread(lambda: found.payload.contiguous().numpy().tobytes())

    def _find(self, source: Endpoint, plan_id: str, part: int) -> tuple[Plan, _KeptPart]:
        """Return the plan and the kept part. Raises TransportError, whose text goes to the
        caller.
        """
        plan = self._plan
        if plan is None or plan.id != plan_id or source.island not in plan.names:
            raise TransportError("this island does not take part in that plan, or no longer does")
        if (kept := self._parts.get(part)) is None:
            raise TransportError(f"this rank has made no mean of part {part}")
        return plan, kept

    def _build_statement(self, plan: Plan, part: int, kept: _KeptPart) -> Statement:
        key = self.commitments.key
        signed = sign_all(key, plan, part, list(kept.payloads.values()))
        return build_statement(key, plan, part, kept.mean, signed)


def sign_all(
    key: IslandKey, plan: Plan, part: int, payloads: Sequence[SignedPayload]
) -> list[SignedDigest]:
    """Return digests and signatures of payloads. This island's own payload, which was not sent,
    is signed now.
    """
    return [
        SignedDigest(
            digest=digest_of(each.payload),
            signature=(each.signature or sign_payload(key, plan, part, each.payload)).hex(),
        )
        for each in payloads
    ]
