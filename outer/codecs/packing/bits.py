"""Pack codes of 1, 2 or 4 bits, and numbers with a small number of bits, into bytes.

Codes are packed in planes: with two codes per byte, the first half of the codes is in the low
nibbles and the second half in the high nibbles. Packing is then a few operations on long runs of
bytes; packing neighbours would need strides.
"""

import torch


def packed_bytes(num_codes: int, bits: int) -> int:
    """Return the size in bytes of `num_codes` codes of `bits` bits."""
    return -(-num_codes * bits // 8)


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Pack 1-D uint8 codes below 2**bits into `out` (uint8, `packed_bytes` long). Unused bits are
    0.
    """
    width = out.numel()
    out.copy_(codes[:width])
    for number in range(1, 8 // bits):
        plane = codes[number * width : (number + 1) * width]
        out[: plane.numel()].bitwise_or_(plane << bits * number)


def unpack(packed: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Unpack into 1-D uint8 codes. Unused bits are ignored."""
    codes = torch.empty(num_codes, dtype=torch.uint8)
    width = packed.numel()
    for number in range(8 // bits):
        plane = codes[number * width : (number + 1) * width]
        torch.bitwise_right_shift(packed[: plane.numel()], bits * number, out=plane)
    return codes.bitwise_and_((1 << bits) - 1)


def pack_numbers(numbers: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Pack 1-D int64 numbers below 2**bits into `out` (uint8, `packed_bytes` long). The lowest
    bits of all numbers come first.
    """
    each_bit = torch.stack([numbers >> bit & 1 for bit in range(bits)])
    pack(each_bit.to(torch.uint8).view(-1), 1, out)


def unpack_numbers(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack into 1-D int64 numbers."""
    each_bit = unpack(packed, 1, bits * count).view(bits, count)
    numbers = torch.zeros(count, dtype=torch.int64)
    for bit, row in enumerate(each_bit):
        numbers += row.long() << bit
    return numbers
