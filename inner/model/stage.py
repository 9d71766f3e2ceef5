"""The slice of the model that a pipeline stage holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Contents of one (virtual) pipeline stage."""

    index: int
    layers: range
    """Global layer numbers."""
    is_first: bool
    """Whether the stage has the embedding."""
    is_last: bool
    """Whether the stage has the final norm, the head and the loss."""
