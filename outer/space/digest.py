"""Digests by which islands prove to each other that they hold equal bits."""

from collections.abc import Sequence
from hashlib import blake2b

import torch

DIGEST_BYTES = 16


def part_digest(data: torch.Tensor) -> bytes:
    """16 bytes of BLAKE2b over the raw bytes of a CPU tensor; shape and dtype do not count."""
    raw = torch.empty(0) if data.numel() == 0 else data.detach().contiguous().view(-1).view(torch.uint8)
    return blake2b(raw.numpy().data, digest_size=DIGEST_BYTES).digest()


def seal(digest: str, account: str) -> str:
    """The digest of a committed state: that of its parts, with the account of the data as JSON."""
    return blake2b(f"{digest} {account}".encode(), digest_size=DIGEST_BYTES).hexdigest()


def combine(digests: Sequence[bytes]) -> str:
    """One digest, 32 hex characters, for all parts; `digests` in part order."""
    # Equal lengths make the concatenation unambiguous.
    assert all(len(digest) == DIGEST_BYTES for digest in digests), "part digests are 16 bytes each"
    return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()
