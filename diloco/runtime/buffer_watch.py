"""Notices buffers of a user's model that change during training and that nobody has named, so that
each island has its own.
"""

import logging
from collections.abc import Iterable

from torch.distributed.tensor import DTensor

from inner.model.buffers import Buffer
from outer.space.digest import part_digest

log = logging.getLogger(__name__)

NAMED = 4
"""Most buffers that the warning names."""
LOOKS = 8
"""Number of rounds in which buffers are compared. One that training changes has changed by then."""


class BufferWatch:
    """Compares buffers of floating point with what they were when the watch was made."""

    def __init__(self, buffers: Iterable[Buffer], cure: str) -> None:
        """Look at the buffers. `cure` says how they are named, and is a part of the warning."""
        self._digests = [(buffer, _digest(buffer)) for buffer in buffers if _can_be_watched(buffer)]
        self._cure = cure
        self._looks_left = LOOKS

    def warn_of_changes(self) -> None:
        """Log a warning if buffers have changed, once. Call it after each round."""
        if self._looks_left == 0:
            return
        self._looks_left -= 1
        # The count of a tensor's writes does not tell: batch_norm writes its statistics without
        # counting.
        changed = [buffer.name for buffer, digest in self._digests if _digest(buffer) != digest]
        if changed:
            self._looks_left = 0
            more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
            log.warning(
                "buffers of the model change during training, and each island has its own: %s%s. "
                "If they should be the same, %s",
                ", ".join(changed[:NAMED]),
                more,
                self._cure,
            )


def _digest(buffer: Buffer) -> bytes:
    return part_digest(buffer.tensor.cpu())


def _can_be_watched(buffer: Buffer) -> bool:
    tensor = buffer.module.get_buffer(buffer.attribute)
    return tensor.is_floating_point() and not tensor.is_meta and not isinstance(tensor, DTensor)
