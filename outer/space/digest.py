"""Digests by which islands prove to each other that they hold the same bits."""

from collections.abc import Iterable, Sequence

import torch
from blake3 import blake3

DIGEST_BYTES = 16


def part_digest(*tensors: torch.Tensor) -> bytes:
    """16 bytes of BLAKE3 over the raw bytes of CPU tensors, one after the other. Shapes and dtypes do not enter it."""
    return stream_digest(tensors)


def stream_digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """`part_digest` of tensors that need not exist at the same time: each is read before the next is asked for."""
    digest = blake3()
    for data in tensors:
        raw = torch.empty(0) if data.numel() == 0 else data.detach().contiguous().view(-1)
        digest.update(raw.view(torch.uint8).numpy().data)
    return digest.digest(length=DIGEST_BYTES)


def combine_digests(digests: Sequence[bytes]) -> str:
    """One digest of all parts, 32 hex characters; `digests` are in part order."""
    # Equal lengths make the concatenation unambiguous.
    assert all(len(digest) == DIGEST_BYTES for digest in digests), "part digests are 16 bytes each"
    return blake3(b"".join(digests)).hexdigest(length=DIGEST_BYTES)


def state_digest(parts_digest: str, ledger: str) -> str:
    """The digest of a committed state, from the combined digest of its parts and the data ledger as JSON."""
    return blake3(f"{parts_digest} {ledger}".encode()).hexdigest(length=DIGEST_BYTES)
