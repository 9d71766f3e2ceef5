"""Memory for parts and payloads that is used again round after round.

    values = BUFFERS.floats(1000)     this memory has no other user
    del values                        the next request for 4000 bytes gets it

Otherwise a tensor of a part's size is returned to the system, or kept in a memory pool of the C
library, one per thread: each round then waits for fresh pages, and a process holds twice the memory
that its tensors have. Parts have few sizes, so memory of one size is kept for the next request of
this size. It is free when no tensor, view or numpy array refers to it any more. It is never
returned explicitly, so no memory can get two owners.
"""

import weakref
from collections import defaultdict

import numpy as np
import torch


class Buffers:
    """Provides CPU tensors whose values are not initialised. Any thread may request them and
    drop them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def floats(self, num_elements: int) -> torch.Tensor:
        """Return a 1-D fp32 tensor."""
        return self.bytes(4 * num_elements).view(torch.float32) if num_elements else torch.empty(0)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Return a 1-D uint8 tensor."""
        free = self._free[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        lease = memory[:]  # Tensors and their views refer to this array; `memory` outlives it.
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.from_numpy(lease)


BUFFERS = Buffers()
"""The buffers of this process. Islands in one process share them."""
