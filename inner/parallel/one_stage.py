"""A model in one piece: micro-batches one after another, the same calls as a Pipeline."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inner.model import Transformer
from inner.parallel.fsdp import reduce_on_backward
from inner.windows import MicroBatch


class OneStage:
    """Runs a whole model. Every rank of its FSDP mesh must make each call, with as many micro-batches."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model = model
        self._device = device

    def backward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Adds up gradients of `scale` times the summed loss; returns that loss (0-dim fp32)."""
        total = torch.zeros((), device=self._device)
        for number, micro_batch in enumerate(micro_batches):
            reduce_on_backward(self._model, is_last=number == len(micro_batches) - 1)
            loss = self._loss(micro_batch)
            (loss * scale).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss, without gradients."""
        total = torch.zeros((), device=self._device)
        for micro_batch in micro_batches:
            total += self._loss(micro_batch)
        return total

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        return self._model(
            micro_batch.tokens_BS, targets_BS=micro_batch.targets_BS, documents_BS=micro_batch.documents_BS
        )
