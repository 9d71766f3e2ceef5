"""lowrank: the precision and size of a rank, and exact decoding."""

import math

import pytest
import torch

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.config import CodingConfig
from outer.errors import MessageError
from tests.outer.codec_values import FP32_MAX, mixed_values, normal_values

torch.set_num_threads(1)


def lowrank(rank: int) -> Codec:
    return build_codec("lowrank", CodingConfig(rank=rank))


def round_trip(rank: int, values: torch.Tensor) -> torch.Tensor:
    codec = lowrank(rank)
    return codec.decode(codec.encode(values), values.numel())


def relative_error(rank: int, values: torch.Tensor) -> float:
    return ((round_trip(rank, values) - values).norm() / values.norm()).item()


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 100, 257, 4096, 10000])
def test_full_rank_loses_only_the_rounding_of_the_factors(size: int) -> None:
    assert relative_error(10**6, normal_values(size, 0)) < 3e-4
    assert relative_error(10**6, mixed_values(size, 0)) < 3e-4


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_part_of_a_rank_is_kept_by_that_rank(rank: int) -> None:
    matrix = normal_values(100 * rank, 1).view(100, rank) @ normal_values(128 * rank, 2).view(
        rank, 128
    )
    values = matrix.view(-1)
    assert relative_error(rank, values) < 3e-4
    assert rank == 1 or relative_error(rank - 1, values) > 0.05


def test_a_rank_keeps_almost_what_the_best_factors_of_it_keep() -> None:
    left, right = (
        torch.linalg.qr(normal_values(128 * 128, seed).view(128, 128)).Q for seed in (3, 4)
    )
    sizes = 0.8 ** torch.arange(128)
    best = (sizes[10:].norm() / sizes.norm()).item()
    assert relative_error(10, ((left * sizes) @ right).reshape(-1)) <= 1.1 * best


def test_more_rank_is_never_worse() -> None:
    values = mixed_values(5000, 5)
    errors = [relative_error(rank, values) for rank in (1, 2, 4, 8, 16, 32, 64)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("size", "rows", "cols"),
    [(1, 1, 1), (2, 1, 2), (5, 2, 4), (4096, 64, 64), (4097, 33, 128), (2**18, 512, 512)],
)
@pytest.mark.parametrize("rank", [1, 4, 1000])
def test_bytes_are_those_of_both_factors_and_a_scale(
    size: int, rows: int, cols: int, rank: int
) -> None:
    assert lowrank(rank).num_bytes(size) == 4 + 2 * min(rank, rows) * (rows + cols)


def test_decoding_adds_without_rounding_whatever_the_order() -> None:
    codec, rows, cols, rank = lowrank(64), 64, 64, 64
    payload = codec.encode(normal_values(rows * cols, 6))
    payload[4:] = torch.randint(
        256, (len(payload) - 4,), generator=torch.Generator().manual_seed(7)
    )
    entries = payload[4:].view(torch.int16).long()
    # Integers: exact by their nature.
    product = entries[: rows * rank].view(rows, rank) @ entries[rows * rank :].view(cols, rank).T
    expected = product.double().mul(payload[:4].view(torch.float32).item()).float()
    assert torch.equal(codec.decode(payload, rows * cols), expected.view(-1))


@pytest.mark.parametrize("value", [1e-26, 1.0, 1e30, FP32_MAX])
def test_any_scale_is_kept(value: float) -> None:
    values = normal_values(1000, 8).clamp(-1, 1) * value
    assert ((round_trip(100, values) - values).abs().max() / value).item() <= 1e-3


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 2.0**-130])
def test_a_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    codec = lowrank(4)
    payload = codec.encode(normal_values(1000, 9))
    payload[:4].view(torch.float32).fill_(scale)
    with pytest.raises(MessageError, match="lowrank scale"):
        codec.decode(payload, 1000)


def test_no_payload_decodes_to_inf() -> None:
    codec = lowrank(4)
    payload = codec.encode(normal_values(1000, 10))
    payload[:4].view(torch.float32).fill_(FP32_MAX)
    payload[4:] = 0x7F
    assert (codec.decode(payload, 1000) == FP32_MAX).all()
