"""Digests change with any bit and with the order of parts, and with nothing else."""

import numpy as np
import pytest
import torch
from blake3 import blake3

from outer.space.digest import DIGEST_BYTES, combine_digests, part_digest

torch.set_num_threads(1)


def test_a_part_digest_is_blake3_of_the_raw_bytes() -> None:
    values = torch.tensor([1.0, -2.5, 0.0])
    assert part_digest(values) == blake3(values.numpy().tobytes()).digest(length=16)


def test_several_tensors_are_digested_as_one_after_the_other() -> None:
    values = torch.linspace(-1, 1, 1000)
    assert part_digest(values[:300], values[300:]) == part_digest(values)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]
)
def test_every_dtype_is_digested_by_its_bytes(dtype: torch.dtype) -> None:
    values = torch.arange(100).to(dtype)
    assert part_digest(values) == part_digest(values.view(torch.uint8))


@pytest.mark.parametrize("byte", [0, 1, 1999, 3999])
def test_any_flipped_bit_changes_the_digest(byte: int) -> None:
    values = torch.linspace(-1, 1, 1000)
    changed = values.clone()
    changed.view(torch.uint8)[byte] ^= 1
    assert part_digest(values) != part_digest(changed)


def test_a_zero_of_the_other_sign_changes_the_digest() -> None:
    assert part_digest(torch.tensor([0.0])) != part_digest(torch.tensor([-0.0]))


def test_a_strided_view_is_digested_as_its_copy() -> None:
    values = torch.arange(100.0).view(10, 10).t()
    assert part_digest(values) == part_digest(values.clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0),
        torch.from_numpy(np.empty(0)),
        torch.tensor(3.0),
        torch.ones(4, requires_grad=True),
    ],
)
def test_empty_scalar_and_trained_tensors_have_digests(values: torch.Tensor) -> None:
    assert len(part_digest(values)) == DIGEST_BYTES


def test_the_combined_digest_depends_on_the_order_of_parts() -> None:
    digests = [part_digest(torch.full((5,), float(part))) for part in range(3)]
    assert combine_digests(digests) == combine_digests(list(digests))
    assert combine_digests(digests) != combine_digests(digests[::-1])
    assert combine_digests(digests) != combine_digests(digests[:2])


def test_the_combined_digest_is_32_hex_characters() -> None:
    assert len(combine_digests([])) == len(combine_digests([bytes(16)])) == 32
    assert int(combine_digests([bytes(16)]), 16) >= 0


def test_a_digest_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="16 bytes"):
        combine_digests([bytes(16), bytes(15)])
