"""The progress of an island that is in no committed round yet: tokens by fragment, tokens by group
of experts, and units of data.
"""

from collections.abc import Sequence
from dataclasses import replace

from outer.leases.cursor import Cursor
from outer.leases.ranges import count
from outer.space.experts import ExpertGroup
from outer.state.part_state import Position
from outer.state.pseudo_gradient import Snapshot
from outer.state.replica import Replica


class PendingProgress:
    """One rank's record of pending progress. Every rank of the island makes the same calls in
    the same order.
    """

    def __init__(
        self, replica: Replica, cursor: Cursor, num_fragments: int, max_tokens: int
    ) -> None:
        """Create an empty record. `max_tokens`: the most tokens that any island may claim for
        one round.
        """
        self._replica = replica
        self.cursor = cursor
        self._max_tokens = max_tokens
        self.weights = [0] * num_fragments
        """Tokens trained on since each fragment was last sent, up to the last round that landed."""
        self._claims = claims = replica.claims
        self.expert_weights = [0] * num_fragments
        """The same, since each fragment's experts were last sent."""
        groups = () if claims is None else claims.groups.values()
        self.counted: dict[ExpertGroup, int] = {
            group: 0 for of_fragment in groups for group in of_fragment
        }
        """How often each group of experts was chosen since it was last sent, up to the last inner
        step.
        """

    def count_routed(self, layers: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """Add what an inner step's tokens chose: for each of the layers, the number of choices of
        each expert over all ranks.
        """
        of_layer = dict(zip(layers, counts, strict=True))
        for group in self.counted:
            self.counted[group] += group.count(of_layer[group.layer])

    def snapshot(self, round_number: int, tokens: int) -> Snapshot:
        """Return the contribution to the round, made on `tokens` tokens since the last round
        that landed. Collective.
        """
        replica = self._replica
        fragment = replica.space.fragment_of(round_number)
        pseudo_grads = replica.pseudo_grads(round_number)
        weight = self.weights[fragment] + tokens
        snapshot = Snapshot(round_number, fragment, pseudo_grads, tokens, weight, self.cursor.read)
        claims = self._claims
        if claims is None or not claims.sends(round_number):
            return snapshot
        of_experts = self.expert_weights[fragment] + tokens
        counted = {group: self.counted[group] for group in claims.groups.get(fragment, ())}
        claimed = claims.fill(round_number, counted, of_experts)
        return replace(snapshot, expert_tokens=of_experts, expert_counts=claimed, counted=counted)

    def settle(self, snapshot: Snapshot, position: Position) -> None:
        """Record the commit that led to this position and contains the snapshot."""
        self.cursor.settle(position.round, position.ledger, count(snapshot.units))
        self.weights = [weight + snapshot.tokens for weight in self.weights]
        self.weights[snapshot.fragment] = 0
        self.expert_weights = [weight + snapshot.tokens for weight in self.expert_weights]
        if self._claims is not None and self._claims.sends(snapshot.round):
            self.expert_weights[snapshot.fragment] = 0
        for group, number in snapshot.counted.items():
            self.counted[group] -= number

    def give_up(self, snapshot: Snapshot | None, position: Position) -> None:
        """Record a commit that went back to an earlier state, in which no progress counts.

        Units in the island's snapshot are not read again; units read since, or by an observer
        (None), are.
        """
        if snapshot is None:
            self.drop(position)
        else:
            self.settle(snapshot, position)
        self._forget()

    def keep(self, weight: int) -> bool:
        """Return whether progress made on `weight` tokens may count on top of the state that the
        replica has taken.

        It may if its data are still leased to the island, and if it fits into a later round
        together with that round.
        """
        return 2 * weight <= self._max_tokens and self.cursor.keep(self._replica.position.ledger)

    def drop(self, position: Position) -> None:
        """Drop the progress at this position. Its data will be read again, by this island or
        another.
        """
        self.cursor.begin(position.round, position.ledger)
        self._forget()

    def _forget(self) -> None:
        self.weights = [0] * len(self.weights)
        self.expert_weights = [0] * len(self.weights)
        self.counted = dict.fromkeys(self.counted, 0)
