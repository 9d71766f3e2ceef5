"""Encoding and decoding of the payloads of a reduce, with all checks. Any thread may call these
methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outer.codecs.base import Codec
from outer.codecs.choice import CodecChoice
from outer.errors import MessageError, NonFiniteError, OuterError, PoisonError
from outer.merges.bound import Bound
from outer.reduce.error_feedback import ErrorFeedback
from outer.space.layout import Part, Space, TensorKind


@dataclass(frozen=True)
class Mean:
    """One part of the reduced mean: fp32 values, and the bytes (1-D uint8) from which they were
    decoded.
    """

    values: torch.Tensor
    payload: torch.Tensor
    digest_after: bytes | None = None
    """Digest of the part's state after a commit of this mean; None if it has not been computed
    yet."""


class Payloads:
    """The payloads of one rank. `part` is the index of a part in the canonical space."""

    def __init__(self, codecs: CodecChoice, space: Space) -> None:
        self._codecs = codecs
        self._space = space
        decay = codecs.feedback
        self.feedbacks = [] if decay is None else [ErrorFeedback(decay), ErrorFeedback(decay)]
        """Error feedback of this rank's pseudo-gradients, and of the means that it encodes;
        empty if disabled."""
        self._grad_feedback, self._mean_feedback = self.feedbacks or (None, None)

    def are_gathered(self, part: int) -> bool:
        """Return whether every participant receives every payload of the part."""
        return self._codecs.gathers(self._space.parts[part])

    def bounds(self, part: int) -> Part:
        """Return the part of the canonical space."""
        return self._space.parts[part]

    def is_buffer(self, part: int) -> bool:
        """Return whether the part holds buffers, whose mean is no step along a direction."""
        return self._space.parts[part].kind == "buffer"

    def num_bytes(self, part: int, *, of_mean: bool) -> int:
        """Return the size in bytes of the part's payload, or of its mean's payload."""
        bounds = self._space.parts[part]
        codec = self._codecs.mean_codec_for(bounds) if of_mean else self._codecs.codec_for(bounds)
        return codec.num_bytes(bounds.num_elements)

    @property
    def longest(self) -> int:
        """Return the size in bytes of the longest payload, means included."""
        parts = range(len(self._space.parts))
        return max(
            (self.num_bytes(part, of_mean=of_mean) for part in parts for of_mean in (False, True)),
            default=0,
        )

    def check_own(self, part: int, values: torch.Tensor) -> None:
        """Raise OuterError if this rank's own values are not possible for the part's kind of
        tensor.
        """
        if (index := first_negative(values, self._space.parts[part].kind)) is not None:
            raise OuterError(
                f"{self._name(part, index)!r} holds {values[index]}, but a mean of squares is "
                "never below 0"
            )

    def encode(self, part: int, values: torch.Tensor) -> torch.Tensor:
        """Encode this rank's own pseudo-gradient, with error feedback. Raises OuterError if it is
        not finite.
        """
        bounds = self._space.parts[part]
        codec = self._codecs.codec_for(bounds)
        try:
            if self._grad_feedback is None or not self._codecs.has_feedback(bounds):
                return codec.encode(values)
            return self._grad_feedback.encode(part, values, codec)
        except NonFiniteError as error:
            name = self._name(part, error.index)
            raise OuterError(f"the pseudo-gradient of {name!r} holds {error.value}") from None

    def encode_mean(self, part: int, mean: torch.Tensor) -> torch.Tensor:
        """Encode a mean that this rank computed, with error feedback. Raises NonFiniteError."""
        bounds = self._space.parts[part]
        codec = self._codecs.mean_codec_for(bounds)
        # A mean that every participant computes must not depend on the residuals of one
        # participant.
        if (
            self._mean_feedback is None
            or self.are_gathered(part)
            or not self._codecs.has_feedback(bounds)
        ):
            return codec.encode(mean)
        return self._mean_feedback.encode(part, mean, codec)

    def decode(self, part: int, payload: torch.Tensor, sender: str) -> torch.Tensor:
        """Decode a peer's pseudo-gradient into finite values. Raises PoisonError."""
        return self._decode(part, payload, sender, self._codecs.codec_for(self._space.parts[part]))

    def decode_mean(self, part: int, payload: torch.Tensor, reducer: str) -> Mean:
        """Decode a mean from its reducer's payload. Raises PoisonError."""
        codec = self._codecs.mean_codec_for(self._space.parts[part])
        return Mean(self._decode(part, payload, reducer, codec), payload)

    def find_overflow(
        self,
        part: int,
        payloads: Sequence[torch.Tensor],
        senders: Sequence[str],
        error: NonFiniteError,
    ) -> PoisonError:
        """Return the error for a mean that overflowed although its inputs are finite. It blames
        the sender of the largest input.
        """
        sizes = {
            name: self.decode(part, payload, name)[error.index].abs().item()
            for payload, name in zip(payloads, senders, strict=True)
        }
        peer = max(sizes, key=lambda name: sizes[name])
        name = self._name(part, error.index)
        return PoisonError(peer, f"{sizes[peer]} for {name!r}, which makes the mean {error.value}")

    def refuse_too_long(self, part: int, lengths: Mapping[str, float], bound: Bound) -> None:
        """Raise PoisonError for the participant, if any, whose payload of the part exceeds the
        bound.
        """
        kind = self._space.parts[part].kind
        if (name := bound.find_too_long(kind, lengths)) is not None:
            raise PoisonError(
                name,
                f"a payload of {self._describe(part)} with a norm of {lengths[name]:.3g}; by this "
                f"island's pseudo-gradients, now and of late, {bound.limit(kind):.3g} is the most "
                "(outer.merge.refuse_norm_ratio)",
            )

    def _decode(self, part: int, payload: torch.Tensor, sender: str, codec: Codec) -> torch.Tensor:
        bounds = self._space.parts[part]
        try:
            values = codec.decode(payload, bounds.num_elements)
            if (index := first_negative(values, bounds.kind)) is not None:
                raise MessageError(f"a second moment of {values[index]}, which must not be below 0")
            return values
        except MessageError as error:
            raise PoisonError(
                sender, f"a payload of {self._describe(part)} that is refused: {error}"
            ) from None

    def _describe(self, part: int) -> str:
        """Return the names of the first and the last parameter in the part."""
        bounds = self._space.parts[part]
        first = self._space.name_at(bounds.start)
        last = self._space.name_at(bounds.stop - 1)
        return f"{first!r}" if first == last else f"{first!r} to {last!r}"

    def _name(self, part: int, index: int) -> str:
        """Return the name of the parameter that contains element `index` of the part."""
        return self._space.name_at(self._space.parts[part].start + index)


def first_negative(values: torch.Tensor, kind: TensorKind) -> int | None:
    """Return the index of the first negative second moment, or None. An optimizer step would
    take its square root.
    """
    if kind != "exp_avg_sq" or values.numel() == 0 or values.min() >= 0:
        return None
    found = (values < 0).nonzero()
    return int(found[0]) if len(found) else None
