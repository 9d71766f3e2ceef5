"""The all-to-all reduce: every part's mean over the participants, bit-equal on all of them.

For each part one participant is the reducer. The others encode and send it their pseudo-gradient; the reducer
decodes and sums in fp32 in participant order, encodes the mean once, and sends that to all. Everyone, the
reducer too, decodes the same bytes, so a codec's error does not grow with the number of islands. Of sparse codecs
every participant gets every payload and makes the mean itself. Participants that listen (outer/rounds.py) send no
pseudo-gradient: they reduce parts like the others, and get all means. Parts are pipelined: several are encoded, sent,
summed and decoded at the same time. Which rule makes the mean, and who is let into it, is the run config's
(outer/merges, outer/gates.py).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress

import torch

from outer.coding import Coding
from outer.config import MergeConfig
from outer.errors import NonFiniteError, first_cause
from outer.gates import Gates, Trial
from outer.merges import build_merge
from outer.merges.base import weights_of
from outer.payloads import Mean, Payloads
from outer.phases import NO_HOOKS, Hooks
from outer.phases import Phase as RoundPhase
from outer.rounds import Plan, unpack_carriers
from outer.space import Space
from outer.transports.base import Endpoint, Phase, Tag, Transport

log = logging.getLogger(__name__)

PARTS_IN_FLIGHT = 48
"""Per rank. Links idle when too few are left to one of many peers; it costs memory: parts in flight x part size."""
DEFAULT_MERGE = MergeConfig()


@dataclass(frozen=True)
class _Rank:
    """What all attempts of this rank work with."""

    transport: Transport
    payloads: Payloads
    space: Space
    me: Endpoint
    hooks: Hooks
    config: MergeConfig


class Reducer:
    """This rank's side of the reduce. `carried` parts go through it; every participant's carriers must run it."""

    def __init__(
        self,
        transport: Transport,
        coding: Coding,
        space: Space,
        me: Endpoint,
        hooks: Hooks = NO_HOOKS,
        config: MergeConfig = DEFAULT_MERGE,
    ) -> None:
        payloads = Payloads(coding, space, hooks)
        self.feedbacks = payloads.feedbacks
        self.gates = Gates(config)
        self._rank = _Rank(transport, payloads, space, me, hooks, config)
        self.last_means: dict[int, tuple[int, Mapping[int, Mean]]] = {}
        """By fragment: the round that committed it last, and its means; kept where merging or gates look at them."""
        self.gated: dict[str, int] = {}
        """Parts that this rank reduced in the last attempt without this island, for the gates left it out."""

    def commit(self, round_number: int, means: Mapping[int, Mean]) -> None:
        """`means`, by part, are what the round committed. To be called at each commit, before the next attempt.

        The values are kept as they are, not copied: nobody may change them.
        """
        for feedback in self.feedbacks:
            feedback.commit()
        self.gates.commit(round_number, means)
        if self._rank.config.needs_last_mean:
            space = self._rank.space
            of_params = {part: mean for part, mean in means.items() if not space.parts[part].is_moment}
            self.last_means[space.fragment_of(round_number)] = round_number, of_params

    def forget(self) -> None:
        """Another history is this island's now: what was kept of its own means nothing in it."""
        for feedback in self.feedbacks:
            feedback.clear()
        self.gates.clear()
        self.last_means.clear()

    async def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """The mean of each carried part. The caller bounds the time. An island that listens gives {}.

        Raises TransportError; PoisonError among them names an island whose payload must not enter a mean. Raises
        plain OuterError when it is this island's own pseudo-gradient that is not finite.

        A part starts, and its receives are posted, when all parts PARTS_IN_FLIGHT before it are done. So whatever an
        unfinished part waits for stands behind nothing but parts that its receiver has started too: no two ranks
        can wait for each other, even where a transport lets few payloads through at a time.
        """
        space = self._rank.space
        last_round, last = self.last_means.get(space.fragment_of(plan.round), (-1, {}))
        # Only of the time before: what this rank saw before it missed a commit says little of the next mean.
        last = last if last_round == plan.round - space.num_fragments else {}
        attempt = _Attempt(self._rank, plan, last, self.gates.begin(plan.round, plan.names))
        for feedback in self.feedbacks:
            feedback.drop()
        self.gated = attempt.gated
        self._rank.hooks.reached("send", plan.round)
        started: dict[int, asyncio.Task[Mean]] = {}
        window: deque[int] = deque()
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in attempt.carried if attempt.listens else sorted(pseudo_grads):
                    while window and window[0] <= part - PARTS_IN_FLIGHT:
                        await asyncio.wait([started[window.popleft()]])
                    started[part] = tasks.create_task(attempt.reduce(part, pseudo_grads.get(part)))
                    window.append(part)
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        if attempt.gated:
            log.info("round %d attempt %d: parts left out by gates: %s", plan.round, plan.attempt, dict(attempt.gated))
        return {part: task.result() for part, task in started.items()}


