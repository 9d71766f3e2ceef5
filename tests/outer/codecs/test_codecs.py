"""The guarantees of every codec: size, rejections, no shared memory, exact zeros, equal bytes for
equal values.
"""

import math

import pytest
import torch

from outer.codecs import build_codec
from outer.errors import InputError, MessageError, NonFiniteError
from outer.space.digest import part_digest
from tests.outer.codec_values import DENSE, FP32_MAX, NAMES, SIZES, mixed_values, round_trip

torch.set_num_threads(1)

FINE = ["fp32", "bf16", "fp16", "int8"]
BLOCKS = {"int8": 256, "int4": 128, "e3m0": 128, "stat2": 512, "topk": 4096}
BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0 + 32 / 2**18,
    "int8": 8.0 + 32 / 256,
    "int4": 4.0 + 16 / 128,
    "e3m0": 4.0 + 16 / 128,
    "stat2": 2.0 + 64 / 512,
    "topk": (64 * (12 + 2) + 32) / 4096,
    "lowrank": (32 * 16 * (512 + 512) + 32) / 2**18,
}


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_an_element_of_a_usual_part(name: str) -> None:
    assert 8 * build_codec(name).num_bytes(2**18) / 2**18 == BITS[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_zeros_stay_zeros(name: str, size: int) -> None:
    assert torch.equal(round_trip(name, torch.zeros(size)), torch.zeros(size))


@pytest.mark.parametrize("name", [*DENSE, "topk"])
def test_a_zero_among_others_stays_zero(name: str) -> None:
    values = mixed_values(1000, 1)
    values[::7] = 0.0
    assert (round_trip(name, values)[::7] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e38, 3.37e38, 3.39e38, FP32_MAX, -FP32_MAX])
def test_huge_values_never_become_inf(name: str, value: float) -> None:
    values = torch.tensor([value, value / 3, 0.0, -value])
    decoded = round_trip(name, values)
    assert decoded.isfinite().all()
    if name in FINE:
        assert torch.allclose(decoded, values, rtol=0.012, atol=abs(value) * 0.012)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_payload_has_exactly_the_announced_bytes(name: str, size: int) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(size, 2))
    assert payload.dtype == torch.uint8 and payload.shape == (codec.num_bytes(size),)


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


@pytest.mark.parametrize("name", NAMES)
def test_encoding_leaves_the_values_alone(name: str) -> None:
    values = mixed_values(1000, 6)
    before = values.clone()
    build_codec(name).encode(values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_leaves_the_payload_alone(name: str) -> None:
    codec = build_codec(name)
    payload = codec.encode(mixed_values(1000, 6))
    before = payload.clone()
    codec.decode(payload, 1000)
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


@pytest.mark.parametrize("name", NAMES)
def test_equal_values_give_equal_bytes(name: str) -> None:
    codec = build_codec(name)
    values = mixed_values(3001, 9)
    assert part_digest(codec.encode(values)) == part_digest(codec.encode(values.clone()))


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_built_by_its_name(name: str) -> None:
    codec = build_codec(name)
    assert codec.name == name and codec.block_elements == BLOCKS.get(name, 1)


def test_an_unknown_codec_is_refused_with_the_choices() -> None:
    with pytest.raises(InputError, match=r"'bf61'.*fp32, bf16, fp16, int8, int4.*nearest: bf16"):
        build_codec("bf61")


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_one_element_keeps_it(name: str) -> None:
    for value in (1.0, -3.7e-5, 2.9e20):
        assert round_trip(name, torch.tensor([value])).item() == pytest.approx(value, rel=2.0**-7)


@pytest.mark.parametrize("name", NAMES)
def test_equal_elements_stay_equal(name: str) -> None:
    if name != "topk":  # which sends some of them only
        values = torch.full((1000,), -0.3)
        assert torch.allclose(round_trip(name, values), values, rtol=2.0**-7)


@pytest.mark.parametrize("name", NAMES)
def test_values_with_gaps_in_memory_give_the_same_bytes(name: str) -> None:
    wide = mixed_values(2000, 10)
    codec = build_codec(name)
    assert torch.equal(codec.encode(wide[::2]), codec.encode(wide[::2].clone()))
