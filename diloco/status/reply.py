"""An island's answer to requests for its status, and the server on its rank 0 that gives it.

    call            body    reply
    island_status   empty   IslandStatus

As with the doctor's calls, anybody who knows the address, and the run key if there is one, may ask.
"""

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Protocol

from pydantic import Field

from diloco.formatting import one_line
from diloco.records.figures import IslandFigures, LatestRecords
from diloco.records.metrics import Metrics
from diloco.records.run_folder import Tail
from outer.diagnostics import package_versions
from outer.errors import MessageError
from outer.network.endpoints import Endpoint, Messenger
from outer.network.messages import MAX_RANKS, MAX_ROUND, MAX_TOKENS, IslandName, Message
from outer.state.part_state import Position

CALL = "island_status"
MAX_EVENT_CHARACTERS = 300
MAX_STEP = 1 << 40

ShortText = Annotated[str, Field(max_length=64)]
MAX_FIGURE = 1e30
Figure = Annotated[float, Field(ge=-MAX_FIGURE, le=MAX_FIGURE)]
"""A finite number."""
Seconds = Annotated[float, Field(ge=0, lt=1e11)]


class Training(Message):
    """An island's training by its records. It comes from a peer, so it is validated strictly."""

    step: int = Field(ge=0, lt=MAX_STEP)
    """The last inner step of the run that the island has made."""
    loss: Figure | None
    """Training loss of that step, in nats per token."""
    heldout_loss: Figure | None
    tokens_per_second: Figure | None
    committed: int = Field(ge=0, lt=MAX_ROUND)
    """Committed rounds in these records, those of the island's earlier processes included."""
    aborted: int = Field(ge=0, lt=MAX_ROUND)
    """Aborted attempts in these records."""
    bytes_sent: int = Field(ge=0, lt=MAX_TOKENS)
    """Bytes sent in these attempts."""
    digest: str = Field(max_length=64, pattern=r"^[0-9a-f]*$")
    """Digest of the state after the last committed round, or empty."""
    event: str = Field(max_length=MAX_EVENT_CHARACTERS)
    """The latest event, or empty."""
    event_seconds: Seconds
    """Seconds since that event."""


class IslandStatus(Training):
    """The state of a running island."""

    island: IslandName
    doing: ShortText
    """What its training thread is doing: an inner step, a round, ..."""
    doing_seconds: Seconds
    """For how many seconds it has been doing that."""
    num_steps: int = Field(ge=0, lt=MAX_STEP)
    """Inner steps of the whole run."""
    round: int = Field(ge=0, lt=MAX_ROUND)
    """Committed rounds of the run."""
    num_rounds: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds of the whole run."""
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Tokens of all islands in committed rounds."""
    ranks: int = Field(ge=1, le=MAX_RANKS)
    mesh: ShortText
    hardware: ShortText
    """The device of rank 0."""
    host: ShortText
    """Name of rank 0's machine."""
    versions: dict[ShortText, ShortText] = Field(max_length=16)
    up_seconds: Seconds
    """Seconds since its process began to answer."""


class Place(Message):
    """The part of an island's status that stays the same while its process runs."""

    island: IslandName
    num_steps: int = Field(ge=0, lt=MAX_STEP)
    num_rounds: int = Field(ge=0, lt=MAX_ROUND)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    mesh: ShortText
    hardware: ShortText


class Doing(Protocol):
    """The current work of a training thread. An ActivityMonitor has it."""

    @property
    def now(self) -> tuple[str, float]:
        """The kind of work, and for how many seconds it has lasted."""
        ...


class StatusServer:
    """Answers on rank 0 with the latest values of its records."""

    def __init__(
        self,
        messenger: Messenger,
        metrics: Metrics,
        place: Place,
        find_position: Callable[[], Position],
        doing: Doing | None,
    ) -> None:
        """`doing` is None if nothing watches the training thread.

        The time since the last record is then reported instead.
        """
        self._place = place
        self._find_position = find_position
        self._doing = doing
        self._latest = LatestRecords(place.island)
        # Metrics warns of a file that cannot be read or written.
        with suppress(OSError):
            for record in Tail(metrics.path).new_records():
                self._latest.write(record)
        self._began_at = time.monotonic()
        self._versions = package_versions()
        metrics.add_sink(self._latest)
        messenger.serve(CALL, self._on_status)

    async def _on_status(self, source: Endpoint, body: bytes) -> bytes:
        if body:
            raise MessageError(f"a call {CALL!r} with a body of {len(body)} bytes, none expected")
        return self.status().encode()

    def status(self) -> IslandStatus:
        """Return the island's state now."""
        figures = self._latest.figures
        position = self._find_position()
        now = time.time()
        silent = max(now - (figures.last_record or now), 0.0)
        doing, doing_seconds = (
            self._doing.now if self._doing is not None else ("since its last record", silent)
        )
        return IslandStatus(
            **self._place.model_dump(),
            **tell_training(figures, now).model_dump(),
            doing=doing,
            doing_seconds=doing_seconds,
            round=position.round,
            tokens=position.tokens,
            host=platform.node()[:64],
            versions=self._versions,
            up_seconds=time.monotonic() - self._began_at,
        )


def tell_training(figures: IslandFigures, now: float) -> Training:
    """Return an island's figures at unix time `now` as they are sent, without losses too large for
    a Figure.
    """
    values = {
        name: getattr(figures, name) for name in Training.model_fields if name != "event_seconds"
    }
    values |= {
        name: None
        for name, value in values.items()
        if isinstance(value, float) and abs(value) > MAX_FIGURE
    }
    values["event"] = (figures.event or "")[:MAX_EVENT_CHARACTERS]
    values["event_seconds"] = max(now - figures.event_time, 0.0) if figures.event else 0.0
    return Training(**values)


def read_figures(status: IslandStatus, now: float) -> IslandFigures:
    """Return the figures in a status that came at unix time `now`, the inverse of
    `tell_training`.
    """
    values = status.model_dump(
        include={*Training.model_fields, "round"} - {"event", "event_seconds"}
    )
    values |= {"event": one_line(status.event) or None, "event_time": now - status.event_seconds}
    return IslandFigures(name=status.island, tokens=None, **values)
