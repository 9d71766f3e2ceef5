"""A joiner's connection to one donor: the description of its state, requests for parts, and
suspension on failure.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError, list_some
from outer.membership.base import Member
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Messenger
from outer.network.event_loop import loop_time
from outer.network.messages import call_message, check_carriers, unpack_carriers
from outer.network.retry import retry
from outer.space.digest import state_digest
from outer.space.layout import Space
from outer.state.part_state import state_bytes
from outer.transfer.donor import Description, MeanRequest, PartRequest, ReleaseRequest, StateRequest

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 10.0
SUSPENDED_SECONDS = 30.0
"""Time in which a donor that failed is not asked again."""
RELEASE_SECONDS = 2.0
MAX_EXTRA_BYTES = 1 << 12
"""Limit for the bytes in front of the values in a reply."""
RETRY_SECONDS = 0.2
QUIET_SECONDS = 3.0
"""Silence of a donor after which its leader is probed, while a part is awaited."""
PROBE_SECONDS = 5.0
"""Time limit for the reply to a probe. A frozen or unreachable donor does not reply, while a
slow link still can."""
LONGEST_CALL_SECONDS = 3600.0
"""Time limit of the messenger call. The real limit follows from measurements and is updated during
the call.
"""


class DonorClient:
    """A joiner's connection to one donor. `description` is None before `update_description` and
    after `suspend`.
    """

    def __init__(self, member: Member, messenger: Messenger, space: Space) -> None:
        self.member = member
        self.name = member.island
        self.description: Description | None = None
        self.cause = "no answer"
        """The reason why the last request failed."""
        self.suspended_until = float("-inf")
        self._messenger = messenger
        self._space = space
        self._carriers: list[int] = []
        self._lock = asyncio.Lock()
        self._probe_lock = asyncio.Lock()
        self._heard_at = float("-inf")

    @property
    def is_usable(self) -> bool:
        return loop_time() >= self.suspended_until

    @property
    def round(self) -> int:
        """The newest round that the donor has described, or -1."""
        return -1 if self.description is None else self.description.position.round

    def suspend(self, error: TransportError) -> None:
        """Stop asking the donor for SUSPENDED_SECONDS. While it is suspended, further errors are
        ignored.
        """
        if self.is_usable:
            log.warning(
                "no state is requested from %s for %.0f s: %s", self.name, SUSPENDED_SECONDS, error
            )
            self.suspended_until = loop_time() + SUSPENDED_SECONDS
            self.cause = str(error)
            self.description = None

    async def describe(
        self, round_number: int | None, seconds: float = DESCRIBE_SECONDS
    ) -> Description:
        """Fetch the description of a round, or of the newest round for None. Raises
        TransportError.
        """
        request = StateRequest(round=round_number)
        address = self.member.control_addresses[0]
        description = await call_message(
            self._messenger, address, "state", request, Description, timeout_seconds=seconds
        )
        self._heard_at = loop_time()
        if description.fingerprint != self._space.fingerprint:
            raise MessageError("it trains another model: its parameters differ from this island's")
        if description.position.round == 0 or round_number not in (
            None,
            description.position.round,
        ):
            raise MessageError(
                f"asked for round {round_number}, it describes round {description.position.round}"
            )
        return description

    async def update_description(self, *, is_forced: bool = False) -> None:
        """Fetch the newest description, unless one is known and the update is not forced. Raises
        TransportError.
        """
        async with self._lock:
            if self.is_usable and (self.description is None or is_forced):
                description = await self.describe(None)
                try:
                    check_carriers(
                        description.carriers,
                        len(self._space.parts),
                        len(self.member.control_addresses),
                    )
                except MessageError as error:
                    raise MessageError(
                        f"island {self.name!r} sends a wrong description of its state: {error}"
                    ) from None
                self._carriers = list(unpack_carriers(description.carriers))
                self.description = description

    async def request(
        self,
        request: PartRequest | MeanRequest,
        deadlines: Deadlines,
        patience: Callable[[], float],
    ) -> tuple[bytes, bytes]:
        """Make a request and return (status, body) of the reply. Raises TransportError.

        The time limit is measured by `deadlines` for requests of this kind, or is `patience()` if
        that is longer.
        """
        kind = "part" if isinstance(request, PartRequest) else "mean"
        if not 0 <= request.part < len(self._carriers):
            raise MessageError("its description is missing")
        address = self.member.control_addresses[self._carriers[request.part]]
        body = request.encode()
        started = loop_time()
        call = asyncio.create_task(
            self._messenger.call(
                address,
                kind,
                body,
                timeout_seconds=LONGEST_CALL_SECONDS,
                lane="bulk",
                longest=self._longest(request),
            )
        )
        try:
            while not call.done():
                limit = max(deadlines.limit(kind), patience())
                left = started + limit - loop_time()
                if left <= 0:
                    raise DeadlineError(f"part {request.part} did not come within {limit:.0f} s")
                await asyncio.wait([call], timeout=min(left, 1.0))
                if not call.done():
                    await self._check_life()
            status, _, content = (await call).partition(b"\n")
            self._heard_at = loop_time()
        finally:
            call.cancel()
        if content:
            deadlines.observe(kind, loop_time() - started)
        return status, content

    def _longest(self, request: PartRequest | MeanRequest) -> int:
        """Return an upper limit for the reply in bytes: params and momentum in fp32 are the
        longest form of a part.
        """
        return (
            2 * state_bytes(self._space.parts[request.part].num_elements, has_momentum=True)
            + MAX_EXTRA_BYTES
        )

    async def _check_life(self) -> None:
        """Raise TransportError if no reply came from the donor for QUIET_SECONDS and it does not
        answer a probe now.
        """
        async with self._probe_lock:
            if loop_time() - self._heard_at > QUIET_SECONDS:
                await self.describe(None, PROBE_SECONDS)

    async def release(self, worker: int | None = None) -> None:
        """Notify the donor's ranks that the worker, or any worker for None, needs nothing more
        for now.
        """
        body = ReleaseRequest(worker=worker).encode()
        addresses = [self.member.control_addresses[rank] for rank in sorted(set(self._carriers))]
        calls = (
            self._messenger.call(a, "taken", body, timeout_seconds=RELEASE_SECONDS)
            for a in addresses
        )
        await asyncio.gather(*calls, return_exceptions=True)


async def find_description(
    donors: Sequence[DonorClient],
    round_number: int | None,
    digest: str | None = None,
    *,
    wait_seconds: float = DESCRIBE_SECONDS,
    check: Callable[[Description], None] = lambda description: None,
) -> Description:
    """Return the first description of a round that a donor sends, of a state with `digest` (of all
    ranks' parts) if given.

    `check` raises MessageError for a description that must not be accepted.

    Donors that do not describe the round are asked again for `wait_seconds`, because a donor's
    leader describes a round slightly after its ranks have reached it. Raises TransportError if no
    donor describes the round, at once if all are lost, and MessageError if all descriptions have
    another digest or must not be accepted.
    """
    causes: list[str] = []
    attempt = partial(_find_first_description, donors, round_number, digest, causes, check)
    description = await retry(attempt, seconds=wait_seconds, pause_seconds=RETRY_SECONDS)
    if description is None:
        which = "a committed round" if round_number is None else f"round {round_number}"
        raise TransportError(f"no island could describe the state of {which}: {list_some(causes)}")
    return description


async def _find_first_description(
    donors: Sequence[DonorClient],
    round_number: int | None,
    digest: str | None,
    causes: list[str],
    check: Callable[[Description], None],
) -> Description | None:
    """Make one attempt of `find_description`. `causes` is filled with the donors' errors."""
    causes.clear()
    differing: list[str] = []
    lost: list[str] = []

    async def ask(donor: DonorClient) -> Description | None:
        try:
            answer = await donor.describe(round_number)
        except TransportError as error:
            causes.append(f"{donor.name}: {error}")
            if isinstance(error, PeerLost | DeadlineError):
                lost.append(donor.name)
            return None
        try:
            check(answer)
        except MessageError as error:
            differing.append(f"{donor.name} does not prove it: {error}")
            return None
        ours = None if digest is None else state_digest(digest, answer.position.ledger.text)
        if ours in (None, answer.digest):
            return answer
        differing.append(f"{donor.name} reports {answer.digest}, here it is {ours}")
        return None

    answers = [asyncio.create_task(ask(donor)) for donor in donors]
    try:
        for coming in asyncio.as_completed(answers):
            if (answer := await coming) is not None:
                return answer
    finally:
        for task in answers:
            task.cancel()
    if len(lost) == len(donors):
        raise TransportError(f"no island answers: {list_some(causes)}")
    if differing:
        raise MessageError(
            f"the state taken is not the state of round {round_number}: {list_some(differing)}"
        )
    return None
