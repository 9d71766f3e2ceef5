"""How one integer says what a token is for.

id >= 0          read by the model, and a target of the loss
CONTEXT - id     read by the model, and no target: a user's words
IGNORE           neither: padding
"""

import numpy as np

IGNORE = -100
"""The target of a position without a next token; the loss leaves it out, as torch's cross_entropy does."""
CONTEXT = IGNORE - 1
DTYPE = "int32"
"""Type of coded ids on disk. Ids of plain text are not coded."""


def as_context(ids: np.ndarray) -> np.ndarray:
    """Ids as those of tokens that are read and not learned, int32."""
    return CONTEXT - ids.astype(np.int32)


def count_learned(coded: np.ndarray) -> int:
    """Number of coded ids that are targets."""
    return int((coded >= 0).sum())
