"""The codec seam: a flat fp32 tensor to bytes and back.

A codec is pure and deterministic: equal values give equal bytes on every machine, and a payload's size
depends on the number of elements alone, so that a receiver knows it beforehand and refuses any other.
"""

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes one part (1-D, fp32, CPU) into a payload (1-D, uint8, CPU) and back."""

    name: str
    block_elements: int
    """Elements that share a scale; parts are cut at multiples of it (1: no blocks)."""

    def num_bytes(self, num_elements: int) -> int:
        """Exact payload size for a part of `num_elements`."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values` (1-D fp32). Raises NonFiniteError on the first inf or nan."""
        ...

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """1-D fp32 values of a payload. Raises MessageError if its size or its scales are not valid."""
        ...
