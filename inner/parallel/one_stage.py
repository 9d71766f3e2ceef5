"""Forward and backward of a model without pipeline parallelism, with the same interface as Pipeline."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inner.data.micro_batch import MicroBatch
from inner.model.transformer import Transformer
from inner.parallel.fsdp import set_gradient_sync


class OneStage:
    """Runs a whole model. Every rank of its FSDP mesh must make each call, with the same number of micro-batches."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model = model
        self._device = device

    def backward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Accumulate gradients of `scale` times the summed loss, and return that loss (0-dim fp32)."""
        total = torch.zeros((), device=self._device)
        for number, micro_batch in enumerate(micro_batches):
            set_gradient_sync(self._model, is_last=number == len(micro_batches) - 1)
            loss = self._loss(micro_batch)
            (loss * scale).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss (0-dim fp32), without gradients."""
        return sum(map(self._loss, micro_batches), start=torch.zeros((), device=self._device))

    def _loss(self, batch: MicroBatch) -> Tensor:
        return self._model(batch.tokens_BS, targets_BS=batch.targets_BS, documents_BS=batch.documents_BS)
