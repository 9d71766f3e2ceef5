"""topk: the elements it sends, their precision, and the payloads it rejects."""

import math

import pytest
import torch
from hypothesis import given, settings

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.packing.bits import pack_numbers
from outer.config import CodingConfig
from outer.errors import MessageError
from tests.outer.codec_values import FP32_MAX, finite_values, mixed_values, normal_values

torch.set_num_threads(1)


def topk(top_k: int, chunk_elements: int, value_bits: int = 2) -> Codec:
    fields = {"top_k": top_k, "chunk_elements": chunk_elements, "value_bits": value_bits}
    return build_codec("topk", CodingConfig.model_validate(fields))


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.numel())


def largest(values: torch.Tensor, top_k: int, chunk_elements: int) -> torch.Tensor:
    """`values` with all but the largest magnitudes of each chunk set to 0; of equal ones the first
    stays.
    """
    kept = torch.zeros_like(values)
    for start in range(0, len(values), chunk_elements):
        chunk = values[start : start + chunk_elements].tolist()
        for index in sorted(range(len(chunk)), key=lambda i: (-abs(chunk[i]), i))[:top_k]:
            kept[start + index] = chunk[index]
    return kept


@pytest.mark.parametrize(
    ("top_k", "chunk"), [(1, 16), (3, 16), (7, 100), (10, 256), (64, 4096), (16, 16)]
)
@pytest.mark.parametrize("size", [0, 1, 5, 16, 100, 1000, 4097])
def test_the_largest_of_each_chunk_are_sent(top_k: int, chunk: int, size: int) -> None:
    values = mixed_values(size, 0)
    assert torch.equal(round_trip(topk(top_k, chunk, 32), values), largest(values, top_k, chunk))


@settings(max_examples=50, deadline=None)
@given(values=finite_values)
def test_the_largest_of_any_values_are_sent(values: torch.Tensor) -> None:
    assert torch.equal(round_trip(topk(3, 64, 32), values), largest(values, 3, 64))


@pytest.mark.parametrize("chunk", [64, 4096])
def test_of_equal_magnitudes_the_first_are_sent(chunk: int) -> None:
    values = torch.ones(chunk)
    values[::3] = -1.0
    values[50] = 2.0
    assert round_trip(topk(5, chunk, 32), values).nonzero().view(-1).tolist() == [0, 1, 2, 3, 50]


@pytest.mark.parametrize("top_k", [100, 4096, 10**9])
def test_with_all_elements_and_32_bits_nothing_is_lost(top_k: int) -> None:
    values = mixed_values(1037, 1)
    assert torch.equal(round_trip(topk(top_k, 100, 32), values), values)


def test_sparseloco_takes_less_than_0_23_bits_an_element() -> None:
    assert 8 * topk(64, 4096).num_bytes(2**20) / 2**20 == 0.2265625


