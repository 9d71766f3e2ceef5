"""How far an island is: beyond its last commit, and what it goes on from after a stop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What an island has done that no committed round has."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(self.steps + other.steps, self.tokens + other.tokens)


NOTHING = Progress()


@dataclass(frozen=True)
class Place:
    """Where in a round an island is, with no round on its way."""

    steps: int
    """Inner steps made of the round."""
    made: Progress
    """Since the last round was sent: more steps than that when progress was put on top of others' state."""


@dataclass(frozen=True)
class Resumed:
    """What an island goes on from."""

    inner_step: int
    round: int
    digest: str
    place: Place
    tokens: int
    """Trained on by this island."""
    changed: list[str]
    """Keys of the run's config that have changed since."""
