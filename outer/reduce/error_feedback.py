"""Error feedback: what coding lost of a part is kept, and sent with the next one (SparseLoCo, 2508.15706).

    a = value + decay * e      the payload codes a, and decodes to s
    e <- a - s                 when the round commits; never before

An island keeps two kinds: of its own pseudo-gradients, and of the means that it encodes as their reducer. They belong
to this island and these elements: a joiner begins without any, and they follow parts when an island's mesh changes.
"""

from collections.abc import Mapping

import torch

from outer.codecs.base import Codec


class Feedback:
    """Residuals by part (1-D fp32) of one rank; parts of one attempt may be worked on by several threads."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._kept: dict[int, torch.Tensor] = {}
        self._tried: dict[int, torch.Tensor] = {}

    def encode(self, part: int, values: torch.Tensor, codec: Codec) -> torch.Tensor:
        """The payload of `values` and what was lost before; what it loses is noted. Raises NonFiniteError."""
        wanted = self.add(part, values)
        payload = codec.encode(wanted)
        self.note(part, wanted, codec.decode(payload, wanted.numel()))
        return payload

    def add(self, part: int, values: torch.Tensor) -> torch.Tensor:
        """`values` and what was lost before; `values` itself when nothing was."""
        kept = self._kept.get(part)
        return values if kept is None else values + kept * self._decay

    def note(self, part: int, wanted: torch.Tensor, sent: torch.Tensor) -> None:
        """This attempt sends `sent` for `wanted`; a later attempt's note replaces it."""
        self._tried[part] = wanted - sent

    def commit(self) -> None:
        """The attempt's round is committed: what it sent has arrived."""
        self._kept |= self._tried
        self._tried.clear()

    def drop(self) -> None:
        """The attempt has come to nothing."""
        self._tried.clear()

    def clear(self) -> None:
        """The history that the residuals belong to does not survive."""
        self._kept.clear()
        self._tried.clear()

    @property
    def residuals(self) -> Mapping[int, torch.Tensor]:
        """By part, as the last commit left them; do not write to them."""
        return self._kept

    def load(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Go on with these (1-D fp32, of the parts that this rank carries now)."""
        self._kept = dict(residuals)
        self._tried.clear()