class _Attempt:
    """One attempt at a round, as one rank sees it."""

    def __init__(self, rank: _Rank, plan: Plan, last: Mapping[int, Mean], gates: Trial) -> None:
        self._transport, self._payloads, self._space, self._me = rank.transport, rank.payloads, rank.space, rank.me
        self._hooks, self._config, self._plan, self._last, self._gates = rank.hooks, rank.config, plan, last, gates
        self.gated: Counter[str] = Counter()
        self._reached: set[RoundPhase] = set()
        self._merge = build_merge(rank.config)
        self._tokens = [p.weight for p in plan.givers]
        self._givers = [p.island for p in plan.givers]
        self._others = [name for name in plan.names if name != self._me.island]
        self._carriers = {p.island: unpack_carriers(p.carriers) for p in plan.participants}
        self.listens = self._me.island not in self._givers

    @property
    def carried(self) -> list[int]:
        """This rank's parts of the round's fragment."""
        carriers, groups = self._carriers[self._me.island], self._space.sent_in(self._plan.round)
        return sorted(i for group in groups for i in self._space.parts_of[group] if carriers[i] == self._me.rank)

    async def reduce(self, part: int, pseudo_grad: torch.Tensor | None) -> Mean:
        """One part's mean, when this rank is done with the part; without a pseudo-gradient from one that listens."""
        reducer = self._plan.names[part % len(self._plan.names)]
        if self._payloads.are_gathered(part):
            payload = await self._make_mean(part, pseudo_grad, to_all=True)
        elif reducer == self._me.island:
            payload = await self._as_reducer(part, pseudo_grad)
        else:
            payload = await self._as_sender(part, pseudo_grad, reducer)
        mean = await asyncio.to_thread(self._payloads.decode_mean, part, payload, reducer)
        self._reach("reducing")
        return mean

    async def _as_reducer(self, part: int, pseudo_grad: torch.Tensor | None) -> torch.Tensor:
        """The encoded mean, made here and sent to all."""
        mean = await self._make_mean(part, pseudo_grad)
        async with asyncio.TaskGroup() as tasks:
            for name in self._others:
                tasks.create_task(self._send(name, Phase.GATHER, part, mean))
        return mean

    async def _make_mean(self, part: int, pseudo_grad: torch.Tensor | None, *, to_all: bool = False) -> torch.Tensor:
        """The encoded mean, made in participant order whatever order the payloads come in; `to_all` as below."""
        payloads = await self._collect(part, pseudo_grad, to_all=to_all)
        mean, gated = await asyncio.to_thread(self._mean_of, part, payloads)
        self.gated.update(gated)
        return mean

    async def _collect(self, part: int, pseudo_grad: torch.Tensor | None, *, to_all: bool) -> list[torch.Tensor]:
        """The payloads of all that give, in participant order; this island's own is sent `to_all`."""
        others = [name for name in self._givers if name != self._me.island]
        async with asyncio.TaskGroup() as tasks:
            coming = {name: tasks.create_task(self._receive(name, Phase.REDUCE, part)) for name in others}
            own = None if pseudo_grad is None else await self._encode(part, pseudo_grad)
            if to_all and own is not None:
                for name in self._others:
                    tasks.create_task(self._send(name, Phase.REDUCE, part, own))
        payloads = {name: task.result() for name, task in coming.items()}
        if own is not None:
            payloads[self._me.island] = own
        return [payloads[name] for name in self._givers]

    async def _as_sender(self, part: int, pseudo_grad: torch.Tensor | None, reducer: str) -> torch.Tensor:
        """The encoded mean, as the reducer sends it."""
        async with asyncio.TaskGroup() as tasks:
            # Posted before anything is sent: gloo tells the other side of it behind what is being sent.
            mean = tasks.create_task(self._receive(reducer, Phase.GATHER, part))
            if pseudo_grad is not None:
                payload = await self._encode(part, pseudo_grad)
                await self._send(reducer, Phase.REDUCE, part, payload)
        return mean.result()

    def _mean_of(self, part: int, payloads: list[torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
        """The encoded mean, and who was left out of it. Raises PoisonError."""
        names, tokens = self._givers, self._tokens
        last = self._last[part].values if part in self._last else None
        # One at a time: a rule that needs all at once holds them itself.
        values = (self._payloads.decode(part, payload, name) for payload, name in zip(payloads, names, strict=True))
        gated: list[str] = []
        if self._config.has_gates:
            parts = list(values)
            out = self._gates.left_out(part, names, parts, weights_of(tokens), last)
            gated = list(compress(names, out))
            let_in = [not is_out for is_out in out]
            values, tokens = compress(parts, let_in), list(compress(tokens, let_in))
        mean = self._merge(values, weights_of(tokens), last)
        try:
            return self._payloads.encode_mean(part, mean), gated
        except NonFiniteError as error:
            raise self._payloads.overflow(part, payloads, names, error) from None

    async def _encode(self, part: int, pseudo_grad: torch.Tensor) -> torch.Tensor:
        return await asyncio.to_thread(self._payloads.encode, self._plan.round, part, pseudo_grad)

    async def _send(self, island: str, phase: Phase, part: int, payload: torch.Tensor) -> None:
        payload = self._hooks.payload(self._plan.round, payload)
        await self._transport.send(self._endpoint(island, part), self._tag(phase, part), payload)
        self._reach("sending")

    async def _receive(self, island: str, phase: Phase, part: int) -> torch.Tensor:
        num_bytes = self._payloads.num_bytes(part, of_mean=phase is Phase.GATHER)
        return await self._transport.recv(self._endpoint(island, part), self._tag(phase, part), num_bytes)

    def _reach(self, phase: RoundPhase) -> None:
        if phase not in self._reached:
            self._reached.add(phase)
            self._hooks.reached(phase, self._plan.round)

    def _endpoint(self, island: str, part: int) -> Endpoint:
        return Endpoint(island, self._carriers[island][part])

    def _tag(self, phase: Phase, part: int) -> Tag:
        return Tag(self._plan.round, self._plan.attempt, phase, part)
