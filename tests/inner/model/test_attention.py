"""Attention in one process, and the attention kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inner.model.attention import (
    UNSEEN,
    AttentionOutput,
    Mask,
    attention_bias,
    causal_attention,
    kernel_backward,
    kernel_forward,
)
from tests.inner.sequences import BANDS, Case, expected, inputs, with_gradients
from tests.inner.small import relative_error


def test_documents_in_one_process_equal_attention_to_each_alone():
    given = inputs(Case("ring", 2, True, torch.float64), 50)
    for got, wanted in zip(with_gradients(causal_attention, given), expected(given), strict=True):
        assert relative_error(got, wanted) <= 1e-12


def test_without_documents_it_is_torch_s_own_attention_bit_for_bit():
    q, k, v, _, _ = inputs(Case("ring", 2, False, torch.float32), 50)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    plain = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.equal(causal_attention(q, k, v), plain)


def kernel_round(device: str, dtype: torch.dtype, *, is_masked: bool) -> list[Tensor]:
    """(out, log-sum-exp, dq, dkv) of 40 queries and 24 keys. With a mask, one query sees no key."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(2, 40, 4, 64, generator=generator).to(device, dtype).transpose(1, 2)
    kv = torch.randn(2, 2, 24, 2, 64, generator=generator).to(device, dtype).transpose(2, 3)
    seen = torch.rand(2, 1, 40, 24, generator=generator) < 0.5
    seen[:, :, 7] = False
    mask = Mask(False, attention_bias(seen.to(device), dtype) if is_masked else None)
    found = kernel_forward(draw, kv, mask)
    whole = AttentionOutput(found.out_BHSE, torch.where(found.lse_BHS < UNSEEN / 2, 1.0, found.lse_BHS))
    return [*whole, *kernel_backward(draw, draw, kv, whole, mask)]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_s_kernels_accept_what_they_are_given_and_return_the_same_shapes(dtype, is_masked):
    on_cpu, on_cuda = (kernel_round(device, dtype, is_masked=is_masked) for device in ("cpu", "meta"))
    assert [(x.shape, x.dtype) for x in on_cuda] == [(x.shape, x.dtype) for x in on_cpu]


@pytest.mark.gpu
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_s_kernels_agree_with_the_cpu_s(dtype, is_masked):
    on_cpu, on_cuda = (kernel_round(device, dtype, is_masked=is_masked) for device in ("cpu", "cuda"))
    for here, there in zip(on_cpu, on_cuda, strict=True):
        assert relative_error(there.cpu().double(), here.double()) <= BANDS[dtype]
