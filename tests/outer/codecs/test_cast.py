"""fp32, bf16 and fp16: rounding, and the values they reject."""

import math

import pytest
import torch

from outer.codecs import build_codec
from outer.errors import MessageError
from tests.outer.codec_values import mixed_values, round_trip

torch.set_num_threads(1)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 3.0, 2.0**-140])
def test_fp16_refuses_a_scale_that_is_no_power_of_two(scale: float) -> None:
    codec = build_codec("fp16")
    payload = codec.encode(mixed_values(1000, 4))
    payload[:4].view(torch.float32).fill_(scale)
    with pytest.raises(MessageError, match="scale"):
        codec.decode(payload, 1000)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_payload_that_holds_inf_or_nan_is_refused(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    values = torch.ones(10, dtype=dtype)
    values[7] = bad
    with pytest.raises(MessageError, match="element 7"):
        build_codec(name).decode(values.view(torch.uint8), 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 65504.0])
def test_fp16_refuses_codes_that_decode_to_inf_or_nan(bad: float) -> None:
    payload = torch.zeros(4 + 2 * 10, dtype=torch.uint8)
    payload[:4].view(torch.float32).fill_(2.0**114)
    payload[4:].view(torch.float16)[7] = bad
    with pytest.raises(MessageError, match="element 7"):
        build_codec("fp16").decode(payload, 10)


def test_fp16_keeps_its_scale_when_the_peak_rounds_up_to_a_power_of_two() -> None:
    codec = build_codec("fp16")
    payload = codec.encode(torch.tensor([1 - 2.0**-13, 3 * 2.0**-39]))
    assert torch.equal(codec.encode(codec.decode(payload, 2)), payload)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_halfway_cases_round_to_even(name: str) -> None:
    ulp = {"bf16": 2.0**-7, "fp16": 2.0**-10}[name]
    values = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, -1 - 0.5 * ulp, 1 + 0.501 * ulp])
    assert round_trip(name, values).tolist() == [1.0, 1 + 2 * ulp, -1.0, 1 + ulp]
