"""The progress of an island since the last commit, and the state that it resumes from after a
stop.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Inner steps and tokens that are not in a committed round yet."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(self.steps + other.steps, self.tokens + other.tokens)


NO_PROGRESS = Progress()


@dataclass(frozen=True)
class ResumePoint:
    """The position of an island within a round, at a time without a round in flight."""

    steps: int
    """Number of the round's inner steps that are done."""
    made: Progress
    """Progress since the last launch. If it was re-based on another island's state, it has more
    than `steps` steps."""


@dataclass(frozen=True)
class ResumedState:
    """The state of an island after it has loaded a checkpoint."""

    inner_step: int
    round: int
    digest: str
    point: ResumePoint
    tokens: int
    """Number of tokens that this island has trained on."""
    changed: list[str]
    """One line for each key of the run's config that differs from the saved config."""
