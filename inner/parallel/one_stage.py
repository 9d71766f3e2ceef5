"""Forward and backward of a model without pipeline parallelism, with the same interface as
Pipeline.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from inner.data.micro_batch import MicroBatch
from inner.model.transformer import Transformer
from inner.parallel.weights.compute_copies import ComputeCopies
from inner.parallel.weights.gradient_sync import set_freeing, set_gradient_sync

Loss = Callable[[Transformer, MicroBatch], Tensor]
"""(model, micro-batch) -> summed loss, 0-dim fp32."""


def whole_loss(model: Transformer, batch: MicroBatch) -> Tensor:
    """Return the loss of a Transformer, which computes it in its head."""
    return model(
        batch.tokens_BS,
        targets_BS=batch.targets_BS,
        packing=batch.packing,
        ahead=batch.ahead,
        dropout=batch.dropout,
    )


class OneStage:
    """Runs a whole model. Every rank with the same weights must make each call, with the same
    number of micro-batches.
    """

    def __init__(
        self,
        model: Transformer,
        device: torch.device,
        copies: ComputeCopies,
        *,
        reduces_each: bool,
        keeps_weights: bool = False,
        loss: Loss = whole_loss,
    ) -> None:
        """Set the model and options. `reduces_each`: whether every micro-batch, and not only the
        last, reduces its gradients over the shards. `keeps_weights`: whether gathered weights are
        kept until the last micro-batch.
        """
        self._model = model
        self._device = device
        self._copies = copies
        self._reduces_each = reduces_each
        self._keeps_weights = keeps_weights
        self._loss = partial(loss, model)

    def backward(self, micro_batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Accumulate gradients of `scale` (0-dim fp32) times the summed loss, and return the summed
        loss (0-dim fp32).
        """
        total = torch.zeros((), device=self._device)
        with self._copies:
            for number, micro_batch in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                self._copies.begin_backward(self._model, is_last=is_last)
                set_gradient_sync(
                    self._model, over_shards=is_last or self._reduces_each, over_replicas=is_last
                )
                set_freeing(self._model, after_backward=is_last or not self._keeps_weights)
                loss = self._loss(micro_batch)
                (loss * scale).backward()
                total += loss.detach()
        self._copies.finish_gradients()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the summed loss (0-dim fp32) without computing gradients or extra depths."""
        batches = [batch._replace(ahead=None) for batch in micro_batches]
        with self._copies:
            return sum(map(self._loss, batches), start=torch.zeros((), device=self._device))
