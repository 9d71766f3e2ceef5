"""One donor as a joiner's rank sees it: what it says of its state, calls for parts, and whether it is left alone."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from outer.account import to_json
from outer.deadlines import Deadlines
from outer.digest import seal
from outer.donor import Description, MeanRequest, PartRequest, StateRequest, TakenRequest
from outer.errors import DeadlineError, MessageError, TransportError
from outer.membership.base import Member, Messenger
from outer.rounds import check_carriers, parse, unpack_carriers
from outer.space import Space

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 10.0
DROPPED_SECONDS = 30.0
"""For so long a donor that failed is left alone."""
TAKEN_SECONDS = 2.0
AGAIN_SECONDS = 0.2
LONGEST_CALL_SECONDS = 3600.0
"""A call is bounded by what was measured, looked up again while it lasts."""


class Source:
    """Build one for each donor. `description` is None until `learn`, and again after `drop`."""

    def __init__(self, member: Member, messenger: Messenger, space: Space) -> None:
        self.member = member
        self.description: Description | None = None
        self.cause = "no answer"
        """Why it gave nothing when it was last asked."""
        self.dropped_until = 0.0
        self._messenger, self._space = messenger, space
        self._carriers: list[int] = []
        self._lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.member.island

    @property
    def is_usable(self) -> bool:
        """Not dropped, or not any more."""
        return time.monotonic() >= self.dropped_until

    @property
    def round(self) -> int:
        """The newest it has spoken of."""
        return -1 if self.description is None else self.description.position.round

    def drop(self, error: TransportError) -> None:
        """Leave it alone for DROPPED_SECONDS; its first failure is the one that is told."""
        if self.is_usable:
            log.warning("no more state from %s for %.0f s: %s", self.name, DROPPED_SECONDS, error)
            self.dropped_until, self.cause = time.monotonic() + DROPPED_SECONDS, str(error)
            self.description = None

    async def describe(self, round_number: int | None) -> Description:
        """What it says of a round; None: its newest. Raises TransportError."""
        request = StateRequest(round=round_number).model_dump_json().encode()
        address = self.member.control_addresses[0]
        reply = await self._messenger.call(address, "state", request, timeout_seconds=DESCRIBE_SECONDS)
        description = parse(Description, reply)
        if description.fingerprint != self._space.fingerprint:
            raise MessageError("it trains another model: its parameters differ from this island's")
        if description.position.round == 0 or round_number not in (None, description.position.round):
            raise MessageError(f"asked for round {round_number}, it describes round {description.position.round}")
        return description

    async def learn(self, *, is_forced: bool = False) -> None:
        """Hear its newest description unless it is known, and who carries what there. Raises TransportError."""
        async with self._lock:
            if self.is_usable and (self.description is None or is_forced):
                description = await self.describe(None)
                self._carriers = _carriers_of(description, self.member, len(self._space.parts))
                self.description = description

    async def ask(
        self, request: PartRequest | MeanRequest, deadlines: Deadlines, patience: Callable[[], float]
    ) -> tuple[bytes, bytes]:
        """(status, body) of a reply. It may take as long as calls of its kind did, or `patience` if that is longer."""
        kind = "part" if isinstance(request, PartRequest) else "mean"
        if not 0 <= request.part < len(self._carriers):
            raise MessageError("its description is missing")
        address, body = self.member.control_addresses[self._carriers[request.part]], request.model_dump_json().encode()
        started = time.monotonic()
        call = asyncio.create_task(
            self._messenger.call(address, kind, body, timeout_seconds=LONGEST_CALL_SECONDS, lane="bulk")
        )
        try:
            while not call.done():
                limit = max(deadlines.limit(kind), patience())
                left = started + limit - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"part {request.part} did not come within {limit:.0f} s")
                await asyncio.wait([call], timeout=min(left, 1.0))
            status, _, content = (await call).partition(b"\n")
        finally:
            call.cancel()
        if content:
            deadlines.observe(kind, time.monotonic() - started)
        return status, content

    async def say_taken(self, worker: int | None = None) -> None:
        """Tell its ranks that the worker (None: any) asks for nothing more: others need not wait for its place."""
        body = TakenRequest(worker=worker).model_dump_json().encode()
        calls = (
            self._messenger.call(self.member.control_addresses[rank], "taken", body, timeout_seconds=TAKEN_SECONDS)
            for rank in sorted(set(self._carriers))
        )
        await asyncio.gather(*calls, return_exceptions=True)


async def find_description(
    sources: Sequence[Source], round_number: int | None, digest: str | None = None
) -> Description:
    """The first description of a round, if a digest is given one whose parts have it. Raises TransportError."""
    give_up_at = time.monotonic() + DESCRIBE_SECONDS
    while True:
        answers = [asyncio.create_task(_answer(source, round_number)) for source in sources]
        causes, differing = [], []
        try:
            for coming in asyncio.as_completed(answers):
                name, answer = await coming
                if isinstance(answer, TransportError):
                    causes.append(f"{name}: {answer}")
                elif digest is None or answer.digest == (ours := seal(digest, to_json(answer.position.account))):
                    return answer
                else:
                    differing.append(f"{name} says {answer.digest}, here it is {ours}")
        finally:
            for task in answers:
                task.cancel()
        if differing:
            raise MessageError(f"the state taken is not that of round {round_number}: {'; '.join(differing)}")
        # A donor's leader describes a round a moment after its ranks have come to it.
        if time.monotonic() > give_up_at:
            raise TransportError(f"no island describes round {round_number}: {'; '.join(causes)}")
        await asyncio.sleep(AGAIN_SECONDS)


async def _answer(source: Source, round_number: int | None) -> tuple[str, Description | TransportError]:
    try:
        return source.name, await source.describe(round_number)
    except TransportError as error:
        return source.name, error


def _carriers_of(description: Description, donor: Member, num_parts: int) -> list[int]:
    pairs = [(pair[0], pair[1]) for pair in description.carriers if len(pair) == 2]
    try:
        check_carriers(pairs, num_parts, len(donor.control_addresses))
    except MessageError as error:
        raise MessageError(f"island {donor.island!r} describes its state wrongly: {error}") from None
    return unpack_carriers(pairs)
