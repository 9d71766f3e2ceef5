"""Cross-entropy that holds the logits of only one chunk of tokens at a time.

The forward pass computes the gradients of its inputs chunk by chunk, while the chunk's logits are
in memory; the backward pass only scales them. Shape suffixes: T tokens, C tokens of a chunk, V
vocabulary (with tensor parallelism this rank's part), D dim.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

LOSS_CHUNK = 4096
FLOAT16_HEADROOM = 2.0**-4
"""Factor of the rows of a chunk whose products with the logits' gradients are summed in float16, so
that the sum over the tokens of a chunk stays in its range. No loss scale could keep it there.
"""


@dataclass(frozen=True)
class VocabShard:
    """This rank's block of the vocabulary, which is split by rows over `group`. The block starts at
    row `start`.
    """

    group: ProcessGroup
    start: int

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        total = torch.stack(values)
        dist.all_reduce(total, group=self.group)
        return total.unbind()

    def max(self, values: Tensor) -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)


class ChunkedCrossEntropy:
    """Summed cross-entropy, computed `chunk_tokens` at a time; with `shard`, over a vocabulary
    split over ranks.

    With a shard, every rank of its group must call it with the same x and targets. The gradient of
    x is then partial: it must be summed over the ranks.

    The gradients are those of the sum over valid targets of cross-entropy + `z_loss` log(Z)^2,
    where Z is the denominator of the softmax (PaLM, 2204.02311). The returned loss does not include
    the second term. With `cap`, logits x are replaced by cap tanh(x / cap).
    """

    def __init__(
        self,
        chunk_tokens: int,
        shard: VocabShard | None = None,
        z_loss: float = 0.0,
        cap: float | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """Set the chunk size and options. `compiled`: whether torch.compile fuses the computation
        of a chunk. Not allowed together with `shard`.
        """
        assert not (compiled and shard), "the sums over ranks would break the compiled graph"
        self.chunk_tokens = chunk_tokens
        self.shard = shard
        self.z_loss = z_loss
        self.cap = cap
        self.chunk_loss = torch.compile(_chunk_loss) if compiled else _chunk_loss

    def __call__(self, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        """Return the loss summed over valid targets, 0-dim fp32. Targets below 0 are ignored."""
        if not torch.is_grad_enabled():
            x_TD = x_TD.detach()
            weight_VD = weight_VD.detach()
        return _CrossEntropy.apply(x_TD, weight_VD, targets_T, self)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkedCrossEntropy
    ) -> Tensor:
        size = settings.chunk_tokens
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), device=x_TD.device)
        grad_x_TD = torch.empty_like(x_TD) if wants_x else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(x_TD), size):
            x_CD = x_TD[first : first + size]
            targets_C = targets_T[first : first + size]
            of_run = settings.shard, settings.z_loss, settings.cap
            chunk_loss, probs_CV = settings.chunk_loss(x_CD, weight_VD, targets_C, *of_run)
            loss += chunk_loss
            if grad_x_TD is not None:
                grad_x_TD[first : first + size] = probs_CV @ weight_VD
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, probs_CV, x_CD)
            del probs_CV  # Otherwise it stays allocated beside the next chunk's logits.
        kept_VD = (
            None if grad_weight_VD is None else grad_weight_VD.to(_kept_dtype(weight_VD.dtype))
        )
        ctx.save_for_backward(grad_x_TD, kept_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x_TD, grad_weight_VD = (
            None if grad is None else grad * grad_loss for grad in ctx.saved_tensors
        )
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(ctx.weight_dtype)
        return grad_x_TD, grad_weight_VD, None, None


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap), or the logits themselves without a cap."""
    return logits if cap is None else cap * (logits / cap).tanh()


def _kept_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the gradient of the weight waits for the backward. Before the
    backward multiplies it, it is a sum over all tokens of the micro-batch, which may exceed the
    range of float16.
    """
    return torch.bfloat16 if compute_dtype == torch.float16 else compute_dtype


def _chunk_loss(
    x_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    shard: VocabShard | None,
    z_loss: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the chunk's summed loss in fp32, and the gradient of its logits (C, V) in the dtype of
    x.
    """
    logits_CV = soft_cap((x_CD @ weight_VD.t()).float(), cap)
    slope_CV = None if cap is None else 1.0 - (logits_CV / cap).square()
    max_C = logits_CV.amax(dim=-1)
    if shard is not None:
        shard.max(max_C)
    logits_CV.sub_(max_C[:, None])
    # Use masks instead of indices: with x on a GPU, the CPU does not know how many targets are in
    # this shard.
    is_valid_C = targets_C >= 0
    columns_C = targets_C - (0 if shard is None else shard.start)
    is_here_C1 = (is_valid_C & (columns_C >= 0) & (columns_C < weight_VD.shape[0]))[:, None].float()
    columns_C1 = columns_C.clamp(0, weight_VD.shape[0] - 1)[:, None]
    target_logits_C = (logits_CV.gather(-1, columns_C1) * is_here_C1).squeeze(-1)
    probs_CV = logits_CV.exp_()
    sums_C = probs_CV.sum(dim=-1)
    if shard is not None:
        sums_C, target_logits_C = shard.sum(sums_C, target_logits_C)
    log_sums_C = sums_C.log()
    loss = ((log_sums_C - target_logits_C) * is_valid_C).sum()
    factor_C = is_valid_C / sums_C
    if z_loss:
        # d log(Z)^2 = 2 log(Z) p, where p is the gradient of the cross-entropy except at the
        # target.
        factor_C *= 1 + 2 * z_loss * (max_C + log_sums_C)
    probs_CV.mul_(factor_C[:, None])
    # Write the targets' entries last and in the dtype of x, so that a compiler can write all others
    # in one pass.
    target_grads_C1 = probs_CV.gather(-1, columns_C1) - is_here_C1
    grad_CV = probs_CV.to(x_CD.dtype)
    grad_CV.scatter_(-1, columns_C1, target_grads_C1.to(x_CD.dtype))
    return loss, grad_CV if slope_CV is None else grad_CV * slope_CV.to(x_CD.dtype)


def _add_product(total_VD: Tensor, probs_CV: Tensor, x_CD: Tensor) -> None:
    """Add probs_CV^T x_CD to total_VD, which accumulates over the chunks in fp32."""
    if x_CD.dtype == torch.float32:
        total_VD.addmm_(probs_CV.t(), x_CD)
    elif x_CD.dtype == torch.float16:
        total_VD.add_(probs_CV.t() @ (x_CD * FLOAT16_HEADROOM), alpha=1 / FLOAT16_HEADROOM)
    else:
        total_VD += probs_CV.t() @ x_CD
