"""The codec interface: a flat fp32 tensor to bytes and back.

A codec is pure and deterministic: equal values give equal bytes on every machine. The size of a
payload depends only on the number of elements, so a receiver knows it beforehand and rejects any
other size.
"""

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes one part (1-D, fp32, CPU) into a payload (1-D, uint8, CPU) and decodes it again.

    >>> from outer.codecs import build_codec
    >>> codec = build_codec("int8")
    >>> payload = codec.encode(torch.tensor([0.5, -1.0, 0.25]))
    >>> payload.dtype, payload.numel() == codec.num_bytes(3)
    (torch.uint8, True)
    >>> [round(value, 2) for value in codec.decode(payload, 3).tolist()]
    [0.5, -1.0, 0.25]
    """

    name: str
    is_coarse: bool
    """Whether it uses fewer than 8 bits per element. That is too few for norms, biases and tiny
    tensors, which get int8."""
    gathers: bool
    """Whether it cannot encode a mean: every participant gets all payloads and computes the mean
    itself.
    """
    block_elements: int
    """Number of elements that share a scale (1 without blocks). Part boundaries are multiples of
    it."""

    def num_bytes(self, num_elements: int) -> int:
        """Return the exact payload size in bytes of a part with `num_elements`."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode 1-D fp32 values. Raises NonFiniteError for the first inf or nan."""
        ...

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode a payload into 1-D fp32 values. Raises MessageError if its size or scales are not
        valid.

        The values may share their memory with the payload: write to neither.
        """
        ...
