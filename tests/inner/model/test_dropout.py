"""Masks of dropout, and what they do to values and gradients."""

import pytest
import torch

from inner.model.counter_random import GAMMA, mix
from inner.model.dropout import ATTENTION, EMBEDDING, FEED_FORWARD, DropoutSource, drop, is_kept

SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
"""The first numbers of SplitMix64 for the seed 0, as its authors' code gives them."""
SOURCE = DropoutSource(0.25, 7, torch.arange(16))


def test_numbers_are_those_of_splitmix64() -> None:
    counters = torch.arange(1, 5) * (GAMMA - (1 << 64))
    assert [number % (1 << 64) for number in mix(counters).tolist()] == SPLITMIX64


def test_sixteen_bits_of_a_number_decide_about_each_of_four_columns() -> None:
    bits = [number >> (16 * column) & 0xFFFF for number in SPLITMIX64 for column in range(4)]
    signed = [value - (1 << 16) if value >= 1 << 15 else value for value in bits]
    kept = is_kept(torch.zeros(1, 1, dtype=torch.int64), 15, 0.25)
    assert kept.flatten().tolist() == [
        value >= 0.25 * (1 << 16) - (1 << 15) for value in signed[:15]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_have_one_mask_and_keep_their_mean(dtype: torch.dtype) -> None:
    masks = SOURCE.of_micro_batch(3, range(4, 8)).at(1)
    x = torch.ones(4, 16, 250, dtype=dtype, requires_grad=True)
    dropped = drop(x, masks, FEED_FORWARD)
    dropped.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, dropped)
    assert set(dropped.detach().flatten().tolist()) == {0.0, float(torch.tensor(4 / 3).to(dtype))}
    assert float(dropped.detach().float().mean()) == pytest.approx(1, abs=0.02)


def test_each_step_layer_place_sequence_and_position_has_keys_of_its_own() -> None:
    keys = [
        SOURCE.of_micro_batch(step, range(4)).at(layer).keys_PBS[place]
        for step in (0, 1)
        for layer in (0, 1)
        for place in (ATTENTION, FEED_FORWARD, EMBEDDING)
    ]
    assert len(set(torch.stack(keys).flatten().tolist())) == 2 * 2 * 3 * 4 * 16


def test_a_rectangle_of_sequences_and_positions_is_that_of_the_whole_mask() -> None:
    whole = SOURCE.of_micro_batch(5, range(8)).at(2).keys_PBS
    part = (
        DropoutSource(0.25, 7, torch.tensor([0, 1, 14, 15]))
        .of_micro_batch(5, range(2, 4))
        .at(2)
        .keys_PBS
    )
    assert torch.equal(part, whole[:, 2:4, [0, 1, 14, 15]])


def test_keys_follow_from_seed_and_step_by_the_same_mixture() -> None:
    """Written out with tensors, for the position 0 of the sequence 0."""
    key = mix(mix(torch.tensor(7)) + torch.tensor(4) * (GAMMA - (1 << 64)))
    for _ in ("sequence", "position"):
        key = mix(key + (GAMMA - (1 << 64)))
    assert int(SOURCE.of_micro_batch(3, range(1)).keys_BS[0, 0]) == int(key)
