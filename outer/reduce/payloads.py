"""Payloads of a reduce: parts encoded, and decoded with everything checked that can be. Any thread may call these."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outer.codecs.base import Codec
from outer.coding import Coding
from outer.digest import part_digest
from outer.errors import MessageError, NonFiniteError, OuterError, PoisonError
from outer.feedback import Feedback
from outer.phases import Hooks
from outer.space import Kind, Space


@dataclass(frozen=True)
class Mean:
    """One part of the reduced mean: fp32 values, the bytes (1-D uint8) they were decoded from, and their digest."""

    values: torch.Tensor
    payload: torch.Tensor
    digest: bytes


class Payloads:
    """Of one rank, by the index of the part."""

    def __init__(self, coding: Coding, space: Space, hooks: Hooks) -> None:
        self._coding, self._space, self._hooks = coding, space, hooks
        decay = coding.feedback
        self.feedbacks = [] if decay is None else [Feedback(decay), Feedback(decay)]
        """What coding lost: of this rank's pseudo-gradients, and of the means that it encoded."""
        self._own, self._means = self.feedbacks or (None, None)

    def are_gathered(self, part: int) -> bool:
        """Whether everybody gets every payload of the part."""
        return self._coding.gathers(self._space.parts[part])

    def num_bytes(self, part: int, *, of_mean: bool) -> int:
        """A payload's length."""
        bounds = self._space.parts[part]
        codec = self._coding.of_mean(bounds) if of_mean else self._coding.of(bounds)
        return codec.num_bytes(bounds.num_elements)

    def encode(self, round_number: int, part: int, values: torch.Tensor) -> torch.Tensor:
        """Of this rank's own pseudo-gradient. Raises OuterError when it cannot be sent."""
        bounds = self._space.parts[part]
        if (index := first_negative(values, bounds.kind)) is not None:
            raise OuterError(f"{self._name(part, index)!r} holds {values[index]}; no mean of squares is below 0")
        values = self._hooks.pseudo_grad(round_number, values)
        try:
            return self._coded(part, values, self._coding.of(bounds), self._own)
        except NonFiniteError as error:
            name = self._name(part, error.index)
            raise OuterError(f"the pseudo-gradient of {name!r} holds {error.value}") from None

    def encode_mean(self, part: int, mean: torch.Tensor) -> torch.Tensor:
        """Of a mean made here. Raises NonFiniteError."""
        # What everybody makes must not depend on what one of them has lost before.
        feedback = None if self.are_gathered(part) else self._means
        return self._coded(part, mean, self._coding.of_mean(self._space.parts[part]), feedback)

    def decode(self, part: int, payload: torch.Tensor, sender: str) -> torch.Tensor:
        """The values of a pseudo-gradient's payload, all finite. Raises PoisonError."""
        return self._decoded(part, payload, sender, self._coding.of(self._space.parts[part]))

    def decode_mean(self, part: int, payload: torch.Tensor, reducer: str) -> Mean:
        """Of a mean as all get it. Raises PoisonError."""
        codec = self._coding.of_mean(self._space.parts[part])
        return Mean(self._decoded(part, payload, reducer, codec), payload, part_digest(payload))

    def overflow(
        self, part: int, payloads: Sequence[torch.Tensor], senders: Sequence[str], error: NonFiniteError
    ) -> PoisonError:
        """Whom to blame for a mean that is not finite although all that entered it was: the largest of them."""
        sizes = {
            name: self.decode(part, payload, name)[error.index].abs().item()
            for payload, name in zip(payloads, senders, strict=True)
        }
        peer = max(sizes, key=lambda name: sizes[name])
        name = self._name(part, error.index)
        return PoisonError(peer, f"{sizes[peer]} for {name!r}, which makes the mean {error.value}")

    def _coded(self, part: int, values: torch.Tensor, codec: Codec, feedback: Feedback | None) -> torch.Tensor:
        if feedback is None or not self._coding.keeps(self._space.parts[part]):
            return codec.encode(values)
        return feedback.encode(part, values, codec)

    def _decoded(self, part: int, payload: torch.Tensor, sender: str, codec: Codec) -> torch.Tensor:
        bounds = self._space.parts[part]
        try:
            values = codec.decode(payload, bounds.num_elements)
            if (index := first_negative(values, bounds.kind)) is not None:
                raise MessageError(f"a second moment of {values[index]}; none is below 0")
            return values
        except MessageError as error:
            first, last = self._space.name_at(bounds.start), self._space.name_at(bounds.stop - 1)
            inside = f"{first!r}" if first == last else f"{first!r} to {last!r}"
            raise PoisonError(sender, f"a payload of {inside} that is refused: {error}") from None

    def _name(self, part: int, index: int) -> str:
        """The parameter that holds the element."""
        return self._space.name_at(self._space.parts[part].start + index)


def first_negative(values: torch.Tensor, kind: Kind) -> int | None:
    """Where second moments first hold a negative value, whose root a step would take; None: nowhere."""
    if kind != "exp_avg_sq" or values.numel() == 0 or values.min() >= 0:
        return None
    found = (values < 0).nonzero()
    return int(found[0]) if len(found) else None
