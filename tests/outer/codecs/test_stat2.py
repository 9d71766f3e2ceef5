"""stat2: bin means keep a block's sum."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from outer.codecs import build_codec
from outer.errors import MessageError
from tests.outer.codec_values import finite_values, mixed_values, normal_values, round_trip

torch.set_num_threads(1)
BLOCK = 512


def assert_sums_are_kept(values: torch.Tensor) -> None:
    """Each block's sum, up to the documented rounding of table entries and of the values to the
    grid.
    """
    decoded = round_trip("stat2", values).double()
    for block, out in zip(values.double().split(BLOCK), decoded.split(BLOCK), strict=True):
        grid = max(block.abs().max().item() / 32767, 2.0**-116)
        rounding = out.abs().sum().item() * 2.0**-8 + 0.501 * grid * len(block)
        assert abs(out.sum().item() - block.sum().item()) <= rounding


@pytest.mark.parametrize("size", [1, 2, 3, 511, 512, 513, 5000])
def test_the_sum_of_each_block_is_kept(size: int) -> None:
    for seed in range(5):
        assert_sums_are_kept(normal_values(size, seed) + 0.3)
        assert_sums_are_kept(mixed_values(size, seed))


@settings(max_examples=60, deadline=None)
@given(values=finite_values)
def test_the_sum_of_any_values_is_kept(values: torch.Tensor) -> None:
    if values.numel():
        assert_sums_are_kept(values.clamp(-3e38, 3e38))


def test_a_sum_on_the_grid_is_exact() -> None:
    # Two integers a bin, their mean a bf16: nothing is rounded anywhere.
    values = torch.tensor(
        [-32767.0, -32761.0] + [-16000.0] * 4 + [0.0] * 300 + [16000.0] * 4 + [32767.0, 32761.0]
    )
    values = torch.cat([values, torch.zeros(BLOCK - len(values))])
    decoded = round_trip("stat2", values)
    assert decoded.sum().item() == values.sum().item() == 0.0


@pytest.mark.parametrize("size", [3, 7, 30, 511, 512])
def test_codes_follow_the_published_formula(size: int) -> None:
    values = normal_values(size, 3).numpy().astype(np.float64)
    centred = values - values.mean()
    codes = np.clip(np.round(centred / (6 * centred.std() / 4) + 2), 0, 3)
    decoded = round_trip("stat2", torch.from_numpy(values.astype(np.float32))).numpy()
    for code in set(codes):
        expected = values[codes == code].mean()
        assert np.allclose(decoded[codes == code], expected, rtol=2.0**-8)


def test_a_block_has_four_values_at_most_of_its_own() -> None:
    values = torch.cat([normal_values(BLOCK, 4), 1000 + normal_values(BLOCK, 5)])
    first, second = round_trip("stat2", values).split(BLOCK)
    assert len(first.unique()) == 4 and len(second.unique()) <= 4
    assert first.abs().max() < 10 and (second - 1000).abs().max() < 10


def test_the_error_of_normal_values_is_what_theory_says() -> None:
    values = normal_values(2**18, 6)
    # Four levels cut at -2.25, -0.75 and 0.75 sigma lose 17.8 % of the energy.
    assert (round_trip("stat2", values) - values).pow(2).mean().item() == pytest.approx(
        0.178, abs=0.003
    )


def test_two_values_of_a_block_are_both_kept() -> None:
    values = torch.tensor([1.0, 5.0] * 100)
    assert torch.allclose(round_trip("stat2", values), values, rtol=2.0**-8)


@pytest.mark.parametrize("scale", [1e-28, 1e-6, 1e30])
def test_the_relative_error_does_not_depend_on_the_scale(scale: float) -> None:
    values = normal_values(2**14, 7)
    unscaled = round_trip("stat2", values)
    assert torch.allclose(
        round_trip("stat2", values * scale) / scale, unscaled, rtol=0.02, atol=1e-3
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_table_with_inf_or_nan_is_refused(bad: float) -> None:
    codec = build_codec("stat2")
    payload = codec.encode(normal_values(1000, 8))
    payload[8:10].view(torch.bfloat16).fill_(bad)
    with pytest.raises(MessageError, match="element 4"):
        codec.decode(payload, 1000)
