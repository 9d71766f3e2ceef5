"""Payloads with proofs, over a transport whose connections are not ours to protect (gloo)."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

import torch

from outer.keys import MAC_BYTES, Trust
from outer.refusals import RefusedError
from outer.transports.base import Endpoint, Tag, Transport
from outer.wire import checked, view_of

THREAD_BYTES = 1 << 20
"""Payloads longer than this are hashed in a thread: the event loop would stand still for milliseconds."""


class SealedTransport:
    """See outer.transports.base.Transport: the inner one, each payload followed by a MAC of MAC_BYTES.

    The MAC covers the run, the group, both endpoints, the tag and the payload, so that none passes for another.
    """

    def __init__(self, inner: Transport, trust: Trust, run_id: str, me: Endpoint) -> None:
        assert trust.key is not None, "sealing needs a key"
        self.traffic = inner.traffic
        self._inner, self._refusals, self._me = inner, trust.refusals, me
        self._key = trust.key.derive("payloads", run_id.encode())
        self._epoch = ""

    @property
    def address(self) -> str:
        return self._inner.address

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        self._epoch = epoch
        await self._inner.connect(epoch, addresses)

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        mac = await self._mac(self._me, to, tag, checked(payload))
        await self._inner.send(to, tag, torch.cat([payload, torch.frombuffer(bytearray(mac), dtype=torch.uint8)]))

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        sealed = await self._inner.recv(source, tag, num_bytes + MAC_BYTES)
        payload, its_mac = sealed[:num_bytes], bytes(view_of(sealed[num_bytes:]))
        if not hmac.compare_digest(its_mac, await self._mac(source, self._me, tag, payload)):
            error = RefusedError(
                "forged", f"a payload of {source} that was altered, or not sent by a holder of the key"
            )
            self._refusals.add_error(str(source), error)
            raise error
        return payload

    async def disconnect(self) -> None:
        await self._inner.disconnect()

    async def close(self) -> None:
        await self._inner.close()

    async def _mac(self, source: Endpoint, to: Endpoint, tag: Tag, payload: torch.Tensor) -> bytes:
        about = f"{self._epoch}\n{source}\n{to}\n{tag.round} {tag.attempt} {tag.phase:d} {tag.part}\n".encode()
        mac = hashlib.blake2b(about, key=self._key, digest_size=MAC_BYTES)
        if payload.numel() > THREAD_BYTES:
            await asyncio.to_thread(mac.update, view_of(payload))
        else:
            mac.update(view_of(payload))
        return mac.digest()
