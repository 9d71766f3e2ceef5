"""Notices buffers of a user's model that change during training and that nobody has named, so that each
island has its own.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.model.buffers import Buffer
from outer.space.digest import part_digest

log = logging.getLogger(__name__)

NAMED = 4
"""Most buffers that the warning names."""


class BufferWatch:
    """Compares buffers of floating point with what they were when the watch was made."""

    def __init__(self, buffers: Iterable[Buffer], cure: str) -> None:
        """Look at the buffers. `cure` says how they are named, and is a part of the warning."""
        self._seen = [_look_at(buffer) for buffer in buffers if _can_be_watched(buffer)]
        self._cure = cure
        self._is_told = False

    def warn_of_changes(self) -> None:
        """Log a warning if buffers have changed, once."""
        if self._is_told:
            return
        changed = [seen.buffer.name for seen in self._seen if seen.has_changed()]
        if changed:
            self._is_told = True
            more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
            log.warning(
                "buffers of the model change during training, and each island has its own: %s%s. If they should be "
                "the same, %s",
                ", ".join(changed[:NAMED]),
                more,
                self._cure,
            )


@dataclass
class _Seen:
    """A buffer as it was when the watch was made."""

    buffer: Buffer
    tensor: Tensor
    version: int
    digest: bytes

    def has_changed(self) -> bool:
        """Return whether its values differ. They are read only if it was written since the last look."""
        tensor = self.buffer.tensor
        if tensor is self.tensor and tensor._version == self.version:
            return False
        self.tensor = tensor
        self.version = tensor._version
        return part_digest(tensor.cpu()) != self.digest


def _look_at(buffer: Buffer) -> _Seen:
    return _Seen(buffer, buffer.tensor, buffer.tensor._version, part_digest(buffer.tensor.cpu()))


def _can_be_watched(buffer: Buffer) -> bool:
    tensor = buffer.module.get_buffer(buffer.attribute)
    return tensor.is_floating_point() and not tensor.is_meta and not isinstance(tensor, DTensor)
