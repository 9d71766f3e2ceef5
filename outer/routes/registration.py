"""Keeps one rank registered at the relays of its island, and accepts the connections that they
announce.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from outer.errors import TransportError, UnreachableError, first_line
from outer.identity.island_key import IslandKey
from outer.network.event_loop import ChangeSignal, Tasks
from outer.network.retry import backoff
from outer.network.run_key import RunKey
from outer.routes import wire
from outer.routes.addresses import Door, Route
from outer.routes.dialer import Dialer
from outer.routes.wire import (
    Answer,
    Challenge,
    Incoming,
    Joined,
    Ping,
    Pong,
    Proof,
    Register,
    Registered,
)

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
"""Shortest and longest pause in seconds between two tries to register at a relay that does not
answer."""
MAX_ANSWERS = 64
"""Limit for the dialers that one relay has announced and that are being connected at the same
time."""

Accept = Callable[[socket.socket], None]
"""Function that takes a connection whose other end is a dialer that has not proved its identity
yet."""


@dataclass(frozen=True)
class Registrant:
    """The rank that registers."""

    key: IslandKey
    rank: int
    run_key: RunKey | None
    dialer: Dialer
    accept: Mapping[Door, Accept]


class Registration:
    """Keeps a rank registered at one relay until `close`."""

    def __init__(self, relay: Route, own: Registrant, changed: ChangeSignal) -> None:
        """Begin to register. `changed` is notified when `is_up` or `cause` has changed."""
        self.relay = relay
        self._own = own
        self._changed = changed
        self.is_up = False
        self.cause = ""
        self._answers = Tasks()
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self._answers.end()

    async def _keep(self) -> None:
        """Register, and register again after each loss."""
        num_failures = 0
        while True:
            try:
                await self._register()
            except (OSError, TransportError) as error:
                cause = (
                    "it does not answer" if isinstance(error, TimeoutError) else first_line(error)
                )
                if self.is_up or cause != self.cause:
                    log.warning(
                        "the relay %s: %s; this island will register there again", self.relay, cause
                    )
                num_failures = 1 if self.is_up else num_failures + 1
                self.is_up = False
                self.cause = cause
                self._changed.notify()
            await asyncio.sleep(
                backoff(num_failures, first_seconds=FIRST_PAUSE, max_seconds=LONGEST_PAUSE)
            )

    async def _register(self) -> None:
        """Register and stay registered. Raises OSError and TransportError when the registration
        ends.
        """
        async with asyncio.timeout(wire.OPENING_SECONDS):
            connection = await self._own.dialer.connect(self.relay)
        pinging = asyncio.create_task(_ping(connection))
        try:
            async with asyncio.timeout(wire.OPENING_SECONDS):
                await self._prove(connection)
            self.is_up = True
            self.cause = ""
            self._changed.notify()
            await self._listen(connection)
        finally:
            pinging.cancel()
            connection.close()

    async def _prove(self, connection: socket.socket) -> None:
        own = self._own
        register = Register(key=own.key.public, rank=own.rank)
        await wire.send(connection, register)
        body = wire.proof_body(await wire.receive(connection, Challenge), register)
        signature = own.key.sign(wire.REGISTRATION, body).hex()
        await wire.send(
            connection, Proof(signature=signature, mac=wire.registration_mac(own.run_key, body))
        )
        await wire.receive(connection, Registered)

    async def _listen(self, connection: socket.socket) -> None:
        """Connect to the dialers that the relay announces."""
        while True:
            async with asyncio.timeout(wire.SILENT_SECONDS):
                word = await wire.receive(connection, Pong, Incoming)
            if isinstance(word, Incoming) and len(self._answers) < MAX_ANSWERS:
                self._answers.start(self._answer(word))

    async def _answer(self, incoming: Incoming) -> None:
        """Connect to the relay for a dialer, and let the rank accept the connection."""
        try:
            async with asyncio.timeout(wire.ANSWER_SECONDS):
                connection = await self._own.dialer.connect(self.relay)
                try:
                    await wire.send(connection, Answer(token=incoming.token))
                    await wire.receive(connection, Joined)
                except BaseException:
                    connection.close()
                    raise
        except (OSError, TransportError) as error:
            log.debug("no connection to a dialer at the relay %s: %s", self.relay, error)
            return
        self._own.accept[incoming.door](connection)


class Registrations:
    """A rank's registrations at all relays of its island."""

    def __init__(self, relays: Sequence[Route], own: Registrant) -> None:
        self._changed = ChangeSignal()
        self._all = [Registration(relay, own, self._changed) for relay in relays]

    async def wait_for_one(self, seconds: float) -> None:
        """Wait until a relay has registered this rank. Raises UnreachableError if none does in
        time.
        """
        if not await self._changed.wait_until(
            lambda: any(each.is_up for each in self._all), seconds
        ):
            causes = "; ".join(f"{each.relay}: {each.cause or 'no answer'}" for each in self._all)
            raise UnreachableError(
                f"island.relays: no relay took this island within {seconds:g} s ({causes}); check "
                "that `diloco relay` "
                "runs there and that its port is open. Of several, one that answers is enough"
            )

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._all))


async def _ping(connection: socket.socket) -> None:
    with suppress(OSError):  # the reader of the connection gets the error, too
        while True:
            await asyncio.sleep(wire.PING_SECONDS)
            await wire.send(connection, Ping())
