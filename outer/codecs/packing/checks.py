"""Checks that all codecs share, for our own values before encoding and for a peer's bytes before
decoding.
"""

import math

import torch

from outer.errors import MessageError, NonFiniteError


def flat_fp32(values: torch.Tensor) -> torch.Tensor:
    """Return `values` detached and contiguous. Asserts that they are 1-D fp32 on the CPU."""
    ok = values.dim() == 1 and values.dtype == torch.float32 and values.device.type == "cpu"
    assert ok, (
        f"a codec takes 1-D fp32 CPU values, got {values.dim()}-D {values.dtype} on {values.device}"
    )
    # An empty tensor may have stride 0 (numpy's does), and torch cannot view such a tensor as
    # bytes.
    return values.detach().contiguous() if values.numel() else torch.empty(0)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether no element is inf or nan."""
    # A finite sum proves that all values are finite, in one cheap pass. Large finite values may
    # overflow the sum, so an infinite sum proves nothing.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def non_finite_error(values: torch.Tensor) -> NonFiniteError:
    """Return the error for the first inf or nan in `values`, which contain at least one."""
    index = int(values.isfinite().logical_not_().nonzero()[0])
    return NonFiniteError(index, values[index].item())


def check_payload(payload: torch.Tensor, num_bytes: int, codec: str) -> torch.Tensor:
    """Return `payload`, copied if it is not aligned for fp32. Raises MessageError unless it has
    `num_bytes`.
    """
    assert payload.dtype == torch.uint8 and payload.dim() == 1, "a payload is a 1-D uint8 tensor"
    if payload.numel() != num_bytes:
        raise MessageError(f"{codec} payload of {payload.numel()} bytes, {num_bytes} expected")
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # A transport may return a slice of its frame, which can start at any byte.
    aligned = (
        payload.data_ptr() % 4 == 0
        and payload.storage_offset() % 4 == 0
        and payload.is_contiguous()
    )
    return payload if aligned else payload.clone(memory_format=torch.contiguous_format)


def check_values(values: torch.Tensor, codec: str) -> torch.Tensor:
    """Return decoded `values`. Raises MessageError if one is inf or nan, which our encoders never
    send.
    """
    if not is_finite(values):
        error = non_finite_error(values)
        raise MessageError(f"{codec} payload decodes to {error.value} at element {error.index}")
    return values
