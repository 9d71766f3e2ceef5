"""Digests by which islands prove to each other that they hold the same bits."""

from collections.abc import Sequence
from hashlib import blake2b

import torch

DIGEST_BYTES = 16


def part_digest(data: torch.Tensor) -> bytes:
    """16 bytes of BLAKE2b over the raw bytes of a CPU tensor. Shape and dtype do not enter it."""
    raw = torch.empty(0) if data.numel() == 0 else data.detach().contiguous().view(-1).view(torch.uint8)
    return blake2b(raw.numpy().data, digest_size=DIGEST_BYTES).digest()


def combine_digests(digests: Sequence[bytes]) -> str:
    """One digest of all parts, 32 hex characters; `digests` are in part order."""
    # Equal lengths make the concatenation unambiguous.
    assert all(len(digest) == DIGEST_BYTES for digest in digests), "part digests are 16 bytes each"
    return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()


def state_digest(parts_digest: str, ledger: str) -> str:
    """The digest of a committed state, from the combined digest of its parts and the data ledger as JSON."""
    return blake2b(f"{parts_digest} {ledger}".encode(), digest_size=DIGEST_BYTES).hexdigest()
