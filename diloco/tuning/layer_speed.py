"""Measures the speed of a layer of the model on this rank's device, by the size of the
micro-batch.
"""

import time
from dataclasses import replace

import torch

from inner.model.rope import rope_table
from inner.model.sizes import ModelSizes
from inner.model.transformer import Block

WARM_UP = 1
TIMED = 3
SECONDS_IN_ALL = 20.0
"""After this time no larger micro-batch is measured."""


def measure_layer_speeds(
    sizes: ModelSizes, positions: int, micro_batches: list[int], device: str, dtype: str
) -> dict[int, float]:
    """Return the tokens per second of one layer's forward and backward, by micro-batch.

    `positions` of each sequence are on this rank; `dtype` is a name of torch's. The smallest
    micro-batch is always measured, larger ones in turn until SECONDS_IN_ALL have passed.
    """
    block = Block(replace(sizes, num_layers=1)).to(device=device, dtype=getattr(torch, dtype))
    rope_2SE = rope_table(sizes, torch.arange(positions), positions).to(device)
    speeds: dict[int, float] = {}
    begun = time.perf_counter()
    for micro_batch in sorted(micro_batches):
        if speeds and time.perf_counter() - begun > SECONDS_IN_ALL:
            break
        x_BSD = torch.randn(
            micro_batch, positions, sizes.dim, device=device, dtype=getattr(torch, dtype)
        )
        seconds = min(
            [_time_layer(block, x_BSD, rope_2SE) for _ in range(WARM_UP + TIMED)][WARM_UP:]
        )
        speeds[micro_batch] = micro_batch * positions / seconds
    return speeds


def _time_layer(block: Block, x_BSD: torch.Tensor, rope_2SE: torch.Tensor) -> float:
    """Return the seconds of one forward and backward."""
    _synchronise(x_BSD)
    begun = time.perf_counter()
    block(x_BSD.requires_grad_(), rope_2SE).sum().backward()
    _synchronise(x_BSD)
    return time.perf_counter() - begun


def _synchronise(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
