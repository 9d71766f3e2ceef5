"""Error feedback: the coding error of a part is kept and sent with the part's next payload
(SparseLoCo, 2508.15706).

    a = value + decay * e      the payload encodes a, and decodes to s
    e <- a - s                 when the round commits, never before

An island keeps residuals e of its own pseudo-gradients, and of the means that it encodes as their
reducer. They belong to one island and its parts: a joiner starts without any, and they follow the
parts when an island's mesh changes.
"""

from collections.abc import Mapping

import torch

from outer.codecs.base import Codec


class ErrorFeedback:
    """Residuals (1-D fp32, by part) of one rank. Several threads may encode different parts of one
    attempt.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._residuals: dict[int, torch.Tensor] = {}
        self._pending: dict[int, torch.Tensor] = {}

    def encode(self, part: int, values: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Encode `values` plus the part's residual, and store the new residual as pending.
        Raises NonFiniteError.
        """
        residual = self._residuals.get(part)
        wanted = values if residual is None else values + residual * self._decay
        payload = codec.encode(wanted)
        self._pending[part] = wanted - codec.decode(payload, wanted.numel())
        return payload

    def commit(self) -> None:
        """Adopt the residuals of the last attempt, because its round has committed."""
        self._residuals |= self._pending
        self._pending.clear()

    def drop(self) -> None:
        """Forget the residuals of an attempt that did not commit."""
        self._pending.clear()

    def clear(self) -> None:
        """Forget all residuals, because the island has taken over another history."""
        self._residuals.clear()
        self._pending.clear()

    @property
    def residuals(self) -> Mapping[int, torch.Tensor]:
        """The residuals by part as of the last commit. Must not be changed."""
        return self._residuals

    def load(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Continue with these residuals (1-D fp32) of the parts that this rank carries now."""
        self._residuals = dict(residuals)
        self._pending.clear()
