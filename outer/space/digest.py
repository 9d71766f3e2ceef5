"""Digests by which islands prove to each other that they hold the same bits."""

from collections.abc import Iterable, Sequence

import torch
from blake3 import blake3

DIGEST_BYTES = 16


def part_digest(*tensors: torch.Tensor) -> bytes:
    """Return 16 bytes of BLAKE3 over the raw bytes of CPU tensors, one after the other. Shapes
    and dtypes are not hashed.
    """
    return stream_digest(tensors)


def stream_digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return `part_digest` of tensors that need not exist at the same time: each is hashed
    before the next is requested.
    """
    digest = blake3()
    for data in tensors:
        raw = torch.empty(0) if data.numel() == 0 else data.detach().contiguous().view(-1)
        digest.update(raw.view(torch.uint8).numpy().data)
    return digest.digest(length=DIGEST_BYTES)


def combine_digests(digests: Sequence[bytes]) -> str:
    """Return one digest of all parts, 32 hex characters. `digests` are in part order."""
    # Equal lengths make the concatenation unambiguous.
    assert all(len(digest) == DIGEST_BYTES for digest in digests), "part digests are 16 bytes each"
    return blake3(b"".join(digests)).hexdigest(length=DIGEST_BYTES)


def state_digest(parts_digest: str, ledger: str) -> str:
    """Return the digest of a committed state, from the combined digest of its parts and the data
    ledger as JSON.
    """
    return blake3(f"{parts_digest} {ledger}".encode()).hexdigest(length=DIGEST_BYTES)
