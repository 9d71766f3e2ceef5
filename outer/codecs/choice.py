"""The choice of each part's codec by the part's content.

Fine tensors (norms, biases, tiny ones) and averaged moments keep more bits than the rest of a
pseudo-gradient. Buffers are sent as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm, prod

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.cast import Bf16Codec, Fp32Codec
from outer.config import OuterConfig
from outer.errors import InputError
from outer.space.fragments import add_moments, build_part_groups
from outer.space.layout import Part, Space, TensorSpec
from outer.space.part_sizes import choose_part_elements

FINE = "int8"
"""The codec of norms, biases and tiny tensors if the codec of the rest is coarse."""
EXACT = Fp32Codec()
"""The codec of buffers. No later round corrects an error in one, because the mean replaces it."""


@dataclass(frozen=True)
class CodecChoice:
    """The codecs of a run."""

    codec: Codec
    fine: Codec
    mean: Codec
    """Encodes means for sending. Where means are not sent, a donor stores them in this encoding."""
    is_gathered: bool = False
    feedback: float | None = None
    """Decay of the residual that is added to the next pseudo-gradient; None disables error
    feedback.
    """
    moments: Codec = field(default_factory=Fp32Codec)
    """Encodes moments and their means. It must not round a small second moment to zero."""
    experts: Codec | None = None
    """Encodes experts and their means; None: as all other parameters."""

    @property
    def block_elements(self) -> int:
        """Part boundaries are multiples of this number, so that no block spans two parts."""
        of_experts = 1 if self.experts is None else self.experts.block_elements
        return lcm(self.codec.block_elements, self.fine.block_elements, of_experts)

    @property
    def splits_fine(self) -> bool:
        """Whether fine tensors have parts of their own."""
        return self.fine is not self.codec

    def codec_for(self, part: Part) -> Codec:
        """Return the codec of a part of the pseudo-gradient, of moments or of buffers."""
        return self._codec_of_values(part) or self._codec_apart(part) or self.codec

    def mean_codec_for(self, part: Part) -> Codec:
        """Return the codec of the part's mean."""
        return self._codec_of_values(part) or self._codec_apart(part) or self.mean

    def _codec_apart(self, part: Part) -> Codec | None:
        """Return the codec of a part that is fine or holds experts; None if it is that of the
        rest.
        """
        return self.fine if part.is_fine else self.experts if part.is_experts else None

    def _codec_of_values(self, part: Part) -> Codec | None:
        """Return the codec of a part whose mean replaces the values; None for other parts."""
        if part.kind == "buffer":
            return EXACT
        return self.moments if part.is_replaced else None

    def gathers(self, part: Part) -> bool:
        """Return whether every participant receives every payload of the part and computes the
        mean itself.
        """
        is_rest = self._codec_of_values(part) is None and self._codec_apart(part) is None
        return self.is_gathered and is_rest

    def has_feedback(self, part: Part) -> bool:
        """Return whether the coding error of the part is kept and sent with a later round."""
        return self.feedback is not None and not part.is_replaced


def build_uniform_choice(codec: Codec) -> CodecChoice:
    """Return a choice of one codec for everything, without error feedback."""
    return CodecChoice(codec, codec, codec)


def build_codec_choice(config: OuterConfig) -> CodecChoice:
    """Return the codecs that the config selects. Raises InputError, also for own code that does
    not do what a codec must.
    """
    codec = build_codec(config.codec, config.coding)
    moments = Fp32Codec() if config.codec == "fp32" else Bf16Codec()
    if codec.gathers and (problem := config.gathering_problem):
        raise InputError(f"outer.{problem}")
    fine = build_codec(FINE) if codec.is_coarse else codec
    mean = Fp32Codec() if codec.gathers else codec
    experts = (
        None if config.experts.codec is None else build_codec(config.experts.codec, config.coding)
    )
    return CodecChoice(codec, fine, mean, codec.gathers, config.coding.feedback, moments, experts)


def build_space(
    specs: Sequence[TensorSpec], config: OuterConfig, codecs: CodecChoice | None = None
) -> Space:
    """Return the canonical space of a run, from the model's parameters and the config.

    `codecs`: those of the config, if they are built already. Raises InputError when the model has
    too few layers for the configured fragments.
    """
    codecs = codecs or build_codec_choice(config)
    part_groups = build_part_groups(specs, config, splits_fine=codecs.splits_fine)
    part_elements = config.part_elements or choose_part_elements(
        sum(prod(spec.shape) for spec in specs)
    )
    return Space(
        add_moments(specs, config),
        part_elements,
        codecs.block_elements,
        part_groups,
        config.start_islands,
    )
