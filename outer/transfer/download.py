"""The receiving side of a state transfer: one rank's parts, from several donors at once, while
rounds continue.

    run(at_least)             fetch every part at round `at_least` or later; parts arrive at
                              different rounds
    catch_up(target)          bring all parts to one round by the means that they lack
    describe(round, digest)   ask the donors whether this is the digest of that round

Every donor has workers that take the next part from one common queue, so a faster donor serves more
parts. A part that a donor fails to serve goes back into the queue. Residuals of error feedback are
never transferred.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from outer.errors import TransportError, list_some
from outer.membership.base import Member
from outer.network.endpoints import Messenger
from outer.network.event_loop import loop_time
from outer.transfer.cache import PartsCache
from outer.transfer.donor import PART_SECONDS, Description
from outer.transfer.donor_client import DonorClient, find_description
from outer.transfer.download_plan import DownloadPlan
from outer.transfer.part_fetcher import PartFetcher

log = logging.getLogger(__name__)

WORKERS_PER_DONOR = 4
PAUSE_SECONDS = 0.2
"""Pause before a donor that was busy or behind is asked again."""
LOG_SECONDS = 10.0
TELL_SECONDS = 2.0


class Download:
    """The download of one rank's parts. Its methods run on the messenger's event loop, one at a
    time.
    """

    def __init__(
        self,
        messenger: Messenger,
        plan: DownloadPlan,
        cache: PartsCache | None = None,
        on_first_part: Callable[[int], None] = lambda round_number: None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create a download. See `PartFetcher` for `on_first_part`. `on_progress` gets a line of
        text every TELL_SECONDS, on the event loop.
        """
        self._on_progress = on_progress
        self._messenger = messenger
        self._plan = plan
        self._cache = cache
        self.fetcher = PartFetcher(plan, cache, on_first_part)
        self.parts = self.fetcher.parts
        self._donors: list[DonorClient] = []
        self._has_read_cache = False

    def use_donors(self, donors: Sequence[Member]) -> None:
        """Replace the donors. The new ones must share one history. Parts that have arrived are
        kept.
        """
        self._donors = [DonorClient(member, self._messenger, self._plan.space) for member in donors]
        self.fetcher.tokens.clear()

    async def run(self, at_least: int) -> int:
        """Fetch all parts, each at round `at_least` or later, and return the highest round among
        them.

        Raises TransportError with each donor's cause when no donor is left. Parts that have arrived
        are kept.
        """
        await self._read_cache()
        await self._fetch_all(at_least)
        return max((state.round for state in self.parts.values()), default=at_least)

    async def catch_up(self, target: int) -> int:
        """Bring all parts to one round and return it: `target`, or a later one if a part had to be
        fetched again.

        The ranks of an island call it with the highest of their rounds until all return this round.
        Raises like `run`.
        """
        while (newest := await self.run(target)) > target:
            target = newest
        return target

    async def describe(
        self,
        round_number: int | None,
        digest: str | None = None,
        check: Callable[[Description], None] = lambda description: None,
    ) -> Description:
        """Return a donor's description of a round. See `find_description`. After a MessageError
        about the digest call `discard` on every rank.
        """
        return await find_description(self._donors, round_number, digest, check=check)

    async def find_history(self, round_number: int) -> tuple[str | None, int]:
        """Return (digest of an earlier round, the donors' newest round).

        Returns (None, 0) if no donor remembers that round, for example after the donor resumed from
        a checkpoint.
        """
        try:
            earlier = await find_description(self._donors, round_number, wait_seconds=0.0)
            newest = await find_description(self._donors, None, wait_seconds=0.0)
        except TransportError:
            return None, 0
        return earlier.digest, newest.position.round

    def digests(self) -> dict[int, bytes]:
        """Return the digest of each part that has arrived, like `GlobalState.digests`."""
        committed = self._plan.space.parts
        return {i: state.digest for i, state in self.parts.items() if committed[i].is_committed}

    def discard(self) -> None:
        """Drop all parts that have arrived, in memory and on disk."""
        self.parts.clear()
        if self._cache is not None:
            self._cache.remove()

    # -- the queue and its workers -----------------------------------------------------------------
    async def _fetch_all(self, target: int) -> None:
        rounds = {
            part: self.parts[part].round if part in self.parts else target
            for part in self._plan.parts
        }
        # The parts of the oldest rounds come first, because donors drop their means soonest.
        # Missing parts are less urgent.
        wanted = sorted(
            (p for p in rounds if p not in self.parts or rounds[p] < target), key=rounds.__getitem__
        )
        if not wanted:
            return
        if not self._donors:
            raise TransportError("there is no island to take the state from")
        queue: asyncio.Queue[int] = asyncio.Queue()
        for part in wanted:
            queue.put_nowait(part)
        workers = [
            asyncio.create_task(self._work(donor, number, queue, target))
            for donor in self._donors
            for number in range(WORKERS_PER_DONOR)
        ]
        done = asyncio.create_task(queue.join())
        try:
            await self._watch(done, workers)
        finally:
            for task in (done, *workers):
                task.cancel()
            await asyncio.gather(done, *workers, return_exceptions=True)
        await asyncio.gather(*(donor.release() for donor in self._donors if donor.is_usable))

    async def _work(
        self, donor: DonorClient, worker: int, queue: "asyncio.Queue[int]", target: int
    ) -> None:
        """Fetch parts from one donor until cancelled. Raises TransportError when no donor is
        left.
        """
        has_place = False
        while True:
            await self._wait_until_usable(donor)
            if has_place and queue.empty():
                # Other joiners must not wait for a place that this worker does not need now.
                await donor.release(worker)
                has_place = False
            part = await queue.get()
            is_fetched = False
            has_place = True
            try:
                if donor.is_usable:
                    is_fetched = await self.fetcher.fetch(
                        donor, worker, part, target, lambda: self._patience(donor)
                    )
            except TransportError as error:
                self._suspend(donor, error)
            finally:
                if not is_fetched:
                    queue.put_nowait(part)
                queue.task_done()
            if not is_fetched:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _watch(self, done: "asyncio.Task[None]", workers: "list[asyncio.Task[None]]") -> None:
        """Wait until `done` has ended. Raises the error of a worker, and TransportError if no
        part has arrived for too long.
        """
        started = logged_at = told_at = self.fetcher.arrived_at = loop_time()
        bytes_before = self.fetcher.bytes_received
        while not done.done():
            await asyncio.wait([done, *workers], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done() and not done.done():
                    worker.result()
            now = loop_time()
            quiet = now - self.fetcher.arrived_at
            if quiet > max(PART_SECONDS, self.fetcher.deadlines.limit("part")):
                raise TransportError(
                    f"no part of the state has arrived for {quiet:.0f} s: {self._causes()}"
                )
            if now - told_at > TELL_SECONDS:
                told_at = now
                rate = (self.fetcher.bytes_received - bytes_before) / (now - started) / 1e6
                donors = ", ".join(donor.name for donor in self._donors if donor.is_usable)
                text = (
                    f"{len(self.parts)} of {len(self._plan.parts)} parts, {rate:.1f} MB/s from "
                    f"{donors}"
                )
                self._on_progress(text)
                if now - logged_at > LOG_SECONDS:
                    logged_at = now
                    log.info("downloading the state: %s", text)

    async def _read_cache(self) -> None:
        """Load the parts that an earlier process of this rank has downloaded. Further calls do
        nothing.
        """
        if self._cache is None or self._has_read_cache:
            return
        newest = (await self.describe(None)).position.round
        self._has_read_cache = True
        for part in self._plan.parts:
            bounds = self._plan.space.parts[part]
            size = bounds.num_elements
            has_momentum = not bounds.is_replaced
            state = await asyncio.to_thread(self._cache.read, part, size, has_momentum=has_momentum)
            # A part beyond the donors' newest round belongs to a history that has ended.
            if state is not None and self._round_of(part) < state.round <= newest:
                self.parts[part] = state
        log.info("%d of %d parts of the state are on disk", len(self.parts), len(self._plan.parts))

    def _round_of(self, part: int) -> int:
        return self.parts[part].round if part in self.parts else -1

    # -- donors ------------------------------------------------------------------------------------
    async def _wait_until_usable(self, donor: DonorClient) -> None:
        """Wait while the donor is suspended, then fetch its description. Raises TransportError when
        none is left.
        """
        while not donor.is_usable or donor.description is None:
            await asyncio.sleep(max(0.0, donor.suspended_until - loop_time()))
            try:
                await donor.update_description()
                if donor.description is not None:
                    position = donor.description.position
                    self.fetcher.check_history(position.round, position.tokens)
            except TransportError as error:
                self._suspend(donor, error)

    def _suspend(self, donor: DonorClient, error: TransportError) -> None:
        donor.suspend(error)
        if not any(d.is_usable for d in self._donors):
            raise TransportError(f"the state of no island can be taken: {self._causes()}")

    def _causes(self) -> str:
        return list_some([f"{donor.name}: {donor.cause}" for donor in self._donors])

    def _patience(self, donor: DonorClient) -> float:
        """Return the shortest deadline of a call in seconds. Only the last usable donor may be
        slower than the measured limit.
        """
        return 0.0 if any(d.is_usable for d in self._donors if d is not donor) else PART_SECONDS
