"""Each codec's error bound, size, refusals, and equal bytes on every machine."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.codecs import build_codec
from outer.digest import part_digest
from outer.errors import InputError, MessageError, NonFiniteError
from outer.merges.mean import weighted_mean

torch.set_num_threads(1)

NAMES = ["fp32", "bf16", "fp16", "int8"]
SIZES = [0, 1, 2, 255, 256, 257, 1000, 4096]
FP32_MAX = torch.finfo(torch.float32).max
MIN_SCALE = {"fp16": 2.0**-115, "int8": 2.0**-120}

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite_values = st.lists(floats, max_size=600).map(lambda values: torch.tensor(values, dtype=torch.float32))


def mixed_values(size: int, seed: int) -> torch.Tensor:
    """Values over some 30 decades, the magnitude changing along the part and from element to element."""
    rng = np.random.default_rng(seed)
    exponent = np.linspace(-20, 8, size) if size else np.empty(0)
    values = rng.standard_normal(size) * 10.0 ** (exponent + rng.standard_normal(size))
    return torch.from_numpy(values.astype(np.float32))


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = build_codec(name)
    return codec.decode(codec.encode(values), values.numel())


def int8_steps(values: np.ndarray) -> np.ndarray:
    """Largest distance of two codes that each element may see."""
    num_blocks = -(-len(values) // 256)
    peaks = [np.abs(values[256 * b : 256 * b + 256]).max() for b in range(num_blocks)]
    steps = np.maximum(np.array(peaks) / 127 * (1 + 2.0**-16), MIN_SCALE["int8"] * (1 + 2.0**-16))
    return np.repeat(steps, 256)[: len(values)]


def error_bound(name: str, values: torch.Tensor) -> np.ndarray:
    """The documented bound for each element, in fp64, for magnitudes up to 3.37e38."""
    x = np.abs(values.numpy().astype(np.float64))
    if name == "fp32" or not len(x):
        return np.zeros_like(x)
    if name == "bf16":
        return np.maximum(x * 2.0**-8, 2.0**-134)
    if name == "fp16":
        scale = max(x.max() * 2.0**-13.99, MIN_SCALE["fp16"])
        return np.maximum(x * 2.0**-11, scale * 2.0**-25)
    return 0.5001 * int8_steps(x)


def assert_within_bound(name: str, values: torch.Tensor) -> None:
    decoded = round_trip(name, values)
    error = np.abs(decoded.numpy().astype(np.float64) - values.numpy().astype(np.float64))
    excess = error - error_bound(name, values)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    assert (excess <= 0).all(), f"{name}: element {excess.argmax()} of {values[excess.argmax()]} is off"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_within_the_bound(name: str, size: int) -> None:
    for seed in range(5):
        assert_within_bound(name, mixed_values(size, seed))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(values=finite_values)
def test_any_finite_values_are_within_the_bound(name: str, values: torch.Tensor) -> None:
    assert_within_bound(name, values.clamp(-3.37e38, 3.37e38))


@pytest.mark.parametrize("name", ["fp16", "int8"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e30])
def test_the_relative_error_does_not_depend_on_the_scale(name: str, scale: float) -> None:
    values = mixed_values(1000, 0).clamp(-1, 1) * scale
    error = (round_trip(name, values) - values).abs().max().item()
    assert error <= scale * {"fp16": 2.0**-11, "int8": 0.51 / 127}[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_zeros_stay_zeros(name: str, size: int) -> None:
    assert torch.equal(round_trip(name, torch.zeros(size)), torch.zeros(size))


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_among_others_stays_zero(name: str) -> None:
    values = mixed_values(1000, 1)
    values[::7] = 0.0
    assert (round_trip(name, values)[::7] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_denormals_stay_below_the_smallest_step(name: str) -> None:
    values = torch.linspace(-1.0, 1.0, 999, dtype=torch.float64).mul(2.0**-127).float()
    error = (round_trip(name, values).double() - values.double()).abs().max().item()
    assert error <= (0.0 if name == "fp32" else 2.0**-127)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e38, 3.37e38, 3.39e38, FP32_MAX, -FP32_MAX])
def test_huge_values_never_become_inf(name: str, value: float) -> None:
    values = torch.tensor([value, value / 3, 0.0, -value])
    decoded = round_trip(name, values)
    assert decoded.isfinite().all()
    assert torch.allclose(decoded, values, rtol=0.012, atol=abs(value) * 0.012)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_payload_has_exactly_the_announced_bytes(name: str, size: int) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(size, 2))
    assert payload.dtype == torch.uint8 and payload.shape == (codec.num_bytes(size),)


@pytest.mark.parametrize(("name", "ideal"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("int8", 1)])
def test_overhead_is_below_three_percent(name: str, ideal: int) -> None:
    assert build_codec(name).num_bytes(262144) <= 1.03 * ideal * 262144


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_element_is_named(name: str, bad: float) -> None:
    for index in (0, 3, 300, 511, 700):
        values = mixed_values(701, 3)
        values[index] = bad
        values[700] = math.nan
        with pytest.raises(NonFiniteError) as caught:
            build_codec(name).encode(values)
        assert caught.value.index == index
        assert str(caught.value.value) == str(values[index].item())


@pytest.mark.parametrize("name", NAMES)
def test_both_infinities_in_one_part_are_refused(name: str) -> None:
    with pytest.raises(NonFiniteError, match="element 1 is inf"):
        build_codec(name).encode(torch.tensor([1.0, math.inf, -math.inf]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [-1, 1, 256])
def test_a_payload_of_another_size_is_refused(name: str, change: int) -> None:
    codec = build_codec(name)
    payload = torch.zeros(codec.num_bytes(1000) + change, dtype=torch.uint8)
    with pytest.raises(MessageError, match=f"{codec.num_bytes(1000)} expected"):
        codec.decode(payload, 1000)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0**-140, FP32_MAX])
@pytest.mark.parametrize("block", [0, 1, 3])
def test_int8_refuses_a_scale_that_no_encoder_writes(scale: float, block: int) -> None:
    codec = build_codec("int8")
    payload = codec.encode(mixed_values(1000, 4))
    payload[4 * block : 4 * block + 4].view(torch.float32).fill_(scale)
    with pytest.raises(MessageError, match="int8 scales"):
        codec.decode(payload, 1000)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 3.0, 2.0**-140])
def test_fp16_refuses_a_scale_that_is_no_power_of_two(scale: float) -> None:
    codec = build_codec("fp16")
    payload = codec.encode(mixed_values(1000, 4))
    payload[:4].view(torch.float32).fill_(scale)
    with pytest.raises(MessageError, match="scale"):
        codec.decode(payload, 1000)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_payload_that_holds_inf_or_nan_is_refused(name: str, dtype: torch.dtype, bad: float) -> None:
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


def test_no_int8_payload_decodes_to_inf() -> None:
    codec = build_codec("int8")
    payload = codec.encode(torch.tensor([FP32_MAX, -FP32_MAX]))
    payload[4:] = 0x80  # -128: the one code that no encoder writes
    assert codec.decode(payload, 2).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(values=finite_values)
def test_encoding_decoded_values_gives_the_same_values(name: str, values: torch.Tensor) -> None:
    once = round_trip(name, values)
    assert torch.equal(round_trip(name, once), once)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_decoded_values_gives_the_same_bytes(name: str) -> None:
    codec = build_codec(name)
    for seed in range(20):
        payload = codec.encode(torch.randn(4097, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(codec.encode(codec.decode(payload, 4097)), payload)


def test_fp16_keeps_its_scale_when_the_peak_rounds_up_to_a_power_of_two() -> None:
    codec = build_codec("fp16")
    payload = codec.encode(torch.tensor([1 - 2.0**-13, 3 * 2.0**-39]))
    assert torch.equal(codec.encode(codec.decode(payload, 2)), payload)


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


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_halfway_cases_round_to_even(name: str) -> None:
    ulp = {"bf16": 2.0**-7, "fp16": 2.0**-10}[name]
    values = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, -1 - 0.5 * ulp, 1 + 0.501 * ulp])
    assert round_trip(name, values).tolist() == [1.0, 1 + 2 * ulp, -1.0, 1 + ulp]


@pytest.mark.parametrize("name", NAMES)
def test_encoding_leaves_the_values_alone(name: str) -> None:
    values = mixed_values(1000, 6)
    before = values.clone()
    build_codec(name).encode(values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_do_not_share_memory_with_the_payload(name: str) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(1000, 6))
    before = payload.clone()
    codec.decode(payload, 1000).fill_(7.0)
    assert torch.equal(payload, before)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_payload_from_bytes_decodes_to_nothing(name: str) -> None:
    codec = build_codec(name)
    payload = torch.from_numpy(codec.encode(torch.empty(0)).numpy().copy())
    assert codec.decode(payload, 0).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_a_payload_may_begin_at_any_byte_of_a_frame(name: str, offset: int) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(1000, 7))
    frame = bytearray(offset) + payload.numpy().tobytes()
    from_bytes = torch.frombuffer(frame, dtype=torch.uint8, offset=offset)
    sliced = torch.frombuffer(frame, dtype=torch.uint8)[offset:]
    expected = codec.decode(payload, 1000)
    assert torch.equal(codec.decode(from_bytes, 1000), expected)
    assert torch.equal(codec.decode(sliced, 1000), expected)


@pytest.mark.parametrize("num_islands", [1, 2, 8, 32])
def test_the_error_of_an_int8_mean_does_not_grow_with_the_islands(num_islands: int) -> None:
    rng = np.random.default_rng(8)
    parts = [torch.from_numpy(rng.standard_normal(5000).astype(np.float32)) for _ in range(num_islands)]
    weights = [1 / num_islands] * num_islands
    mean = weighted_mean([round_trip("int8", part) for part in parts], weights)
    error = np.abs(round_trip("int8", mean).numpy() - np.mean([part.numpy() for part in parts], axis=0))
    one_encoding = 0.5 * max(int8_steps(part.numpy()).max() for part in parts)
    # One encoding of the parts (their errors are averaged, not added) and one of the mean.
    assert error.max() <= 2.01 * one_encoding


BYTES_OF_A_FIXED_PART = """
import hashlib, torch
from outer.codecs import build_codec
torch.set_flush_denormal({flush})
bits = torch.arange(1, 200_000, dtype=torch.int64).mul(2654435761).bitwise_and(0xFFFFFFFF)
bits = bits[(bits >> 23 & 255) != 255]
values = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
for name in ("fp32", "bf16", "fp16", "int8"):
    codec = build_codec(name)
    for part in (values, values[values.abs() < 1e-20], values[values.abs() < 1e20]):
        payload = codec.encode(part)
        decoded = codec.decode(payload, part.numel())
        print(name, hashlib.sha256(payload.numpy()).hexdigest(), hashlib.sha256(decoded.numpy()).hexdigest())
"""


def test_bytes_and_values_do_not_depend_on_vector_units_or_denormal_mode() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BYTES_OF_A_FIXED_PART.format(flush=flush)],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for capability, flush in (("default", False), ("avx2", True))
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert len(outputs[0].splitlines()) == 12
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", NAMES)
def test_equal_values_give_equal_bytes(name: str) -> None:
    codec = build_codec(name)
    values = mixed_values(3001, 9)
    assert part_digest(codec.encode(values)) == part_digest(codec.encode(values.clone()))


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_built_by_its_name(name: str) -> None:
    codec = build_codec(name)
    assert codec.name == name and codec.block_elements == (256 if name == "int8" else 1)


def test_an_unknown_codec_is_refused_with_the_choices() -> None:
    with pytest.raises(InputError, match=r"'bf61'.*fp32, bf16, fp16, int8.*nearest: bf16"):
        build_codec("bf61")
