"""The all-to-all reduce: every part's mean over the participants, bit-equal on all of them.

For each part one participant is the reducer. The others encode their pseudo-gradient and send it to
the reducer, which decodes and sums in fp32 in participant order, encodes the mean once, and sends
it to all. Every participant, the reducer included, decodes the same bytes, so a codec's error does
not grow with the number of islands. With a sparse codec every participant receives every payload
and computes the mean itself.

Participants that observe (outer/agreement/messages.py) send no pseudo-gradient, but reduce parts
like the others and receive all means. Parts are pipelined: several are encoded, sent, summed and
decoded at the same time. The run's config selects the merge rule (outer/merges) and the filters
that leave outliers out of a mean (outer/reduce/filters.py).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from outer.agreement.messages import Plan
from outer.audits.commitments import SignedPayload
from outer.audits.kept_payloads import KeptPayloads
from outer.codecs.choice import CodecChoice
from outer.config import MergeConfig
from outer.errors import first_cause
from outer.hooks import NO_HOOKS, Hooks, Phase
from outer.identity.island_key import SIGNATURE_BYTES
from outer.merges import build_merge
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.network.messages import unpack_carriers
from outer.reduce.assignment import Assignment
from outer.reduce.computing import compute
from outer.reduce.filters import AttemptFilters, OutlierFilters
from outer.reduce.means import encode_mean_of
from outer.reduce.payloads import Mean, Payloads
from outer.space.layout import Space
from outer.transports.base import Transport

log = logging.getLogger(__name__)

PARTS_IN_FLIGHT = 48
"""Limit of parts per rank. With fewer, links to some peers are idle; each part in flight takes
memory of its size.
"""
DEFAULT_MERGE = MergeConfig()
DigestAfter = Callable[[int, torch.Tensor, int], bytes]
"""Function of (part, mean, number of islands): digest of the part's state after a commit. Any
thread may call it.
"""


@dataclass(frozen=True)
class _CarrierRank:
    """The data of this rank that all attempts share."""

    transport: Transport
    payloads: Payloads
    space: Space
    me: Endpoint
    hooks: Hooks
    config: MergeConfig
    kept: KeptPayloads | None


class Reducer:
    """One rank's side of the reduce, for the parts it carries. The carriers of all participants run
    it together.
    """

    def __init__(
        self,
        transport: Transport,
        codecs: CodecChoice,
        space: Space,
        me: Endpoint,
        hooks: Hooks = NO_HOOKS,
        config: MergeConfig = DEFAULT_MERGE,
        kept: KeptPayloads | None = None,
    ) -> None:
        """Create a reducer. `kept` keeps payloads that other islands may audit; None if there are
        no audits.
        """
        self.me = me
        self.payloads = Payloads(codecs, space)
        self.feedbacks = self.payloads.feedbacks
        transport.max_payload_bytes = self.payloads.longest + (
            0 if kept is None else SIGNATURE_BYTES
        )
        self.filters = OutlierFilters(config)
        self._rank = _CarrierRank(transport, self.payloads, space, me, hooks, config, kept)
        self.last_means: dict[int, tuple[int, Mapping[int, Mean]]] = {}
        """Last committed round and its means, by fragment. Kept only if the merge rule or a filter
        needs them.
        """
        self._awaited: Counter[tuple[Leg, str]] = Counter()
        """Number of payloads that the last attempt had not received when it ended, by leg and
        island.
        """
        self.filtered: dict[str, int] = {}
        """Number of parts that this rank reduced in the last attempt without an island's part, by
        island.
        """

    def commit(self, round_number: int, means: Mapping[int, Mean]) -> None:
        """Record that the round committed `means` (by part). Must be called at each commit, before
        the next attempt.

        The values are kept without a copy, so the caller must not change them.
        """
        self.release()
        for feedback in self.feedbacks:
            feedback.commit()
        self.filters.commit(round_number, means)
        if self._rank.config.needs_last_mean:
            space = self._rank.space
            of_params = {
                part: mean for part, mean in means.items() if not space.parts[part].is_replaced
            }
            self.last_means[space.fragment_of(round_number)] = round_number, of_params

    def release(self) -> None:
        """Drop the payloads that were kept of the last attempt, because it is over."""
        if self._rank.kept is not None:
            self._rank.kept.clear()

    def forget(self) -> None:
        """Drop everything remembered from earlier rounds, because the island has taken another
        history.
        """
        for feedback in self.feedbacks:
            feedback.clear()
        self.filters.clear()
        self.last_means.clear()

    @property
    def stalled_by(self) -> tuple[str, Leg] | None:
        """The island that alone delayed the last attempt on this rank, and the leg of its missing
        payloads.

        A missing mean is weak evidence, as its reducer may wait for others. So payloads to be
        reduced come first.
        """
        for leg in (Leg.REDUCE, Leg.GATHER):
            if islands := {
                island for (of, island), count in self._awaited.items() if of is leg and count
            }:
                return (min(islands), leg) if len(islands) == 1 else None
        return None

    async def run(
        self,
        plan: Plan,
        pseudo_grads: Mapping[int, torch.Tensor],
        digest_after: DigestAfter | None = None,
    ) -> dict[int, Mean]:
        """Return the mean of each part that this rank carries. An observer passes {}. The caller
        sets a time limit.

        With `digest_after` each part is also stepped and hashed as soon as its mean has arrived,
        before the others.

        Raises TransportError, also PoisonError, which names an island whose payload must not enter
        a mean. Raises plain OuterError when this island's own pseudo-gradient is not finite.

        A part starts, and posts its receives, only when every part at least PARTS_IN_FLIGHT before
        it is done. So a payload that an unfinished part waits for is queued only behind parts that
        its receiver has also started. No two ranks can wait for each other, even over a transport
        that transfers few payloads at a time.
        """
        space = self._rank.space
        last_round, last = self.last_means.get(space.fragment_of(plan.round), (-1, {}))
        # Means from before a missed commit are too old to predict the next mean.
        last = last if last_round == plan.round - space.num_fragments else {}
        attempt = _Attempt(
            self._rank, plan, last, self.filters.begin(plan.round, plan.names), digest_after
        )
        for feedback in self.feedbacks:
            feedback.drop()
        self.filtered = attempt.filtered
        self._awaited = attempt.awaited
        if self._rank.kept is not None:
            self._rank.kept.begin(plan)
        self._rank.hooks.reached("send", plan.round)
        started: dict[int, asyncio.Task[Mean]] = {}
        window: deque[int] = deque()
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in attempt.own_parts if attempt.observes else sorted(pseudo_grads):
                    while window and window[0] <= part - PARTS_IN_FLIGHT:
                        await asyncio.wait([started[window.popleft()]])
                    started[part] = tasks.create_task(attempt.reduce(part, pseudo_grads.get(part)))
                    window.append(part)
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        if attempt.filtered:
            log.info(
                "round %d attempt %d: parts filtered out: %s",
                plan.round,
                plan.attempt,
                dict(attempt.filtered),
            )
        return {part: task.result() for part, task in started.items()}


class _Attempt:
    """One attempt at a round on one rank."""

    def __init__(
        self,
        rank: _CarrierRank,
        plan: Plan,
        last: Mapping[int, Mean],
        filters: AttemptFilters,
        digest_after: DigestAfter | None,
    ) -> None:
        self._digest_after = digest_after
        self._transport = rank.transport
        self._payloads = rank.payloads
        self._space = rank.space
        self._me = rank.me
        self._hooks = rank.hooks
        self._kept = rank.kept
        self._plan = plan
        self._last = last
        self._filters = filters
        self.filtered: Counter[str] = Counter()
        self.awaited: Counter[tuple[Leg, str]] = Counter()
        self._reached: set[Phase] = set()
        self._merge = build_merge(rank.config)
        self._assignment = Assignment(plan)
        self._contributors = [p.island for p in plan.contributors]
        self._others = [name for name in plan.names if name != self._me.island]
        self._carriers = {p.island: unpack_carriers(p.carriers) for p in plan.participants}
        self.observes = self._me.island not in self._contributors

    @property
    def own_parts(self) -> list[int]:
        """Return the parts of this round that this rank carries."""
        carriers = self._carriers[self._me.island]
        groups = self._space.part_groups_in(self._plan.round)
        return sorted(
            i
            for group in groups
            for i in self._space.parts_in[group]
            if carriers[i] == self._me.rank
        )

    async def reduce(self, part: int, pseudo_grad: torch.Tensor | None) -> Mean:
        """Reduce one part with the other participants, and return its mean. `pseudo_grad` is None
        on an observer.
        """
        reducer = self._assignment.reducer_of(part)
        if self._payloads.are_gathered(part):
            payload = await self._make_mean(part, pseudo_grad, to_all=True)
        elif reducer == self._me.island:
            payload = await self._as_reducer(part, pseudo_grad)
        else:
            payload = await self._as_sender(part, pseudo_grad, reducer)
        mean = await compute(
            self._space.parts[part].num_elements, self._decode_mean, part, payload, reducer
        )
        self._reach("reducing")
        return mean

    async def _as_reducer(self, part: int, pseudo_grad: torch.Tensor | None) -> torch.Tensor:
        """Compute the encoded mean and send it to all participants."""
        mean = await self._make_mean(part, pseudo_grad)
        async with asyncio.TaskGroup() as tasks:
            for name in self._others:
                tasks.create_task(self._send(name, Leg.GATHER, part, mean))
        return mean

    async def _make_mean(
        self, part: int, pseudo_grad: torch.Tensor | None, *, to_all: bool = False
    ) -> torch.Tensor:
        """Compute the encoded mean. With `to_all` this island's own payload is sent to all
        participants.
        """
        payloads = await self._collect(part, pseudo_grad, to_all=to_all)
        num_elements = len(payloads) * self._space.parts[part].num_elements
        mean, filtered = await compute(num_elements, self._merge_payloads, part, payloads)
        self.filtered.update(filtered)
        if self._kept is not None and not to_all:
            self._kept.keep(part, payloads, mean)
        return mean

    async def _collect(
        self, part: int, pseudo_grad: torch.Tensor | None, *, to_all: bool
    ) -> dict[str, SignedPayload]:
        """Return the payloads of all contributors, in participant order, whatever the order of
        arrival.
        """
        others = [name for name in self._contributors if name != self._me.island]
        own: torch.Tensor | None = None
        async with asyncio.TaskGroup() as tasks:
            receives = {
                name: tasks.create_task(self._receive_signed(name, part)) for name in others
            }
            if pseudo_grad is not None:
                own = await compute(pseudo_grad.numel(), self._encode_own, part, pseudo_grad)
                for name in self._others if to_all else ():
                    tasks.create_task(self._send(name, Leg.REDUCE, part, own))
        payloads = {name: task.result() for name, task in receives.items()}
        payloads |= {} if own is None else {self._me.island: SignedPayload(own)}
        return {name: payloads[name] for name in self._contributors}

    async def _as_sender(
        self, part: int, pseudo_grad: torch.Tensor | None, reducer: str
    ) -> torch.Tensor:
        """Send this island's payload to the reducer and receive the encoded mean."""
        async with asyncio.TaskGroup() as tasks:
            # Posted before the send, because gloo announces a receive only after the data that are
            # already queued.
            mean = tasks.create_task(self._receive(reducer, Leg.GATHER, part))
            if pseudo_grad is not None:
                payload = await compute(pseudo_grad.numel(), self._encode_own, part, pseudo_grad)
                await self._send(reducer, Leg.REDUCE, part, payload)
        return mean.result()

    def _merge_payloads(
        self, part: int, signed: Mapping[str, SignedPayload]
    ) -> tuple[torch.Tensor, list[str]]:
        """Return the encoded mean, and the islands that the filters left out of it. Raises
        PoisonError.
        """
        last = self._last[part].values if part in self._last else None
        encoded = [each.payload for each in signed.values()]
        return encode_mean_of(
            part, encoded, self._plan, self._payloads, self._merge, self._filters, last
        )

    def _decode_mean(self, part: int, payload: torch.Tensor, reducer: str) -> Mean:
        mean = self._payloads.decode_mean(part, payload, reducer)
        find = self._digest_after
        return replace(mean, digest_after=find and find(part, mean.values, len(self._contributors)))

    def _encode_own(self, part: int, pseudo_grad: torch.Tensor) -> torch.Tensor:
        """Return this island's payload. Raises OuterError when it cannot be sent."""
        self._payloads.check_own(part, pseudo_grad)
        return self._payloads.encode(part, self._hooks.pseudo_grad(self._plan.round, pseudo_grad))

    async def _send(self, island: str, leg: Leg, part: int, payload: torch.Tensor) -> None:
        payload = self._hooks.payload(self._plan.round, payload)
        if self._kept is not None and self._is_signed(leg, part):
            payload = await asyncio.to_thread(
                self._kept.commitments.seal, self._plan, part, payload
            )
        await self._transport.send(self._endpoint(island, part), self._tag(leg, part), payload)
        self._reach("sending")

    async def _receive(self, island: str, leg: Leg, part: int) -> torch.Tensor:
        num_bytes = self._payloads.num_bytes(part, of_mean=leg is Leg.GATHER)
        num_bytes += SIGNATURE_BYTES * self._is_signed(leg, part)
        self.awaited[leg, island] += 1
        payload = await self._transport.recv(
            self._endpoint(island, part), self._tag(leg, part), num_bytes
        )
        self.awaited[leg, island] -= (
            1  # Not reached if the receive fails: then the payload is still missing.
        )
        return payload

    async def _receive_signed(self, island: str, part: int) -> SignedPayload:
        """Receive a contributor's payload. Raises PoisonError if audits are on and it is not
        signed.
        """
        payload = await self._receive(island, Leg.REDUCE, part)
        if self._kept is None or not self._is_signed(Leg.REDUCE, part):
            return SignedPayload(payload)
        return await asyncio.to_thread(
            self._kept.commitments.open, self._plan, part, island, payload
        )

    def _is_signed(self, leg: Leg, part: int) -> bool:
        """Return whether payloads of the part carry a signature, because a reducer may have to show
        them.
        """
        return (
            self._kept is not None and leg is Leg.REDUCE and not self._payloads.are_gathered(part)
        )

    def _reach(self, phase: Phase) -> None:
        if phase not in self._reached:
            self._reached.add(phase)
            self._hooks.reached(phase, self._plan.round)

    def _endpoint(self, island: str, part: int) -> Endpoint:
        return Endpoint(island, self._carriers[island][part])

    def _tag(self, leg: Leg, part: int) -> Tag:
        return Tag(self._plan.round, self._plan.attempt, leg, part)
