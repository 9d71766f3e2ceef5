"""Utilisation of the hardware, and the measured peak that it is relative to.

MFU counts only the operations of the model (`Flops.total` of inner/flops.py). HFU also counts the
operations that the backward recomputes (`Flops.hardware`).
"""

import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PEAK_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
"""Sizes of the square matrices whose products are timed to measure a device's peak."""
SLOW = ("cpu", "float16")
"""Most CPUs have no such products: the larger sizes would take seconds."""
PEAK_SECONDS = 0.1
"""Measuring time for each size, in seconds."""
PRODUCTS_PER_TIMING = 4
"""Matrix products between two readings of the clock."""


@cache
def peak_flops(device: str, dtype: str) -> float | None:
    """Measure the operations per second of the device's fastest matrix product; None if the device
    has none in `dtype`.

    `device` and `dtype` are named as in torch (cpu, cuda:0; bfloat16). The first call takes less
    than a second. On a CPU the figure is right for this process's threads on otherwise idle cores.
    """
    import torch

    where = torch.device(device)
    kind = getattr(torch, dtype)
    sizes = PEAK_SIZES.get(where.type, PEAK_SIZES["cuda"])
    if (where.type, dtype) == SLOW:
        sizes = sizes[:1]
    try:
        return max(_product_flops(size, where, kind) for size in sizes)
    except RuntimeError:
        return None


def _product_flops(size: int, device: "torch.device", dtype: "torch.dtype") -> float:
    """Return the operations per second of products of square matrices, in the best of several
    runs.
    """
    import torch

    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = left @ right
    best = 0.0
    until = time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < until:
        _synchronise(device)
        started_at = time.perf_counter()
        for _ in range(PRODUCTS_PER_TIMING):
            torch.mm(left, right, out=result)
        _synchronise(device)
        best = max(best, PRODUCTS_PER_TIMING * 2 * size**3 / (time.perf_counter() - started_at))
    return best


def _synchronise(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def utilisation(flops: float, tokens_per_second: float, num_ranks: int, peak: float) -> float:
    """Return the share of the ranks' peak that an island uses at `tokens_per_second`, with `flops`
    operations per token.

    It is the MFU for `Flops.total` and the HFU for `Flops.hardware`. `peak` is one rank's peak,
    from peak_flops.
    """
    return flops * tokens_per_second / (num_ranks * peak)
