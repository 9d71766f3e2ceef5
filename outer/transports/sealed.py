"""A transport that authenticates payloads over another transport (gloo) that does not
authenticate its connections.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

import torch

from outer.errors import PeerLost
from outer.network.endpoints import Endpoint, Tag
from outer.network.frames import check_payload, view_of
from outer.network.rejections import RefusedError
from outer.network.run_key import MAC_BYTES, PeerAuth
from outer.transports.base import Transport

THREAD_BYTES = 1 << 20
"""Longer payloads are hashed in a thread, because they would block the event loop for
milliseconds.
"""


class SealedTransport:
    """A Transport that appends a MAC to every payload, over the run, the group, both endpoints, tag
    and payload.

    The MAC's key is derived from the run key and the island keys of both ends, so no other member
    can compute it.
    """

    def __init__(self, inner: Transport, auth: PeerAuth, run_id: str, me: Endpoint) -> None:
        assert auth.key is not None and auth.names is not None, (
            "sealing needs a run key, and the owners of names"
        )
        self.traffic = inner.traffic
        self.address = inner.address
        self.max_payload_bytes = inner.max_payload_bytes
        self.disconnect = inner.disconnect
        self.close = inner.close
        self.is_uneven = inner.is_uneven
        self._inner = inner
        self._rejections = auth.rejections
        self._me = me
        self._island = auth.island
        self._names = auth.names
        self._run_key = auth.key.derive("payloads", run_id.encode())
        self._keys: dict[str, bytes] = {}
        """The key shared with each island, by its public key."""
        self._epoch = ""

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        self._epoch = epoch
        self._keys = {}
        await self._inner.connect(epoch, addresses)

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        mac = await self._mac(to, (self._me, to), tag, check_payload(payload))
        await self._inner.send(
            to, tag, torch.cat([payload, torch.frombuffer(bytearray(mac), dtype=torch.uint8)])
        )

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        sealed = await self._inner.recv(source, tag, num_bytes + MAC_BYTES)
        payload = sealed[:num_bytes]
        its_mac = bytes(view_of(sealed[num_bytes:]))
        if not hmac.compare_digest(
            its_mac, await self._mac(source, (source, self._me), tag, payload)
        ):
            text = f"a payload of {source} that was altered, or not sent by it"
            error = RefusedError("forged", text)
            self._rejections.add_error(str(source), error)
            raise error
        return payload

    async def _mac(
        self, other: Endpoint, ends: tuple[Endpoint, Endpoint], tag: Tag, payload: torch.Tensor
    ) -> bytes:
        """Return the MAC of a payload from `ends[0]` to `ends[1]`. `other` is the end that is
        not this endpoint.
        """
        position = f"{tag.round} {tag.attempt} {tag.leg:d} {tag.part}"
        about = f"{self._epoch}\n{ends[0]}\n{ends[1]}\n{position}\n".encode()
        mac = hashlib.blake2b(about, key=self._key_with(other), digest_size=MAC_BYTES)
        if payload.numel() > THREAD_BYTES:
            await asyncio.to_thread(mac.update, view_of(payload))
        else:
            mac.update(view_of(payload))
        return mac.digest()

    def _key_with(self, other: Endpoint) -> bytes:
        """Return the key shared with an island. Raises PeerLost if the owner of its name is not
        known, or has a weak key.
        """
        public = self._names.key_of(other.island)
        if public is None:
            raise PeerLost(
                other.island, f"the key that owns the name {other.island!r} is not known here"
            )
        if public not in self._keys:
            try:
                secret = self._island.pair_secret(public)
            except ValueError:
                raise PeerLost(other.island, "its island key is weak") from None
            self._keys[public] = hashlib.blake2b(secret, key=self._run_key, digest_size=32).digest()
        return self._keys[public]
