"""Memory for parts and payloads that is used again round after round.

    values = BUFFERS.floats(1000)     nobody else refers to this memory
    del values                        the next request for 4000 bytes gets it

A tensor of a part's size is otherwise given back to the system, or kept in one of the C library's pools for each
thread: each round then waits for fresh pages, and a process holds twice the memory that its tensors have. Parts have
few sizes, so memory of one size is kept for the next request of this size. It is free when no tensor, view or numpy
array refers to it any more; nobody has to give it back, so none can be given to two owners.
"""

import weakref
from collections import defaultdict

import numpy as np
import torch


class Buffers:
    """Hands out CPU tensors whose values are not initialised. Any thread may ask, and may drop what it has got."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def floats(self, num_elements: int) -> torch.Tensor:
        """A 1-D fp32 tensor."""
        return self.bytes(4 * num_elements).view(torch.float32) if num_elements else torch.empty(0)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor."""
        free = self._free[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        lease = memory[:]  # Tensors, and views of them, refer to this array; `memory` itself outlives it.
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.from_numpy(lease)


BUFFERS = Buffers()
"""The buffers of this process; islands that share it share them."""
