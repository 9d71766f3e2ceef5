"""int8, int4 and e3m0: codes, scales, and the payloads they reject."""

import math

import pytest
import torch

from outer.codecs import build_codec
from outer.config import CodingConfig
from outer.errors import MessageError
from tests.outer.codec_values import FP32_MAX, int4_steps, mixed_values, normal_values, round_trip

torch.set_num_threads(1)
STOCHASTIC = CodingConfig(rounding="stochastic")


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0**-140, FP32_MAX])
@pytest.mark.parametrize("block", [0, 1, 3])
def test_int8_refuses_a_scale_that_no_encoder_writes(scale: float, block: int) -> None:
    codec = build_codec("int8")
    payload = codec.encode(mixed_values(1000, 4))
    payload[4 * block : 4 * block + 4].view(torch.float32).fill_(scale)
    with pytest.raises(MessageError, match="int8 scales"):
        codec.decode(payload, 1000)


def test_no_int8_payload_decodes_to_inf() -> None:
    codec = build_codec("int8")
    payload = codec.encode(torch.tensor([FP32_MAX, -FP32_MAX]))
    payload[4:] = 0x80  # -128: the one code that no encoder writes
    assert codec.decode(payload, 2).isfinite().all()


def test_int8_decoding_never_rounds() -> None:
    payload = build_codec("int8").encode(mixed_values(256 * 20, 5))
    scales = payload[: 4 * 20].view(torch.float32).double().repeat_interleave(256)
    products = payload[4 * 20 :].view(torch.int8).double() * scales
    assert torch.equal(build_codec("int8").decode(payload, 256 * 20).double(), products)


def test_int8_codes_use_the_whole_range() -> None:
    payload = build_codec("int8").encode(mixed_values(256 * 20, 5))
    codes = payload[4 * 20 :].view(torch.int8).view(20, 256).abs()
    assert (codes.amax(1) == 127).all()


def test_int8_blocks_do_not_share_a_scale() -> None:
    values = torch.cat([torch.full((256,), 1e-6), torch.full((256,), 1e6), torch.full((10,), 1e-3)])
    assert torch.allclose(round_trip("int8", values), values, rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", ["int4", "e3m0"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0**-120])
@pytest.mark.parametrize("block", [0, 1, 7])
def test_a_scale_of_16_bits_that_no_encoder_writes_is_refused(
    name: str, scale: float, block: int
) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(1000, 4))
    payload[2 * block : 2 * block + 2].view(torch.bfloat16).fill_(scale)
    with pytest.raises(MessageError, match=f"{name} scales"):
        codec.decode(payload, 1000)


@pytest.mark.parametrize("name", ["int4", "e3m0"])
def test_no_payload_of_4_bits_decodes_to_inf(name: str) -> None:
    codec = build_codec(name)
    payload = codec.encode(torch.tensor([FP32_MAX, -FP32_MAX]))
    for byte in range(256):
        payload[2:] = byte
        assert codec.decode(payload, 2).isfinite().all()


@pytest.mark.parametrize("name", ["int4", "e3m0"])
def test_neighbouring_blocks_do_not_share_a_scale_of_16_bits(name: str) -> None:
    values = torch.cat(
        [torch.full((128,), 1e-6), torch.full((128,), -1e6), torch.full((10,), 1e-3)]
    )
    assert torch.allclose(round_trip(name, values), values, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("value", [FP32_MAX, 3.0e38, 1.0])
def test_int4_keeps_its_bound_up_to_the_largest_fp32(value: float) -> None:
    values = torch.linspace(-1, 1, 100) * value
    error = (round_trip("int4", values).double() - values.double()).abs()
    assert error.max().item() <= 0.5001 * int4_steps(values.numpy()).max()


def test_int4_decodes_to_all_of_its_codes_times_the_scale() -> None:
    values = torch.arange(-7, 8) * 0.25
    assert torch.equal(round_trip("int4", values), values)


def test_e3m0_decodes_to_the_nearest_power_of_two() -> None:
    sent = [1.0, 0.76, 0.74, -0.5, 0.38, 0.37, 2.0**-6, -1.1 * 2.0**-7, 0.99 * 2.0**-7, 0.0]
    kept = [1.0, 1.0, 0.5, -0.5, 0.5, 0.25, 2.0**-6, -(2.0**-6), 0.0, 0.0]
    assert round_trip("e3m0", torch.tensor(sent)).tolist() == kept


def test_e3m0_keeps_the_largest_of_a_block_to_8_bits() -> None:
    values = normal_values(128 * 50, 1).view(50, 128)
    index = values.abs().argmax(1, keepdim=True)
    decoded = round_trip("e3m0", values.view(-1)).view(50, 128)
    assert torch.allclose(decoded.gather(1, index), values.gather(1, index), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.77, 0.999])
def test_stochastic_rounding_is_right_on_average(fraction: float) -> None:
    codec = build_codec("int4", STOCHASTIC)
    blocks = torch.full((2000, 128), 3 + fraction)
    blocks[:, 0] = 7.0
    decoded = codec.decode(codec.encode(blocks.view(-1)), blocks.numel()).view(2000, 128)[:, 1:]
    assert set(decoded.unique().tolist()) <= {3.0, 4.0}
    deviation = math.sqrt(fraction * (1 - fraction) / decoded.numel())
    assert abs(decoded.mean().item() - 3 - fraction) <= 4.5 * deviation + 2.0**-16


def test_stochastic_rounding_is_within_one_step() -> None:
    codec = build_codec("int4", STOCHASTIC)
    for values in (
        mixed_values(1001, 11),
        normal_values(1001, 12),
        torch.linspace(-1, 1, 99) * FP32_MAX,
    ):
        error = (
            (codec.decode(codec.encode(values), len(values)).double() - values.double())
            .abs()
            .numpy()
        )
        assert (error <= 1.02 * int4_steps(values.numpy())).all()


def test_stochastic_rounding_leaves_zeros_and_codes_alone() -> None:
    codec = build_codec("int4", STOCHASTIC)
    values = (torch.arange(1000) % 15 - 7).float()
    assert torch.equal(codec.decode(codec.encode(values), 1000), values)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300), torch.zeros(300))


def test_equal_values_are_rounded_by_the_same_chance() -> None:
    codec, values = build_codec("int4", STOCHASTIC), normal_values(3001, 13)
    first = codec.encode(values)
    torch.rand(5)
    assert torch.equal(codec.encode(values.clone()), first)
    assert not torch.equal(build_codec("int4").encode(values), first)


def test_other_scales_are_other_chances() -> None:
    codec = build_codec("int4", STOCHASTIC)
    values = torch.full((1000,), 0.5)
    values[::128] = 7.0
    rounded = [codec.decode(codec.encode(values * factor), 1000) / factor for factor in (1.0, 4.0)]
    assert not torch.equal(rounded[0], rounded[1])
