"""The side of a state transfer that takes: a rank's parts, from several donors at once, while rounds go on.

    run(at_least)        every part, of some round >= at_least: parts come at different rounds, as donors commit
    catch_up(target)     every part brought to one round, by the means that it lacks
    check(round, digest) the donors' word on that round

Work is pulled: each donor has workers that take the next part from one queue, so the faster gives more. What a donor
fails to give goes back into the queue. Residuals of error feedback are never taken.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outer.coding import Coding
from outer.config import OuterOptimizerConfig
from outer.deadlines import Deadlines
from outer.donor import TAKE_SECONDS, Description, MeanRequest, PartRequest
from outer.errors import MessageError, TransportError
from outer.membership.base import Member, Messenger
from outer.parts_cache import PartsCache
from outer.phases import NO_HOOKS, Hooks
from outer.source import Source, find_description
from outer.space import Space
from outer.state import PartState, advance, unpack, unpack_mean

log = logging.getLogger(__name__)

WORKERS_PER_DONOR = 4
PAUSE_SECONDS = 0.2
"""Before a donor is asked again that was busy, or had not come to the round."""
LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Share:
    """What this rank takes of a state, and by what its parts move from round to round."""

    space: Space
    parts: Sequence[int]
    coding: Coding
    optimizer: OuterOptimizerConfig
    num_islands: int = 1
    """What Delayed Nesterov counts to."""

    def is_in(self, part: int, round_number: int) -> bool:
        """Whether the round changes the part: it sends it."""
        return self.space.sends(round_number, self.space.parts[part].group)

    def mean_bytes(self, part: int, first: int, stop: int) -> int:
        """Of the means that lead the part from one round to a later one."""
        bounds = self.space.parts[part]
        count = sum(self.is_in(part, number) for number in range(first, stop))
        return count * self.coding.of_mean(bounds).num_bytes(bounds.num_elements)

    def rule_of(self, part: int) -> OuterOptimizerConfig | None:
        """By what a mean moves the part; None: a moment becomes the mean."""
        return None if self.space.parts[part].is_moment else self.optimizer


class Fetch:
    """One rank's transfer; its methods run on the messenger's event loop, one at a time."""

    def __init__(
        self,
        messenger: Messenger,
        donors: Sequence[Member],
        share: Share,
        cache: PartsCache | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self.parts: dict[int, PartState] = {}
        self.bytes_received = 0
        """Of replies with parts and means in them."""
        self._messenger, self._share, self._cache, self._hooks = messenger, share, cache, hooks
        self._sources: list[Source] = []
        self._deadlines = Deadlines(TAKE_SECONDS)
        self._tokens: dict[int, int] = {}
        """By round, the tokens behind it: another number is another history."""
        self._arrived_at = 0.0
        self._has_read_cache = self._has_begun = False
        self.use(donors)

    def use(self, donors: Sequence[Member]) -> None:
        """Take from these islands from now on; they must be of one history. What has come is kept."""
        self._sources = [Source(member, self._messenger, self._share.space) for member in donors]
        self._tokens.clear()

    async def run(self, at_least: int) -> int:
        """All parts are here, each at a round >= `at_least`: the highest round among them.

        Raises TransportError, with each donor's cause, when none can be taken from; parts that came stay.
        """
        await self._read_cache()
        await self._bring(at_least)
        return max((state.round for state in self.parts.values()), default=at_least)

    async def catch_up(self, target: int) -> int:
        """All parts are at one round: `target`, or a later one when a part had to be taken anew. Raises as `run`.

        The ranks of an island agree on the highest of their rounds, and call again until all of them return it.
        """
        while (newest := await self.run(target)) > target:
            target = newest
        return target

    async def describe(self, round_number: int | None) -> Description:
        """A round as the first donor that answers describes it; None: the newest of that donor."""
        return await find_description(self._sources, round_number)

    async def check(self, round_number: int, digest: str) -> Description:
        """The description of a round whose parts have this digest over all ranks. Raises MessageError, naming donors.

        It raises when no donor confirms the digest; then `forget` on every rank.
        """
        return await find_description(self._sources, round_number, digest)

    def digests(self) -> dict[int, bytes]:
        """Of each part, as `GlobalState.digests`."""
        return {i: state.digest for i, state in self.parts.items()}

    def forget(self) -> None:
        """Drop what has come, here and on disk."""
        self.parts.clear()
        if self._cache is not None:
            self._cache.remove()

    # -- the queue and its workers --------------------------------------------------------------------------

    async def _bring(self, target: int) -> None:
        """Every part to `target` or beyond."""
        # Those first whose means the donors will drop first; missing parts have no haste.
        rounds = {part: self.parts[part].round if part in self.parts else target for part in self._share.parts}
        wanted = [part for part in self._share.parts if part not in self.parts or rounds[part] < target]
        if not wanted:
            return
        if not self._sources:
            raise TransportError("there is no island to take the state from")
        queue: asyncio.Queue[int] = asyncio.Queue()
        for part in sorted(wanted, key=lambda part: rounds[part]):
            queue.put_nowait(part)
        workers = [
            asyncio.create_task(self._work(source, number, queue, target))
            for source in self._sources
            for number in range(WORKERS_PER_DONOR)
        ]
        done = asyncio.create_task(queue.join())
        try:
            await self._watch(done, workers)
        finally:
            for task in (done, *workers):
                task.cancel()
            await asyncio.gather(done, *workers, return_exceptions=True)
        await asyncio.gather(*(source.say_taken() for source in self._sources if source.is_usable))

    async def _work(self, source: Source, worker: int, queue: "asyncio.Queue[int]", target: int) -> None:
        """Take parts from one donor for ever. Raises TransportError when there is no donor left."""
        has_place = False
        while True:
            await self._until_usable(source)
            if has_place and queue.empty():
                # While it waits for the other workers, others must not wait for it.
                await source.say_taken(worker)
                has_place = False
            part = await queue.get()
            has_come, has_place = False, True
            try:
                if source.is_usable:
                    has_come = await self._bring_part(source, worker, part, target)
            except TransportError as error:
                self._drop(source, error)
            finally:
                if not has_come:
                    queue.put_nowait(part)
                queue.task_done()
            if not has_come:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _watch(self, done: "asyncio.Task[None]", workers: "list[asyncio.Task[None]]") -> None:
        """Return when all parts are here; raise what a worker raises, and TransportError when nothing comes."""
        started = logged = self._arrived_at = time.monotonic()
        bytes_before = self.bytes_received
        while not done.done():
            await asyncio.wait([done, *workers], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done() and not done.done():
                    worker.result()
            now = time.monotonic()
            quiet = now - self._arrived_at
            if quiet > max(TAKE_SECONDS, self._deadlines.limit("part")):
                raise TransportError(f"no part of the state has come for {quiet:.0f} s: {self._causes()}")
            if now - logged > LOG_SECONDS:
                logged = now
                self._log_progress((self.bytes_received - bytes_before) / (now - started))

    def _log_progress(self, bytes_per_second: float) -> None:
        donors = ", ".join(s.name for s in self._sources if s.is_usable)
        done, wanted, rate = len(self.parts), len(self._share.parts), bytes_per_second / 1e6
        log.info("taking the state: %d of %d parts, %.1f MB/s from %s", done, wanted, rate, donors)

    # -- one part -------------------------------------------------------------------------------------------

    async def _bring_part(self, source: Source, worker: int, part: int, target: int) -> bool:
        """Whether the part is at `target` or beyond; not when the donor is busy or behind."""
        while (state := self.parts.get(part)) is None or state.round < target:
            if state is not None and not self._share.is_in(part, state.round):
                self.parts[part] = advance(state, None, self._share.rule_of(part))
                continue
            if state is None or self._is_far(part, state, target):
                request = PartRequest(part=part, at_least=target, worker=worker)
            else:
                request = MeanRequest(part=part, round=state.round, worker=worker)
            status, body = await source.ask(request, self._deadlines, lambda: self._patience(source))
            self.bytes_received += len(body)
            if status == b"part" and isinstance(request, PartRequest):
                await self._take(source, part, body, target)
            elif status == b"mean" and state is not None and isinstance(request, MeanRequest):
                self.parts[part] = await asyncio.to_thread(self._advance, part, state, body)
            elif status == b"gone" and isinstance(request, MeanRequest):
                del self.parts[part]
            elif status in (b"busy", b"behind"):
                source.cause = f"it is {status.decode()}"
                return False
            else:
                raise MessageError(f"it answers {status[:20]!r} when asked for part {part}")
            self._arrived_at = time.monotonic()
        return True

    def _is_far(self, part: int, state: PartState, target: int) -> bool:
        """Whether the missing means are larger than the part itself."""
        return self._share.mean_bytes(part, state.round, target) > state.num_bytes

    async def _take(self, source: Source, part: int, body: bytes, target: int) -> None:
        bounds = self._share.space.parts[part]
        position, state = await asyncio.to_thread(unpack, body, bounds.num_elements, has_momentum=not bounds.is_moment)
        if position.round < target:
            raise MessageError(f"it sent part {part} of round {position.round}, asked for {target} or later")
        if position.round > source.round + 1:
            await source.learn(is_forced=True)
        # A rank may have committed a moment before its leader describes the round.
        if position.round > source.round + 1:
            raise MessageError(f"it sent part {part} of round {position.round}, but is in round {source.round}")
        self._check_history(position.round, position.tokens)
        if self._cache is not None:
            await asyncio.to_thread(self._cache.write, part, state)
        if not self._has_begun:
            self._has_begun = True
            self._hooks.reached("fetch", position.round)
        self.parts[part] = state

    def _advance(self, part: int, state: PartState, body: bytes) -> PartState:
        num_given, payload = unpack_mean(body)
        coded = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0).byte()
        codec = self._share.coding.of_mean(self._share.space.parts[part])
        mean = codec.decode(coded, state.params.numel())
        return advance(state, mean, self._share.rule_of(part), num_given, self._share.num_islands)

    def _check_history(self, round_number: int, tokens: int) -> None:
        known = self._tokens.setdefault(round_number, tokens)
        if known != tokens:
            raise MessageError(
                f"it is of another history: {tokens} tokens behind round {round_number}, {known} elsewhere"
            )

    async def _read_cache(self) -> None:
        """What an earlier process of this rank has taken; once."""
        if self._cache is None or self._has_read_cache:
            return
        newest = (await self.describe(None)).position.round
        self._has_read_cache = True
        for part in self._share.parts:
            bounds = self._share.space.parts[part]
            state = await asyncio.to_thread(
                self._cache.read, part, bounds.num_elements, has_momentum=not bounds.is_moment
            )
            # Beyond the donors' round it is of a history that has ended.
            if state is not None and state.round <= newest:
                self.parts[part] = state
        log.info("%d of %d parts of the state are on disk", len(self.parts), len(self._share.parts))

    # -- donors ---------------------------------------------------------------------------------------------

    async def _until_usable(self, source: Source) -> None:
        """Wait while the donor is dropped, then hear its description. Raises TransportError when none is left."""
        while not source.is_usable or source.description is None:
            await asyncio.sleep(max(0.0, source.dropped_until - time.monotonic()))
            try:
                await source.learn()
                if source.description is not None:
                    position = source.description.position
                    self._check_history(position.round, position.tokens)
            except TransportError as error:
                self._drop(source, error)

    def _drop(self, source: Source, error: TransportError) -> None:
        source.drop(error)
        if not any(s.is_usable for s in self._sources):
            raise TransportError(f"the state of no island can be taken: {self._causes()}")

    def _causes(self) -> str:
        return "; ".join(f"{s.name}: {s.cause}" for s in self._sources)

    def _patience(self, source: Source) -> float:
        """A donor that is slower than the others is given up early; not when it is the last."""
        has_others = any(s.is_usable for s in self._sources if s is not source)
        return 0.0 if has_others else TAKE_SECONDS
