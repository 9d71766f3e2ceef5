"""Chunked cross-entropy equals torch's own, also with a vocabulary split over ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from inner.model.loss import ChunkedCrossEntropy, VocabShard
from tests.harness import run_ranks

TOKENS, VOCAB, DIM = 50, 61, 16
Z_LOSS = 0.1


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, targets); one target in four is ignored."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::4] = -100
    return x, weight, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).float(), targets, reduction="sum", ignore_index=-100)


def found(function: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The loss, and the gradients of a third of the loss."""
    x, weight, targets = inputs(dtype)
    loss = function(x, weight, targets)
    (loss / 3).backward()
    assert x.grad is not None and weight.grad is not None
    return [loss.detach(), x.grad, weight.grad]


class Largest(TorchDispatchMode):
    """Records the size of the largest fp32 tensor that an operator creates."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
def test_loss_and_gradients_equal_torchs(chunk: int) -> None:
    for got, expected in zip(found(ChunkedCrossEntropy(chunk)), found(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_gradients_add_up_in_fp32() -> None:
    exact = found(plain, torch.float32)
    got = found(ChunkedCrossEntropy(1), torch.bfloat16)
    for mine, theirs in zip(got, exact, strict=True):
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 0.02
    assert got[1].dtype == got[2].dtype == torch.bfloat16


@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_sums_over_tokens_beyond_the_range_of_float16_do_not_overflow(num_tokens: int) -> None:
    """The backward multiplies them by a small number: the loss scale divided by the step's
    tokens.
    """
    x = torch.full((num_tokens, 4), 50.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    loss = ChunkedCrossEntropy(4096)(x, weight, torch.zeros(num_tokens, dtype=torch.int64))
    (loss * (8 / num_tokens)).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float16
    expected = torch.full((8, 4), 50.0)
    expected[0] = -350.0
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-2, atol=0)


def test_logits_of_one_chunk_are_the_most_that_is_held() -> None:
    with Largest() as chunked:
        found(ChunkedCrossEntropy(5))
    with Largest() as whole:
        found(plain)
    assert whole.numel == TOKENS * VOCAB
    # The largest tensors are the weight's gradient and the logits of one chunk.
    assert chunked.numel == VOCAB * DIM


def plain_with_z_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy + Z_LOSS log(Z)^2, summed over valid targets, as PaLM (2204.02311) writes
    it.
    """
    log_z = torch.logsumexp((x @ weight.t()).float(), dim=-1)
    return plain(x, weight, targets) + Z_LOSS * (log_z**2)[targets >= 0].sum()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_gradients_with_z_loss_are_those_of_the_plain_formula(chunk: int) -> None:
    loss, grad_x, grad_weight = found(ChunkedCrossEntropy(chunk, z_loss=Z_LOSS))
    _, expected_x, expected_weight = found(plain_with_z_loss)
    torch.testing.assert_close(grad_x, expected_x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_weight, expected_weight, rtol=1e-5, atol=1e-5)
    assert loss == found(ChunkedCrossEntropy(chunk))[0], "reported losses are without it"


def test_without_any_target_loss_and_gradients_are_zero() -> None:
    x, weight, targets = inputs()
    loss = ChunkedCrossEntropy(8)(x, weight, torch.full_like(targets, -100))
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    assert loss == 0 and x.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_large_logits_do_not_overflow() -> None:
    x, weight, targets = inputs()
    loss = ChunkedCrossEntropy(8)(x * 1e3, weight, targets)
    torch.testing.assert_close(loss, plain(x * 1e3, weight, targets), rtol=1e-5, atol=0)


def test_evaluation_computes_no_gradients() -> None:
    # The counter does not know in-place addmm, which fp32 uses.
    x, weight, targets = inputs(torch.bfloat16)
    with torch.no_grad(), FlopCounterMode(display=False) as evaluating:
        ChunkedCrossEntropy(5)(x, weight, targets)
    with FlopCounterMode(display=False) as training:
        ChunkedCrossEntropy(5)(x, weight, targets)
    assert (
        training.get_total_flops()
        == 3 * evaluating.get_total_flops()
        == 3 * 2 * TOKENS * VOCAB * DIM
    )


class Collectives(TorchDispatchMode):
    """Records the number of elements of every tensor given to a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func):
            self.numels += [tensor.numel() for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def sharded_on_a_rank(rank: int, num_ranks: int, chunk: int) -> tuple[list[Tensor], list[int]]:
    """This rank's rows as given by torch.chunk; the last rank has fewer."""
    rows = -(-VOCAB // num_ranks)
    shard = VocabShard(dist.group.WORLD, start=rank * rows)
    x, weight, targets = inputs()
    mine = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    with Collectives() as calls:
        loss = ChunkedCrossEntropy(chunk, shard)(x, mine, targets)
        (loss / 3).backward()
    assert x.grad is not None and mine.grad is not None
    return [loss.detach(), x.grad, mine.grad], calls.numels


@pytest.mark.parametrize(("num_ranks", "chunk"), [(2, 1000), (2, 7), (4, 25)])
def test_a_vocabulary_cut_unevenly_gives_the_same(num_ranks: int, chunk: int) -> None:
    loss, grad_x, grad_weight = found(plain)
    ranks = [tensors for tensors, _ in run_ranks(sharded_on_a_rank, num_ranks, num_ranks, chunk)]
    for mine in ranks:
        torch.testing.assert_close(mine[0], loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(sum(mine[1] for mine in ranks), grad_x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([mine[2] for mine in ranks]), grad_weight, rtol=1e-4, atol=1e-5
    )


def test_ranks_exchange_three_numbers_a_token_and_never_logits() -> None:
    for _, numels in run_ranks(sharded_on_a_rank, 2, 2, 1000):
        assert numels == [TOKENS, 2 * TOKENS]
