"""A codec of the user's own: its interface, the checks around it, and the tests that it must
pass before a run begins.
"""

import math
from typing import Any, Protocol

import torch

from outer.codecs.packing.checks import (
    check_payload,
    check_values,
    flat_fp32,
    is_finite,
    non_finite_error,
)
from outer.config.own_code import Options
from outer.errors import InputError, MessageError, NonFiniteError
from outer.own_code import call, once, require

KEY = "outer.codec"
SIZES = (0, 1, 2, 127, 128, 257, 1000, 4097)
"""Numbers of elements of the parts in the tests. A part may have any size."""
COARSE_BITS = 8


class CodecCode(Protocol):
    """The interface of own code. It may also have `is_coarse`, `gathers` and `block_elements` of
    a Codec.
    """

    def num_bytes(self, num_elements: int) -> int: ...

    def encode(self, values: torch.Tensor) -> torch.Tensor: ...

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor: ...


class OwnCodec:
    """A Codec around own code, which gets finite values and payloads of the right size. Its results
    are checked.
    """

    def __init__(self, code: CodecCode, name: str) -> None:
        """Wrap `code`. `name` is for messages. A codec without `is_coarse` is coarse below 8
        bits per element.
        """
        self.name = name
        self._code = code
        self.block_elements: int = getattr(code, "block_elements", 1)
        self.gathers: bool = getattr(code, "gathers", False)
        many = 2**16
        self.is_coarse: bool = getattr(
            code, "is_coarse", code.num_bytes(many) * 8 / many < COARSE_BITS
        )

    def num_bytes(self, num_elements: int) -> int:
        return self._code.num_bytes(num_elements)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode values and check the payload. Raises NonFiniteError for the first inf or nan,
        and InputError for a payload with a wrong size or dtype.
        """
        values = flat_fp32(values)
        if not is_finite(values):
            raise non_finite_error(values)
        payload = self._code.encode(values)
        expected = (torch.uint8, (self.num_bytes(values.numel()),))
        if (payload.dtype, tuple(payload.shape)) != expected:
            raise InputError(
                f"{self.name}: encode gave {payload.dtype} of shape {tuple(payload.shape)} for "
                f"{values.numel()} values; num_bytes says {expected[0]} of shape {expected[1]}"
            )
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode a payload and check the values. Raises MessageError, also for any error of own
        code about the bytes of a peer.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        try:
            values = self._code.decode(payload, num_elements)
        except Exception as error:
            raise MessageError(
                f"{self.name} cannot decode a payload: {type(error).__name__}: {error}"
            ) from error
        if values.dtype != torch.float32 or values.shape != (num_elements,):
            raise MessageError(
                f"{self.name} decoded {values.dtype} of shape {tuple(values.shape)}, not "
                f"{num_elements}"
            )
        return check_values(values, self.name)


@once
def build_own_codec(path: str, options: Options) -> OwnCodec:
    """Build the codec that an import path names and test it. Raises InputError."""
    codec = OwnCodec(call(path, KEY, options), path.partition(":")[2])
    check_codec(codec)
    return codec


def check_codec(codec: Any) -> None:
    """Test what every codec must do. Raises InputError with the first requirement that does not
    hold.

    `codec` is one of ours or own code as in CodecCode. The tests take some milliseconds.
    """
    wrapped = (
        codec
        if hasattr(codec, "gathers") and hasattr(codec, "name")
        else OwnCodec(codec, type(codec).__name__)
    )
    require(CLAIMS, wrapped, f"{KEY}: the codec {wrapped.name}")


def _values(size: int) -> torch.Tensor:
    """Return values of many orders of magnitude, which are equal on every machine."""
    number = torch.arange(size, dtype=torch.float32)
    return torch.sin(number * 12.9898) * torch.exp(torch.sin(number * 0.37) * 20)


def has_the_stated_size(codec: Any) -> bool:
    """A payload is 1-D uint8 of exactly num_bytes, for any number of elements."""
    payloads = [(codec.encode(_values(size)), codec.num_bytes(size)) for size in SIZES]
    return all(p.dtype == torch.uint8 and p.shape == (expected,) for p, expected in payloads)


def gives_back_finite_values(codec: Any) -> bool:
    """Finite values decode to as many finite fp32 values, the largest of fp32 too."""
    huge = torch.tensor([3.3e38, 1.0, 0.0, -3.4e38])
    for values in (*map(_values, SIZES), huge):
        decoded = codec.decode(codec.encode(values), values.numel())
        if (
            decoded.dtype != torch.float32
            or decoded.shape != values.shape
            or not decoded.isfinite().all()
        ):
            return False
    return True


def keeps_zeros(codec: Any) -> bool:
    """A part of zeros decodes to zeros: what did not change must not change."""
    return all(not codec.decode(codec.encode(torch.zeros(size)), size).any() for size in SIZES)


def gives_equal_bytes(codec: Any) -> bool:
    """Equal values give equal bytes, and encoding leaves the values alone."""
    values = _values(1000)
    before = values.clone()
    return torch.equal(codec.encode(values), codec.encode(before.clone())) and torch.equal(
        values, before
    )


def leaves_the_payload_alone(codec: Any) -> bool:
    """Decoding leaves the payload alone and gives equal values again."""
    payload = codec.encode(_values(1000))
    before = payload.clone()
    decoded = codec.decode(payload, 1000).clone()
    return torch.equal(payload, before) and torch.equal(codec.decode(before, 1000), decoded)


def refuses_what_is_not_finite(codec: Any) -> bool:
    """An inf or a nan is refused when it is encoded."""
    for value in (math.inf, -math.inf, math.nan):
        try:
            codec.encode(torch.tensor([1.0, value]))
        except NonFiniteError:
            continue
        return False
    return True


def survives_any_bytes(codec: Any) -> bool:
    """Any bytes of the right size decode to finite values or are refused with a MessageError."""
    size = codec.num_bytes(1000)
    for fill in (0, 127, 128, 255):
        try:
            decoded = codec.decode(torch.full((size,), fill, dtype=torch.uint8), 1000)
        except MessageError:
            continue
        if not decoded.isfinite().all():
            return False
    return True


CLAIMS = (
    has_the_stated_size,
    gives_back_finite_values,
    keeps_zeros,
    gives_equal_bytes,
    leaves_the_payload_alone,
    refuses_what_is_not_finite,
    survives_any_bytes,
)
