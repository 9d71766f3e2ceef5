"""Which codec a part goes through: pseudo-gradients, means, and fine tensors and moments, which are worth more bits."""

from dataclasses import dataclass, field
from math import lcm

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.cast import Bf16Codec, Fp32Codec
from outer.config import GATHERED, OuterConfig
from outer.space import Part

COARSE = frozenset({"int4", "e3m0", "stat2", "topk", "lowrank"})
"""Fewer than 8 bits an element: not for norms, biases and tiny tensors."""
FINE = "int8"


@dataclass(frozen=True)
class Coding:
    """The codecs of a run. `mean`: of a mean as it travels, or as a donor keeps it when it does not travel."""

    codec: Codec
    fine: Codec
    mean: Codec
    is_gathered: bool = False
    feedback: float | None = None
    """Decay of what coding lost, until it is sent with the next pseudo-gradient; None: it is forgotten."""
    moments: Codec = field(default_factory=Fp32Codec)
    """Of moments and of their means; it must not round a small second moment to zero."""

    @property
    def block_elements(self) -> int:
        """Parts are cut at multiples of it."""
        return lcm(self.codec.block_elements, self.fine.block_elements)

    @property
    def splits_fine(self) -> bool:
        """Whether fine tensors have parts of their own."""
        return self.fine is not self.codec

    def of(self, part: Part) -> Codec:
        """The codec of a pseudo-gradient's part, or of moments."""
        if part.is_moment:
            return self.moments
        return self.fine if part.is_fine else self.codec

    def of_mean(self, part: Part) -> Codec:
        """The codec of a mean's part."""
        if part.is_moment:
            return self.moments
        return self.fine if part.is_fine else self.mean

    def gathers(self, part: Part) -> bool:
        """Whether everybody gets every payload of the part."""
        return self.is_gathered and not part.is_fine and not part.is_moment

    def keeps(self, part: Part) -> bool:
        """Whether what coding loses of the part is sent later."""
        return self.feedback is not None and not part.is_moment


def uniform(codec: Codec) -> Coding:
    """One codec for everything, nothing kept."""
    return Coding(codec, codec, codec)


def coding_of(config: OuterConfig) -> Coding:
    """The run's."""
    codec = build_codec(config.codec, config.coding)
    moments = Fp32Codec() if config.codec == "fp32" else Bf16Codec()
    if config.codec not in COARSE:
        return Coding(codec, codec, codec, feedback=config.coding.feedback, moments=moments)
    is_gathered = config.codec in GATHERED
    mean = Fp32Codec() if is_gathered else codec
    return Coding(codec, build_codec(FINE), mean, is_gathered, config.coding.feedback, moments)
