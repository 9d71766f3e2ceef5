"""The gradient noise scale (McCandlish et al., 1812.06162): the batch size above which larger
batches hardly help.

A gradient over B tokens has the expected squared norm |G|^2 + S / B, where G is the true gradient
and S is the trace of the covariance of a single token's gradient. Two batch sizes give both
unknowns (appendix A.1). S / |G|^2 is the simple noise scale, in tokens. With a much larger batch, a
step learns hardly more. With a much smaller batch, a token is used hardly better.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from inner.data.micro_batch import IGNORE_INDEX, MicroBatch

ONE_IN = 4
"""The small batch contains one in this number of sequences."""


@dataclass(frozen=True)
class GradientNoise:
    """Estimates from one step. They are unbiased but noisy, and may be negative. Average them over
    steps before dividing.
    """

    signal: float
    """|G|^2."""
    noise: float
    """S, the trace of the covariance of one token's gradient."""

    @property
    def figures(self) -> dict[str, float]:
        """Both estimates, and S / |G|^2 as `tokens` if they are positive."""
        known = {"signal": self.signal, "noise": self.noise}
        return known | {"tokens": self.noise / self.signal} if min(known.values()) > 0 else known


def estimate_noise(small: tuple[float, float], large: tuple[float, float]) -> GradientNoise:
    """Estimate from two batches, each given by its number of tokens and the squared norm of its
    mean gradient.
    """
    (small_tokens, small_square) = small
    (large_tokens, large_square) = large
    assert 0 < small_tokens < large_tokens, f"{small_tokens} and {large_tokens} tokens"
    signal = (large_tokens * large_square - small_tokens * small_square) / (
        large_tokens - small_tokens
    )
    noise = (small_square - large_square) / (1 / small_tokens - 1 / large_tokens)
    return GradientNoise(signal, noise)


def is_in_small_batch(first: int, count: int) -> list[bool]:
    """Return for each sequence of a micro-batch whether it is in the small batch. `first`: number
    of the first sequence in the step.
    """
    return [number % ONE_IN == 0 for number in range(first, first + count)]


def without_targets(batch: MicroBatch, keeps: list[bool]) -> MicroBatch:
    """Return the micro-batch with targets only in the sequences for which `keeps` is true."""
    targets_BS: Tensor = batch.targets_BS.clone()
    drops = [not kept for kept in keeps]
    targets_BS[drops] = IGNORE_INDEX
    if batch.ahead is None:
        return batch._replace(targets_BS=targets_BS)
    targets_PBS: Tensor = batch.ahead.targets_PBS.clone()
    targets_PBS[:, drops] = IGNORE_INDEX
    return batch._replace(
        targets_BS=targets_BS, ahead=replace(batch.ahead, targets_PBS=targets_PBS)
    )
