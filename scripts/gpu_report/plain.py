"""A training step of the plain Llama of scripts/bench/plain_llama.py, to compare ours with."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.trainer import COMPUTE_DTYPES
from scripts.bench.plain_llama import PlainLlama, plain_step
from scripts.gpu_report.training import TrainingCase, free_memory


class PlainModel(nn.Module):
    """Maps tokens and targets, each (B, S), to their mean loss.

    If compiled, each layer is one graph, as in our trainer, and the head with the loss is another
    one.
    """

    def __init__(self, case: TrainingCase) -> None:
        super().__init__()
        self.llama = PlainLlama(case.sizes, case.seq_len)
        is_compiled = case.parallel.compile is True
        self._loss = torch.compile(head_loss) if is_compiled else head_loss
        if is_compiled:
            for layer in self.llama.layers:
                layer.compile()

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return self._loss(self.llama.last_hidden(tokens_BS), self.llama.head.weight, targets_BS)


def head_loss(x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    logits_BSV = F.linear(x_BSD, weight_VD).float()
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def build_plain(case: TrainingCase, device: str) -> Callable[[], float]:
    """Build a step of the plain Llama on the case's first text.

    It has fp32 weights, autocast, and fused AdamW.
    """
    free_memory(forgets_compiled=case.parallel.compile is True)
    with torch.device(device):
        model = PlainModel(case)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02) if param.ndim > 1 else nn.init.ones_(param)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    windows = case.windows(0)
    return lambda: plain_step(model, optimizer, windows, COMPUTE_DTYPES[case.dtype])
