"""The loss scale of training in float16 (Mixed precision training, 1710.03740).

float16 has no number between 0 and 6e-8, and none above 65504. Losses are multiplied by a power of
two before the backward, so that small gradients do not become 0, and the fp32 gradients are divided
by it afterwards, which is exact. A gradient that is not finite although the loss is, has
overflowed: its step is skipped. The scale follows the overflows:

    2^16                  at first
    doubled               after GOOD_STEPS steps in a row without an overflow, up to 2^MAX_EXPONENT
    halved                at each overflow but the first of several in a row, down to 1
    TrainingStopped       at an overflow that would halve a scale of 1
"""

from dataclasses import dataclass

from inner.errors import TrainingStopped

FIRST_EXPONENT = 16
MAX_EXPONENT = 32
GOOD_STEPS = 1000
TOLERATED = 1
"""Number of overflows in a row that do not change the scale."""


@dataclass
class LossScale:
    """The scale of one island. Every rank has one, and all observe the same steps."""

    exponent: int = FIRST_EXPONENT
    """Logarithm of the scale to base 2."""
    num_good: int = 0
    """Number of steps without an overflow since the scale was set or the last overflow."""
    num_overflows: int = 0
    """Number of overflows in a row, up to the last step."""

    @property
    def value(self) -> float:
        """The factor of all losses."""
        return 2.0**self.exponent

    def observe(self, *, overflows: bool) -> None:
        """Count a step with a finite loss, and set the scale of the next one. Raises
        TrainingStopped if the gradient overflows at the lowest scale.
        """
        if overflows:
            self._observe_overflow()
        else:
            self._observe_good_step()

    def lower(self, exponent: int | None) -> None:
        """Continue with this scale if it is smaller: the smallest of the islands that made a round
        together. None: no island has a scale.
        """
        if exponent is not None and exponent < self.exponent:
            self.exponent = exponent
            self.num_good = 0

    def _observe_overflow(self) -> None:
        self.num_good = 0
        self.num_overflows += 1
        if self.num_overflows <= TOLERATED:
            return
        if self.exponent == 0:
            raise TrainingStopped(
                f"the gradients of {self.num_overflows} steps in a row were too large for float16, "
                "the last ones with a loss scale of 1, which is the smallest; lower optimizer.lr, "
                "lengthen optimizer.warmup_steps, or set island.compute_dtype to bfloat16 or "
                "float32"
            )
        self.exponent -= 1

    def _observe_good_step(self) -> None:
        self.num_overflows = 0
        self.num_good += 1
        if self.num_good == GOOD_STEPS:
            self.num_good = 0
            self.exponent = min(self.exponent + 1, MAX_EXPONENT)
