"""The relay (`diloco relay`): forwards connections to islands that cannot be reached directly. It
sees only encrypted bytes.

A rank keeps a connection to the relay, proved with its island's key. A dialer asks the relay for
the rank. The relay notifies the rank, the rank opens another connection to the relay, and the relay
joins the two connections. TLS runs between their ends.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from outer.errors import MessageError
from outer.identity.island_key import verify
from outer.network.rejections import Guests, RefusedError, Rejections
from outer.network.run_key import RunKey
from outer.routes import wire
from outer.routes.sockets import Listener
from outer.routes.splice import Meter, splice
from outer.routes.wire import (
    Answer,
    Challenge,
    Dial,
    Incoming,
    Joined,
    Ping,
    Pong,
    Proof,
    Refused,
    Register,
    Registered,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayLimits:
    """Limits for the work of a relay."""

    connections: int = 4096
    """Limit for connections of all islands. A dialer and its island count as one, and so does a
    registration."""
    connections_of_island: int = 512
    """Limit per island for registrations of its ranks and for connections that are forwarded to
    it or wait for it."""
    bytes_per_second: float | None = None
    """Limit for the bytes forwarded to and from one island. None: no limit."""


class _Rank:
    """A registered rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = asyncio.Lock()
        self.asked: set[asyncio.Future[socket.socket]] = set()
        """Futures of the connections for which dialers wait."""

    async def send(self, message: Incoming | Pong | Registered) -> None:
        async with self._writing:
            await wire.send(self._connection, message)

    def end(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def refuse_all(self) -> None:
        """Refuse the dialers that wait for this rank, because it is gone."""
        for answer in self.asked:
            if not answer.done():
                answer.set_exception(RefusedError("absent", "the island has just disconnected"))


@dataclass
class _Island:
    """An island's share of the relay's connections and bytes."""

    meter: Meter
    num_connections: int = 0


class Relay:
    """Accepts islands and dialers. Its memory and its waits are limited, whatever they send."""

    def __init__(
        self,
        limits: RelayLimits = RelayLimits(),
        run_key: RunKey | None = None,
        allow: Collection[str] = (),
    ) -> None:
        """Create a relay. With `run_key` only islands that hold it may register; with `allow`
        only islands with these public keys.
        """
        self._limits = limits
        self._run_key = run_key
        self._allow = allow
        self.rejections = Rejections()
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._pending: dict[str, asyncio.Future[socket.socket]] = {}
        """Futures of the dialers that wait for the answer with a token."""
        self._islands: dict[str, _Island] = {}  # by key, as long as they have connections
        self._guests = Guests()
        self._listener = Listener(self._serve)
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Listen on a host and port (0: any free port). Raises OSError."""
        self.port = await self._listener.open(host, port)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        await self._listener.close()

    async def _serve(self, connection: socket.socket, host: str) -> None:
        """Serve one connection by its first message. Only the connection of an answer stays
        open, for its waiting dialer.
        """
        is_kept = False
        guest = self._guests.enter(host, lambda: _Rank(connection).end())
        try:
            async with asyncio.timeout(wire.OPENING_SECONDS):
                opening = await wire.receive(connection, Register, Dial, Answer)
                if isinstance(opening, Register):
                    await self._check(connection, opening)
            guest.leave()
            if isinstance(opening, Register):
                await self._keep(connection, opening)
            elif isinstance(opening, Dial):
                await self._join(connection, opening)
            else:
                is_kept = self._give(connection, opening)
        except MessageError as error:
            await self._refuse(connection, host, error)
        except TimeoutError:
            self.rejections.add(host, "silent", "it sent nothing in time")
        except OSError as error:
            log.debug("a connection from %s ended: %s", host, error)
        finally:
            guest.leave()
            if not is_kept:
                connection.close()

    async def _check(self, connection: socket.socket, register: Register) -> None:
        """Require that an island proves its key. Raises MessageError if it does not, or if it
        may not register here.
        """
        if self._allow and register.key not in self._allow:
            raise RefusedError(
                "peer",
                f"this relay is not for the island with the key {register.key}: see its --allow",
            )
        challenge = Challenge(nonce=secrets.token_hex(16))
        await wire.send(connection, challenge)
        proof = await wire.receive(connection, Proof)
        body = wire.proof_body(challenge, register)
        if not verify(register.key, wire.REGISTRATION, body, bytes.fromhex(proof.signature)):
            raise RefusedError(
                "key", f"it does not hold the island key {register.key[:16]}... that it shows"
            )
        if self._run_key is not None and not secrets.compare_digest(
            proof.mac, wire.registration_mac(self._run_key, body)
        ):
            raise RefusedError(
                "key", "it does not hold the run key of this relay: compare the files of run keys"
            )

    async def _keep(self, connection: socket.socket, register: Register) -> None:
        """Keep a rank registered while it sends pings. A newer registration of the rank replaces
        this one.
        """
        rank = _Rank(connection)
        place = (register.key, register.rank)
        with self._count(register.key):
            if (old := self._ranks.get(place)) is not None:
                old.end()
            self._ranks[place] = rank
            log.info("rank %d of the island %s... is registered", register.rank, register.key[:16])
            try:
                await rank.send(Registered())
                while True:
                    async with asyncio.timeout(wire.SILENT_SECONDS):
                        await wire.receive(connection, Ping)
                    await rank.send(Pong())
            finally:
                rank.refuse_all()
                if self._ranks.get(place) is rank:
                    del self._ranks[place]
                    log.info(
                        "rank %d of the island %s... is no longer registered",
                        register.rank,
                        register.key[:16],
                    )

    async def _join(self, connection: socket.socket, dial: Dial) -> None:
        """Connect a dialer to a registered rank, and forward the bytes of both until they end."""
        rank = self._ranks.get((dial.key, dial.rank))
        if rank is None:
            raise RefusedError(
                "absent",
                f"rank {dial.rank} of the island {dial.key[:16]}... is not registered here",
            )
        with self._count(dial.key) as meter:
            other = await self._call(rank, dial)
            try:
                await wire.send(other, Joined())
                await wire.send(connection, Joined())
                await splice(connection, other, meter)
            finally:
                other.close()

    async def _call(self, rank: _Rank, dial: Dial) -> socket.socket:
        """Notify a rank of a dialer, and return the rank's connection. Raises RefusedError if
        none arrives in time.
        """
        token = secrets.token_hex(16)
        answer = asyncio.get_running_loop().create_future()
        self._pending[token] = answer
        rank.asked.add(answer)
        try:
            async with asyncio.timeout(wire.ANSWER_SECONDS):
                await rank.send(Incoming(token=token, door=dial.door))
                return await answer
        except TimeoutError:
            raise RefusedError(
                "absent", f"the island {dial.key[:16]}... did not answer in time"
            ) from None
        except OSError:
            raise RefusedError(
                "absent", f"the island {dial.key[:16]}... has just disconnected"
            ) from None
        finally:
            del self._pending[token]
            rank.asked.discard(answer)

    def _give(self, connection: socket.socket, answer: Answer) -> bool:
        """Pass a rank's connection to the dialer that waits for it. Raises RefusedError if no
        dialer waits.
        """
        waiting = self._pending.get(answer.token)
        if waiting is None or waiting.done():
            raise RefusedError("token", "no dialer waits for this answer")
        waiting.set_result(connection)
        return True

    async def _refuse(self, connection: socket.socket, host: str, error: MessageError) -> None:
        """Count a refused connection, and send the reason."""
        self.rejections.add_error(host, error)
        with suppress(OSError):
            async with asyncio.timeout(1):
                await wire.send(connection, Refused(text=str(error)[:400]))

    @contextmanager
    def _count(self, key: str) -> Iterator[Meter]:
        """Count a connection of an island within the block. Raises RefusedError if there are too
        many.
        """
        total = sum(island.num_connections for island in self._islands.values())
        limits = self._limits
        island = self._islands.get(key) or _Island(Meter(limits.bytes_per_second))
        if total >= limits.connections or island.num_connections >= limits.connections_of_island:
            text = (
                f"{island.num_connections} connections of the island {key[:16]}..., {total} in all"
            )
            raise RefusedError("streams", f"this relay forwards no more connections: {text}")
        self._islands[key] = island
        island.num_connections += 1
        try:
            yield island.meter
        finally:
            island.num_connections -= 1
            if not island.num_connections:
                del self._islands[key]  # a stranger may use many keys
