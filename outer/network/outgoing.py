"""The caller's end of a connection for calls: it sends requests and passes each reply to the
call that awaits it.
"""

import asyncio
import itertools

from outer.errors import MessageError, PeerLost
from outer.network.endpoints import Endpoint, Kind
from outer.network.frames import FrameStream, Header, refusal_error
from outer.network.handshake import check_access
from outer.network.rejections import RefusedError
from outer.network.run_key import PeerAuth

LAST_WORDS_SECONDS = 1.0
"""After a connection breaks during a write, it is still read for this time, to get the other
side's reason."""


class Outgoing:
    """A connection to a callee, with the calls that await a reply."""

    def __init__(self, address: str, callee: Endpoint, stream: FrameStream, auth: PeerAuth) -> None:
        self._address = address
        self._callee = callee
        self.stream = stream
        self._auth = auth
        self._longest = 0  # the longest reply that a call on this connection has allowed
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.cause: str | None = None  # why the connection broke
        self._reading = asyncio.create_task(self._read_replies())

    async def call(self, kind: str, body: bytes, longest: int) -> bytes:
        if self.cause is not None:
            raise PeerLost(self._address, self.cause)
        self._check_access()
        self._longest = max(self._longest, longest)
        request = next(self._requests)
        future = self._waiting[request] = asyncio.get_running_loop().create_future()
        future.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the caller may no longer wait
        name = kind.encode()
        message = bytes([len(name)]) + name + body
        writing = asyncio.create_task(
            self.stream.write(Header(Kind.CALL, request=request), message)
        )
        try:
            await asyncio.shield(writing)  # a caller that gives up must not leave half a frame
            return await future
        except ConnectionError as error:
            await asyncio.wait({self._reading}, timeout=LAST_WORDS_SECONDS)
            self.close(str(error))
            raise PeerLost(self._address, self.cause or str(error)) from None
        finally:
            self._waiting.pop(request, None)
            writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def close(self, cause: str) -> None:
        """Close the connection and fail every waiting call. Idempotent."""
        self.cause = self.cause or cause
        self._reading.cancel()
        self.stream.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(self._address, self.cause))

    def _check_access(self) -> None:
        """Close the connection and raise PeerLost if the callee has been banned since it was
        opened.
        """
        try:
            check_access(self.stream, self._auth, self._callee)
        except RefusedError as error:
            self._auth.rejections.add_error(self.stream.peer, error)
            self.close(str(error))
            raise PeerLost(self._address, str(error)) from None

    async def _read_replies(self) -> None:
        try:
            while True:
                header, payload = await self.stream.read(lambda: self._longest)
                if header.kind is Kind.REFUSAL and header.request == 0:
                    raise refusal_error(payload)
                future = self._waiting.get(header.request)
                if future is None or future.done():
                    continue
                if header.kind is Kind.REPLY:
                    future.set_result(payload.numpy().tobytes())
                else:
                    future.set_exception(
                        MessageError(payload.numpy().tobytes().decode(errors="replace")[:2000])
                    )
        except MessageError as error:
            self._auth.rejections.add_error(self.stream.peer, error)
            self.close(str(error))
        except ConnectionError as error:
            self.close(str(error))
