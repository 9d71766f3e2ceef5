"""Support for tests of rounds that wait for a quorum: islands that make their inner steps when they
are told to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outer.loop import build_quorum_rounds
from outer.rounds.quorum import CommittedRound, QuorumRounds
from tests.outer.islands import GUARD_SECONDS, Island
from tests.outer.streams import TOKENS


@dataclass
class Trainee:
    """An island's life, with fake inner steps: what diloco/island_rounds/of_quorum.py does."""

    island: Island
    step_seconds: float = 0.001
    """As the island says of itself; the grace follows from it."""
    made: int = 0
    """Tokens since it gave last."""
    num_steps: int = 0
    heard: list[CommittedRound] = field(default_factory=list)
    rounds: QuorumRounds = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = build_quorum_rounds(self.island.outer, None)

    def begin(self) -> None:
        self.island.outer.begin()
        self.rounds.start()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Train and give until it is so; looked at after each inner step and each round."""
        while not is_over():
            self.turn()

    def turn(self) -> None:
        """One inner step, or what it gives when that is due."""
        if self.rounds.is_due():
            self.take(self.rounds.contribute(self.made))
        else:
            self.step()
            self.land()

    def step(self) -> None:
        self.island.train(self.num_steps)
        self.num_steps += 1
        self.island.outer.pace.observe_step(self.step_seconds)
        self.made += TOKENS[self.island.name]

    def land(self) -> None:
        for heard in self.rounds.land(self.made):
            self.take(heard)

    def take(self, heard: CommittedRound) -> None:
        self.heard.append(heard)
        if heard.is_given:
            self.made = 0

    def wait_for_round(self, number: int) -> None:
        """As many rounds as that are committed here, by the others; what has not landed still waits
        to.
        """
        rounds = self.rounds
        with rounds._changed:
            assert rounds._changed.wait_for(
                lambda: self.round + len(rounds._committed) >= number or rounds._has_ended,
                GUARD_SECONDS,
            )

    @property
    def round(self) -> int:
        """Rounds that have landed."""
        return self.rounds.position.round

    @property
    def digests(self) -> list[str]:
        return [heard.landing.reports[-1].digest for heard in self.heard]

    def global_params(self) -> torch.Tensor:
        with self.island.outer.global_params():
            return self.island.params.flat()
