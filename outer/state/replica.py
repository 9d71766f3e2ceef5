"""An island's replica of the model: global params spread over its ranks as parts, and the local params they train."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from outer.codecs.choice import build_codec_choice, build_space
from outer.config import OuterConfig
from outer.leases.ledger import Ledger, Terms, begin_ledger
from outer.merges.geometry import sum_of_squares
from outer.reduce.payloads import Mean
from outer.space.digest import combine_digests, state_digest
from outer.space.ranks import RankGroup
from outer.space.redistribute import Params, Redistribution
from outer.state.global_state import GlobalState
from outer.state.part_state import PartState, Position
from outer.state.pseudo_gradient import Snapshot


class Replica:
    """One rank's part of the replica. Every rank of the island builds it and calls each method in the same order.

    `commit` and `go_back` may run in another thread while local params are trained; they must be over before the next
    call. The methods that change local params treat the progress made since the round was launched in different ways:

        merge        local = mix x local + (1 - mix) x global    after a round to which this island contributed
        correct      local += global - ahead                     the same, when `look_ahead` was called at the launch
        carry_over   local += global now - global then           after rounds that this island observed
        take_over    local = global                              progress is in the commit, or dropped
        rebase       local = global - progress                   after another island's state was taken
    """

    def __init__(self, config: OuterConfig, params: Params, ranks: RankGroup, terms: Terms | None = None) -> None:
        """Build the replica. `terms` are the terms of the leases. None: a run without stages and
        without data of single islands.
        """
        self.ranks = ranks
        self._has_observers = config.wait_for == "quorum"
        self.codecs = build_codec_choice(config)
        """The codec of each part. All that encode or decode on this rank use this one choice."""
        self.space = build_space(params.specs, config, self.codecs)
        self.redistribution = Redistribution(self.space, params, ranks)
        moments = [part.index for part in self.space.parts if part.is_moment]
        self.carried = GlobalState(self.redistribution.gather(), config.optimizer, config.start_islands, moments)
        """Global params and outer momentum of the parts that this rank carries."""
        self.terms = terms or Terms(inner_steps=config.inner_steps)
        # Gossip has no commit of all islands, so there is no common ledger from which to lease
        # data.
        ledger = Ledger() if config.gossip else begin_ledger(config.start_islands, self.terms)
        self.carried.position = Position(round=0, tokens=0, ledger=ledger)
        self.digest = self._compute_digest(ranks)
        """Digest of the committed state of all ranks, ledger included; `commit`, `go_back`, `replace` and `restore`
        change it."""

    @property
    def position(self) -> Position:
        """The number of rounds and tokens committed, and the data ledger."""
        return self.carried.position

    def pseudo_grads(self, round_number: int | None = None) -> dict[int, torch.Tensor]:
        """Return this rank's parts of the pseudo-gradient, fp32, by index: the parts that the
        round sends, or all (None).
        """
        groups = None if round_number is None else self.space.part_groups_in(round_number)
        return self.carried.pseudo_grads(self.redistribution.gather(groups))

    def norm(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Return the L2 norm over the parts of all ranks, without moments."""
        return sum(self.ranks.background.gather(self.sum_of_squares(pseudo_grads))) ** 0.5

    def squares(self, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[str, float]:
        """Return the squared L2 norms of these parts of this rank, by kind of tensor."""
        kinds = {self.space.parts[index].kind: 0.0 for index in pseudo_grads}
        for index, grad in pseudo_grads.items():
            kinds[self.space.parts[index].kind] += sum_of_squares(grad)
        return dict(kinds)

    def sum_of_squares(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Return the squared L2 norm of these parts of this rank, without moments."""
        own = [grad for index, grad in pseudo_grads.items() if not self.space.parts[index].is_moment]
        return sum(map(sum_of_squares, own))

    def commit(self, means: Mapping[int, Mean], position: Position, num_given: int, *, observes: bool) -> None:
        """Make one outer step on the parts in `means`, each the mean of `num_given` islands. Local
        params do not change.

        `observes`: this island contributed nothing; the caller must call `carry_over` next.
        """
        values = {index: mean.values for index, mean in means.items()}
        payloads = {index: mean.payload for index, mean in means.items()}
        self.carried.commit(values, position, payloads, num_given, keeps_bases=observes, digests=_digests_after(means))
        self.digest = self._compute_digest(self.ranks.background)

    def digest_after(self, means: Mapping[int, Mean], position: Position) -> str:
        """Return the value of `digest` after a `commit` of these means, which contain the
        digests of their parts after it.
        """
        digests = self.carried.digests() | _digests_after(means)
        return state_digest(self.combine(digests, self.ranks.background), position.ledger.text)

    def go_back(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Make parts of an earlier state the newest one. Local params do not change: call `take_over` next."""
        self.carried.replace(parts, position)
        self.digest = self._compute_digest(self.ranks.background)

    def merge(self, round_number: int, mix: float) -> None:
        """Set local params and moments that the round sent to mix x local + (1 - mix) x global."""
        if mix < 1:
            self.redistribution.scatter(self.carried.parts, self.space.part_groups_in(round_number), mix)

    def look_ahead(self, snapshot: Snapshot, share: float) -> dict[int, torch.Tensor]:
        """Set the fragment's local params to the global params after an outer step on this island's `share` alone.

        Returns the new values by carried part, for `correct`. No round may be in flight.
        """
        ahead = {i: self.carried.preview(i, grad * share) for i, grad in snapshot.pseudo_grads.items()}
        self.redistribution.scatter(ahead, self.space.part_groups_in(snapshot.round))
        return ahead

    def correct(self, ahead: Mapping[int, torch.Tensor], round_number: int) -> None:
        """Move local params that were trained from `ahead` as if they had been trained from the
        global params.
        """
        groups = self.space.part_groups_in(round_number)
        local = self.redistribution.gather(groups)
        moved = {i: values + (self.carried.parts[i] - ahead[i]) for i, values in local.items()}
        self.redistribution.scatter(moved, groups)

    def carry_over(self, round_number: int) -> None:
        """Move local params that the round sent onto the current global params, keeping the progress made before.

        Rounds may be committed at the same time. Without a commit since the last call nothing changes.
        """
        groups = self.space.part_groups_in(round_number)
        self.redistribution.scatter(self.carried.carry_over(self.redistribution.gather(groups)), groups)

    def take_over(self, round_number: int | None = None) -> None:
        """Set local params that the round sent, or all (None), to the current global params."""
        groups = range(len(self.space.part_groups)) if round_number is None else self.space.part_groups_in(round_number)
        carried = [i for group in groups for i in self.space.parts_in[group] if i in self.carried.parts]
        self.redistribution.scatter(self.carried.take_over(carried), groups)

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Continue from another island's state, which replaces the global state, local params
        and local moments.
        """
        self.restore(parts, position)
        self.redistribution.scatter(self.carried.parts)

    def restore(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Continue from a saved global state. Local params do not change."""
        self.carried.replace(parts, position)
        self.digest = self._compute_digest(self.ranks)

    def rebase(self, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Set local params to the global params minus these parts, which puts progress on top of a
        newer state.

        Local moments are set to the moments in `pseudo_grads`.
        """
        self.redistribution.scatter(self.carried.local_values(pseudo_grads))

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Let local params hold the current global params inside the context. Rounds may be
        committed at the same time.
        """
        local = self.redistribution.gather(self.space.param_part_groups)
        now = self.carried.copies() if self._has_observers else self.carried.parts
        self.redistribution.scatter(now, self.space.param_part_groups)
        try:
            yield
        finally:
            self.redistribution.scatter(local, self.space.param_part_groups)

    def combine(self, digests_by_part: dict[int, bytes], ranks: RankGroup) -> str:
        """Return one digest over the parts of all ranks, in part order."""
        merged = {i: digest for digests in ranks.gather(digests_by_part) for i, digest in digests.items()}
        return combine_digests([merged[i] for i in sorted(merged)])

    def _compute_digest(self, ranks: RankGroup) -> str:
        return state_digest(self.combine(self.carried.digests(), ranks), self.carried.position.ledger.text)


def _digests_after(means: Mapping[int, Mean]) -> dict[int, bytes]:
    return {index: mean.digest_after for index, mean in means.items() if mean.digest_after is not None}
