"""The part of the model that a pipeline stage holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """The part of the model in one (virtual) pipeline stage."""

    index: int
    layers: range
    """Numbers of the stage's layers in the whole model."""
    is_first: bool
    """Whether the stage has the embedding."""
    is_last: bool
    """Whether the stage has the final norm, the head and the loss."""
