"""The gradient noise scale (McCandlish et al., 1812.06162): the batch at which a larger one stops to pay.

A gradient over B tokens has the expected squared norm |G|^2 + S / B, where G is the true gradient and S the trace of
the covariance of one token's. Two batch sizes give both (appendix A.1), and S / |G|^2 is the simple noise scale, in
tokens. Steps with much larger batches learn hardly more from a step, steps with much smaller ones hardly less from a
token.
"""

from dataclasses import dataclass

from torch import Tensor

from inner.data.micro_batch import IGNORE_INDEX, MicroBatch

ONE_IN = 4
"""One sequence in so many makes the small batch."""


@dataclass(frozen=True)
class GradientNoise:
    """Estimates from one step, unbiased and noisy; they may be negative. Average them over steps, then divide."""

    signal: float
    """|G|^2."""
    noise: float
    """S, for one token."""

    @property
    def figures(self) -> dict[str, float]:
        """Both, and S / |G|^2 as `tokens` where they are positive."""
        known = {"signal": self.signal, "noise": self.noise}
        return known | {"tokens": self.noise / self.signal} if min(known.values()) > 0 else known


def estimate_noise(small: tuple[float, float], large: tuple[float, float]) -> GradientNoise:
    """The estimates from two batches, each a number of tokens and the squared norm of its mean gradient."""
    (small_tokens, small_square), (large_tokens, large_square) = small, large
    assert 0 < small_tokens < large_tokens, f"{small_tokens} and {large_tokens} tokens"
    signal = (large_tokens * large_square - small_tokens * small_square) / (large_tokens - small_tokens)
    noise = (small_square - large_square) / (1 / small_tokens - 1 / large_tokens)
    return GradientNoise(signal, noise)


def is_in_small_batch(first: int, count: int) -> list[bool]:
    """Which of a micro-batch's sequences are in the small batch; `first` is the number of the first in the step."""
    return [number % ONE_IN == 0 for number in range(first, first + count)]


def without_targets(batch: MicroBatch, keeps: list[bool]) -> MicroBatch:
    """The micro-batch with the targets of only those sequences for which `keeps` is true."""
    targets_BS: Tensor = batch.targets_BS.clone()
    targets_BS[[not kept for kept in keeps]] = IGNORE_INDEX
    return batch._replace(targets_BS=targets_BS)
