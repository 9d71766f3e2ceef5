"""How a single integer stores a token id and whether the token is a target.

id >= 0          read by the model, and a target of the loss
CONTEXT - id     read by the model, but not a target: a user's words
IGNORE           not read and not a target: padding
"""

import numpy as np

IGNORE = -100
"""The target of a position without a next token. The loss ignores it, as torch's cross_entropy
does."""
CONTEXT = IGNORE - 1
DTYPE = "int32"
"""Type of coded ids on disk. The ids of plain text are not coded."""


def as_context(ids: np.ndarray) -> np.ndarray:
    """Return the ids coded as context, which the model reads but does not learn, int32."""
    return CONTEXT - ids.astype(np.int32)


def count_learned(coded: np.ndarray) -> int:
    """Return the number of coded ids that are targets."""
    return int((coded >= 0).sum())