@pytest.mark.parametrize("value_bits", [2, 8, 32])
@pytest.mark.parametrize("size", [0, 1, 63, 4096, 4096 + 10, 3 * 4096 + 100])
def test_bytes_are_those_of_the_formula(value_bits: int, size: int) -> None:
    full, rest = divmod(size, 4096)
    count = 64 * full + min(rest, 64)
    header = {2: 4, 8: 2, 32: 0}[value_bits] * -(-size // 4096)
    expected = header + math.ceil(count * value_bits / 8) + math.ceil(count * 12 / 8)
    payload = topk(64, 4096, value_bits).encode(normal_values(size, 2))
    assert payload.numel() == topk(64, 4096, value_bits).num_bytes(size) == expected


def test_two_bits_keep_the_sign_and_the_sum_of_magnitudes() -> None:
    values = normal_values(4096 * 8, 3)
    kept, decoded = (
        largest(values, 64, 4096).view(8, -1),
        round_trip(topk(64, 4096), values).view(8, -1),
    )
    assert torch.equal(decoded.sign(), kept.sign())
    assert torch.allclose(decoded.abs().sum(1), kept.abs().sum(1), rtol=2.0**-8)


def test_two_bits_decode_to_two_magnitudes_of_a_chunk() -> None:
    values = normal_values(4096 * 4, 4) * torch.tensor(
        [1.0, 10.0, 100.0, 1000.0]
    ).repeat_interleave(4096)
    for chunk in round_trip(topk(64, 4096), values).view(4, -1):
        assert len(chunk[chunk != 0].abs().unique()) == 2


def test_two_bits_lose_little_of_what_is_sent() -> None:
    values = normal_values(4096 * 8, 5)
    kept = largest(values, 64, 4096)
    assert (round_trip(topk(64, 4096), values) - kept).norm() <= 0.08 * kept.norm()


def test_eight_bits_are_within_half_a_step() -> None:
    for values in (normal_values(4096 * 3 + 77, 6), torch.linspace(-1, 1, 4096) * FP32_MAX):
        kept, decoded = largest(values, 64, 4096), round_trip(topk(64, 4096, 8), values)
        for sent, got in zip(kept.double().split(4096), decoded.double().split(4096), strict=True):
            step = sent.abs().max().item() / 127 * (1 + 2.0**-7)
            assert (got - sent).abs().max().item() <= 0.501 * step


def with_index(payload: torch.Tensor, position: int, index: int) -> torch.Tensor:
    """A payload of `topk(4, 16, 32)` for 40 elements (12 selected) with another index: bit b at
    position + 12 b.
    """
    bits = torch.from_numpy(payload[48:].numpy().copy())
    planes = [(bits >> shift & 1) for shift in range(8)]
    flat = torch.cat(planes)[:48].view(4, 12)
    flat[:, position] = torch.tensor([index >> b & 1 for b in range(4)], dtype=torch.uint8)
    packed = sum(plane << shift for shift, plane in enumerate(flat.view(-1).split(6)))
    assert isinstance(packed, torch.Tensor)
    return torch.cat([payload[:48], packed])


def test_indices_may_be_changed_to_others_that_ascend() -> None:
    codec = topk(4, 16, 32)
    values = torch.zeros(40)
    values[[0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35]] = torch.arange(1.0, 13.0)
    decoded = codec.decode(with_index(codec.encode(values), 3, 15), 40)
    assert decoded[15] == 4.0 and decoded[3] == 0.0


@pytest.mark.parametrize(("position", "index"), [(1, 0), (2, 0), (5, 0), (0, 9), (11, 8), (11, 15)])
def test_indices_that_repeat_descend_or_leave_the_part_are_refused(
    position: int, index: int
) -> None:
    codec = topk(4, 16, 32)
    values = torch.zeros(40)
    values[[0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35]] = torch.arange(1.0, 13.0)
    with pytest.raises(MessageError, match="ascending"):
        codec.decode(with_index(codec.encode(values), position, index), 40)


def test_an_index_beyond_a_chunk_that_is_no_power_of_two_is_refused() -> None:
    codec = topk(1, 20, 32)
    payload = codec.encode(torch.arange(40.0))
    assert codec.decode(payload, 40)[[19, 39]].tolist() == [19.0, 39.0]
    # Both places, 25 and 39, are in the part and ascend.
    pack_numbers(torch.tensor([25, 19]), 5, out=payload[8:])
    with pytest.raises(MessageError, match="ascending"):
        codec.decode(payload, 40)


def test_no_value_of_eight_bits_decodes_to_inf() -> None:
    codec = topk(4, 16, 8)
    payload = codec.encode(torch.full((4,), FP32_MAX))
    payload[2:6] = 0x80  # -128: the one code that no encoder writes
    assert codec.decode(payload, 4).isfinite().all()


@pytest.mark.parametrize(
    ("value_bits", "dtype"), [(2, torch.bfloat16), (8, torch.bfloat16), (32, torch.float32)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_no_encoder_writes_are_refused(
    value_bits: int, dtype: torch.dtype, bad: float
) -> None:
    codec = topk(4, 16, value_bits)
    payload = codec.encode(normal_values(40, 7))
    payload[: dtype.itemsize].view(dtype).fill_(bad)
    with pytest.raises(MessageError, match="topk"):
        codec.decode(payload, 40)


@pytest.mark.parametrize("value_bits", [2, 8, 32])
def test_no_bytes_break_the_decoder(value_bits: int) -> None:
    codec = topk(4, 16, value_bits)
    generator = torch.Generator().manual_seed(8)
    refused = 0
    for _ in range(150):
        payload = codec.encode(normal_values(40, 9))
        payload[torch.randint(len(payload), (2,), generator=generator)] = 0x5A
        try:
            assert codec.decode(payload, 40).isfinite().all()
        except MessageError:
            refused += 1
    assert 0 < refused < 150
