"""A codec of one bit per element: the sign of each, times the mean magnitude of its block of
256.
"""

import torch

BLOCK = 256
SCALE_BYTES = 4


class Sign:
    """With error feedback (outer.coding.feedback) it is EF-SignSGD's compressor (1901.09847) on
    pseudo-gradients.
    """

    block_elements = BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """A scale per block, and a bit per element."""
        return SCALE_BYTES * num_blocks(num_elements) + -(-num_elements // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Scales in fp32, then the bits, eight to a byte."""
        rows = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        counts = torch.full((len(rows), 1), BLOCK)
        counts[-1:] = values.numel() - BLOCK * (len(rows) - 1)
        scales = (rows.abs() / counts).sum(1)
        bits = torch.nn.functional.pad(
            (values >= 0).to(torch.uint8), (0, -values.numel() % 8)
        ).view(-1, 8)
        packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        return torch.cat([scales.view(torch.uint8), packed])

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """The sign of each element times its block's scale."""
        end = SCALE_BYTES * num_blocks(num_elements)
        scales = payload[:end].view(torch.float32).repeat_interleave(BLOCK)[:num_elements]
        bits = (payload[end:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return (bits.view(-1)[:num_elements].to(torch.float32) * 2 - 1) * scales


def num_blocks(num_elements: int) -> int:
    """Blocks that so many elements take."""
    return -(-num_elements // BLOCK)
