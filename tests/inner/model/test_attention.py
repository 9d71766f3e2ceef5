"""Attention in one process, within documents or without, and the attention kernels."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inner.model.attention import causal_attention
from inner.model.attention_kernels import (
    _flash_varlen_backward,
    _flash_varlen_forward,
    dense_backward,
    dense_forward,
    varlen_backward,
    varlen_forward,
)
from tests.harness import run_ranks
from tests.inner.sequences import BANDS, B, Case, expected, inputs, pack_at, with_gradients
from tests.inner.small import relative_error
from tests.memory import read_status, reset_peak

CPU_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
LONG = 16384


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", BANDS, ids=str)
def test_documents_without_a_mask_equal_attention_with_the_mask_of_all_pairs(dtype, num_kv_heads):
    given = inputs(Case("ring", num_kv_heads, True, dtype), 600)
    mine = given._replace(
        **{name: getattr(given, name).to(dtype) for name in ("q", "k", "v", "dy")}
    )
    for got, wanted in zip(with_gradients(causal_attention, mine), expected(given), strict=True):
        assert got.dtype == dtype
        assert relative_error(got.double(), wanted) <= BANDS[dtype]


def test_without_documents_it_is_torch_s_own_attention_bit_for_bit():
    q, k, v, _, _ = inputs(Case("ring", 2, False, torch.float32), 50)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    plain = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(
        1, 2
    )
    assert torch.equal(causal_attention(q, k, v), plain)


def test_only_scores_within_documents_are_computed():
    given = inputs(Case("ring", 2, True, torch.float32), 200)
    assert given.packing is not None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        causal_attention(given.q, given.k, given.v, given.packing)
    pairs = sum(
        event.input_shapes[0][2] ** 2 for event in seen.events() if event.name == CPU_KERNEL
    )
    lengths = [end - begin for begin, end in pairwise(given.packing.host_bounds_N.tolist())]
    assert pairs == sum(length**2 for length in lengths) < B * 200**2 / 5


def growth_of_memory(_: int, seq_len: int) -> int:
    """Bytes by which the process grows in a forward and backward of documents of 512 positions."""
    packing = pack_at((torch.arange(seq_len) // 512)[None].numpy(), torch.arange(seq_len))
    q, k, v = (torch.randn(1, seq_len, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    reset_peak()
    before = read_status("VmHWM")
    causal_attention(q, k, v, packing).sum().backward()
    return read_status("VmHWM") - before


def test_memory_does_not_grow_with_pairs_of_positions():
    # A mask of all pairs has a quarter of a GB as bool and a GB in fp32.
    assert run_ranks(growth_of_memory, 1, LONG)[0] < 64 * 2**20


def kernel_round(device: str, dtype: torch.dtype, *, is_causal: bool) -> list[Tensor]:
    """(out, log-sum-exp, dq, dk, dv) of 40 queries and 24 keys, or 40 if causal."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 40, 4, 64, generator=generator).to(device, dtype).transpose(1, 2)
    keys = (
        torch.randn(2, 2, 40 if is_causal else 24, 2, 64, generator=generator)
        .to(device, dtype)
        .transpose(2, 3)
    )
    found = dense_forward(q, *keys, is_causal=is_causal)
    return [*found, *dense_backward(q, q, *keys, found, is_causal=is_causal)]


def documents(
    device: str, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, int]]:
    """Queries, keys and values of two sequences of 40 positions, and the bounds of their
    documents.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(80, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 7, 40, 41, 80], dtype=torch.int32)
    return (q, k, v), (bounds.to(device), bounds, 39)


def varlen_round(device: str, dtype: torch.dtype) -> list[Tensor]:
    tensors, bounds = documents(device, dtype)
    output = varlen_forward(*tensors, *bounds)
    return [*output, *varlen_backward(tensors[0], *tensors, *output, *bounds)]


def shapes(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_s_kernels_accept_what_they_are_given_and_return_the_same_shapes(dtype, is_causal):
    on_cpu, on_cuda = (
        kernel_round(device, dtype, is_causal=is_causal) for device in ("cpu", "meta")
    )
    assert shapes(on_cuda) == shapes(on_cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiler_is_told_the_shapes_that_documents_have(dtype):
    assert shapes(varlen_round("meta", dtype)) == shapes(varlen_round("cpu", dtype))


def test_cuda_s_kernel_for_documents_accepts_what_it_is_given_and_returns_the_same_shapes():
    tensors, (bounds, _, longest) = documents("meta", torch.bfloat16)
    output = _flash_varlen_forward(*tensors, bounds, longest)
    gradients = _flash_varlen_backward(tensors[0], *tensors, *output, bounds, longest)
    assert shapes([*output, *gradients]) == shapes(varlen_round("cpu", torch.bfloat16))


def test_keys_and_values_are_not_repeated_for_the_heads_that_share_them():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        kernel_round("cpu", torch.float32, is_causal=False)
    (forward,) = [event for event in seen.events() if event.name == CPU_KERNEL]
    assert [shape[1] for shape in forward.input_shapes[:3]] == [4, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_s_kernels_agree_with_the_cpu_s(dtype, is_causal):
    on_cpu, on_cuda = (
        kernel_round(device, dtype, is_causal=is_causal) for device in ("cpu", "cuda")
    )
    for here, there in zip(on_cpu, on_cuda, strict=True):
        assert relative_error(there.cpu().double(), here.double()) <= BANDS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_s_documents_agree_with_the_cpu_s(dtype):
    for here, there in zip(varlen_round("cpu", dtype), varlen_round("cuda", dtype), strict=True):
        assert relative_error(there.cpu().double(), here.double()) <= BANDS[dtype]
