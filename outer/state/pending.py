"""What an island has done that no committed round has: by tokens of each fragment, and by the units of text read."""

from outer.island_state import IslandState, Snapshot
from outer.reading import Reading
from outer.runs import count
from outer.state import Position


class Unsent:
    """Of one rank; every rank of the island makes the same calls."""

    def __init__(self, held: IslandState, reading: Reading, num_fragments: int) -> None:
        self._held, self.reading = held, reading
        self.weights = [0] * num_fragments
        """By fragment: tokens trained since it was sent last, up to the last round that landed."""

    def snapshot(self, number: int, tokens: int) -> Snapshot:
        """What is sent with the round, `tokens` after the last one that landed. Collective."""
        fragment = self._held.space.fragment_of(number)
        pseudo_grads = self._held.pseudo_grads(number)
        norm = self._held.norm(pseudo_grads)
        return Snapshot(
            number, fragment, pseudo_grads, norm, tokens, self.weights[fragment] + tokens, self.reading.read
        )

    def landed(self, snapshot: Snapshot, position: Position) -> None:
        """A commit that has led to this position contains the snapshot."""
        self.reading.settle(position.account, count(snapshot.units))
        self.weights = [weight + snapshot.tokens for weight in self.weights]
        self.weights[snapshot.fragment] = 0

    def drop(self, position: Position) -> None:
        """It is given up: what was read will be read again, here or elsewhere."""
        self.reading.begin(position.account)
        self.weights = [0] * len(self.weights)
