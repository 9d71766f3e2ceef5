"""A transport that authenticates payloads over another transport, whose connections cannot be authenticated (gloo)."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

import torch

from outer.network.endpoints import Endpoint, Tag
from outer.network.frames import check_payload, view_of
from outer.network.rejections import RefusedError
from outer.network.run_key import MAC_BYTES, PeerAuth
from outer.transports.base import Transport

THREAD_BYTES = 1 << 20
"""Longer payloads are hashed in a thread, because they would block the event loop for milliseconds."""


class SealedTransport:
    """A Transport that appends a MAC to every payload, over the run, the group, both endpoints, tag and payload."""

    def __init__(self, inner: Transport, auth: PeerAuth, run_id: str, me: Endpoint) -> None:
        assert auth.key is not None, "sealing needs a key"
        self.traffic, self.address = inner.traffic, inner.address
        self.disconnect, self.close = inner.disconnect, inner.close
        self._inner, self._rejections, self._me = inner, auth.rejections, me
        self._key = auth.key.derive("payloads", run_id.encode())
        self._epoch = ""

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        self._epoch = epoch
        await self._inner.connect(epoch, addresses)

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        mac = await self._mac(self._me, to, tag, check_payload(payload))
        await self._inner.send(to, tag, torch.cat([payload, torch.frombuffer(bytearray(mac), dtype=torch.uint8)]))

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        sealed = await self._inner.recv(source, tag, num_bytes + MAC_BYTES)
        payload, its_mac = sealed[:num_bytes], bytes(view_of(sealed[num_bytes:]))
        if not hmac.compare_digest(its_mac, await self._mac(source, self._me, tag, payload)):
            text = f"a payload of {source} that was altered, or not sent by a holder of the key"
            error = RefusedError("forged", text)
            self._rejections.add_error(str(source), error)
            raise error
        return payload

    async def _mac(self, source: Endpoint, to: Endpoint, tag: Tag, payload: torch.Tensor) -> bytes:
        about = f"{self._epoch}\n{source}\n{to}\n{tag.round} {tag.attempt} {tag.leg:d} {tag.part}\n".encode()
        mac = hashlib.blake2b(about, key=self._key, digest_size=MAC_BYTES)
        if payload.numel() > THREAD_BYTES:
            await asyncio.to_thread(mac.update, view_of(payload))
        else:
            mac.update(view_of(payload))
        return mac.digest()
