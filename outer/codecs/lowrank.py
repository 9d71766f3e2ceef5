"""The lowrank codec: a part is treated as a matrix and sent as the product of two thin matrices."""

import math

import torch

from outer.codecs.packing.checks import check_payload, flat_fp32, is_finite, non_finite_error
from outer.errors import MessageError

_SCALE_BYTES = 4
_LEVELS = 32767
_ITERATIONS = 2
# Entries of the product are 0 or at least this large, so that none is denormal in fp32.
_MIN_SCALE = 2.0**-120
_MAX_EXPONENT = 100
_FP32_MAX = torch.finfo(torch.float32).max


class LowrankCodec:
    """P Q^T of rank `rank`, with an orthonormal P from subspace iteration and Q = A^T P (PowerSGD,
    1905.13727).

    A part of n elements is padded with zeros to a matrix A. Its columns are the smallest power of
    two that is at least sqrt(n); it has no more rows than columns. With a rank equal to the rows,
    only the rounding of the factors is lost, each to one of 2 x 32767 steps between its extremes.
    Parts with a largest magnitude below 1e-27 lose precision.

    Factors are integers, so that decoding is exact in fp64 in any order of summation: all islands
    decode the same bytes to the same bits. Encoding uses matrix products and QR in fp32, whose last
    bits depend on the machine and the number of threads, so equal values may give slightly
    different bytes there. Payload: the scale of the product (fp32), then P and Q row by row
    (int16).
    """

    name = "lowrank"
    is_coarse = True
    gathers = False
    block_elements = 1

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: 2 bytes for each of rank x (rows + cols) entries, plus 4.

        This is 2.0001 bits per element for rank 32 and 2**18 elements.
        """
        rows, cols, rank = self._shape(num_elements)
        return _SCALE_BYTES + 2 * rank * (rows + cols)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        if not is_finite(values):
            raise non_finite_error(values)
        rows, cols, rank = self._shape(values.numel())
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scale, left, right = _split(payload, rows, rank)
        # Scaled to magnitudes near 1, so that no product overflows.
        exponent = min(max(math.frexp(_peak(values))[1], -_MAX_EXPONENT), _MAX_EXPONENT)
        matrix = torch.zeros(rows * cols)
        torch.mul(values, 2.0**-exponent, out=matrix[: values.numel()])
        basis, loads = _factors(matrix.view(rows, cols), rank)
        # Both steps are above 0, and their product is at least the minimum scale.
        left_step = max(_peak(basis) / _LEVELS, _MIN_SCALE)
        right_step = max(_peak(loads) / _LEVELS, math.ldexp(_MIN_SCALE, -exponent) / left_step)
        scale.fill_(max(math.ldexp(left_step * right_step, exponent), _MIN_SCALE))
        left.copy_(basis.double().div_(left_step).round_())
        right.copy_(loads.double().div_(right_step).round_())
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values, clamped to finite ones. Raises MessageError on a wrong size
        or scale.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        rows, _, rank = self._shape(num_elements)
        scale, left, right = _split(payload, rows, rank)
        factor = scale.item()
        if not _MIN_SCALE <= factor <= _FP32_MAX:
            raise MessageError(f"lowrank scale {factor}, allowed {_MIN_SCALE} to {_FP32_MAX}")
        product = left.double() @ right.double().T
        product.mul_(factor).clamp_(-_FP32_MAX, _FP32_MAX)
        return product.view(-1)[:num_elements].float()

    def _shape(self, num_elements: int) -> tuple[int, int, int]:
        """Return the rows, columns and rank of a part's matrix."""
        # An empty part becomes a matrix of one padding element.
        num_elements = max(num_elements, 1)
        cols = 1 << math.isqrt(num_elements - 1).bit_length()
        rows = -(-num_elements // cols)
        return rows, cols, min(self._rank, rows)


def _split(
    payload: torch.Tensor, rows: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a payload's scale (fp32, 1 element), P (int16, rows x rank) and Q (int16,
    cols x rank).
    """
    entries = payload[_SCALE_BYTES:].view(torch.int16).view(-1, rank)
    return payload[:_SCALE_BYTES].view(torch.float32), entries[:rows], entries[rows:]


def _peak(values: torch.Tensor) -> float:
    """Return the largest magnitude, 0.0 for an empty tensor."""
    return values.abs().max().item() if values.numel() else 0.0


def _factors(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P (rows, rank) with orthonormal columns and Q = A^T P (cols, rank), such that P Q^T
    approximates A.
    """
    loads = torch.rand(matrix.shape[1], rank, generator=torch.Generator().manual_seed(0)).sub_(0.5)
    basis = torch.empty(len(matrix), rank)
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(matrix @ loads).Q
        loads = matrix.T @ basis
    return basis, loads
