"""An island's replica of the model: global params spread over its ranks as parts, and the local
params they train.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from outer.codecs.choice import build_codec_choice, build_space
from outer.config import OuterConfig
from outer.leases.ledger import Ledger, Terms, begin_ledger
from outer.merges.geometry import sum_of_squares
from outer.reduce.payloads import Mean
from outer.space.digest import combine_digests, state_digest
from outer.space.fragments import build_claims
from outer.space.ranks import RankGroup
from outer.space.redistribute import Params, Redistribution
from outer.state.global_state import GlobalState
from outer.state.part_state import PartState, Position
from outer.state.pseudo_gradient import Snapshot


class Replica:
    """One rank's part of the replica. Every rank of the island builds it and calls each method in
    the same order.

    `commit` and `go_back` may run in another thread while local params are trained; they must be
    over before the next call. The methods that change local params treat the progress made since
    the round was launched in different ways, but averaged buffers always become the global ones:

        merge        local = mix x local + (1 - mix) x global    after a round to which this island
                     contributed
        correct      local += global - ahead                     the same, when `look_ahead` was
                     called at the launch
        carry_over   local += global now - global then           after rounds that this island
                     observed
        take_over    local = global                              progress is in the commit, or
                     dropped
        rebase       local = global - progress                   after another island's state was
                     taken
    """

    def __init__(
        self,
        config: OuterConfig,
        params: Params,
        ranks: RankGroup,
        terms: Terms | None = None,
        experts_per_token: int = 0,
    ) -> None:
        """Build the replica. `terms` are the terms of the leases. None: a run without stages and
        without data of single islands. `experts_per_token`: see `LoopSettings`.
        """
        self.ranks = ranks
        self._has_observers = config.wait_for == "quorum"
        self.codecs = build_codec_choice(config)
        """The codec of each part. All that encode or decode on this rank use this one choice."""
        self.claims = build_claims(params.specs, config, experts_per_token)
        """What islands claim about their experts; None: nothing."""
        self.space = build_space(params.specs, config, self.codecs)
        self.redistribution = Redistribution(self.space, params, ranks)
        replaced = [part.index for part in self.space.parts if part.is_replaced]
        own = [part.index for part in self.space.parts if not part.is_committed]
        gathered = self.redistribution.gather()
        self.carried = GlobalState(gathered, config.optimizer, config.start_islands, replaced, own)
        """Global params and outer momentum of the parts that this rank carries."""
        self.terms = terms or Terms(inner_steps=config.inner_steps)
        # Gossip has no commit of all islands, so there is no common ledger from which to lease
        # data.
        ledger = Ledger() if config.gossip else begin_ledger(config.start_islands, self.terms)
        self.carried.position = Position(round=0, tokens=0, ledger=ledger)
        self.digest = self._compute_digest(ranks)
        """Digest of the committed state of all ranks, ledger included; `commit`, `go_back`,
        `replace` and `restore` change it.
        """

    @property
    def position(self) -> Position:
        """The number of rounds and tokens committed, and the data ledger."""
        return self.carried.position

    def pseudo_grads(self, round_number: int | None = None) -> dict[int, torch.Tensor]:
        """Return this rank's parts of the pseudo-gradient, fp32, by index: the parts that the
        round sends, or all (None). Joiners get the island's own buffers as they are now.
        """
        self.carried.show(self.redistribution.gather(self.space.part_groups_of("donor_buffer")))
        groups = None if round_number is None else self.space.part_groups_in(round_number)
        return self.carried.pseudo_grads(self.redistribution.gather(groups))

    def norm(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Return the L2 norm over the parts of all ranks, without moments and buffers."""
        return sum(self.ranks.background.gather(self.sum_of_squares(pseudo_grads))) ** 0.5

    def squares(self, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[str, float]:
        """Return the squared L2 norms of these parts of this rank, by kind of tensor."""
        kinds = {self.space.parts[index].kind: 0.0 for index in pseudo_grads}
        for index, grad in pseudo_grads.items():
            kinds[self.space.parts[index].kind] += sum_of_squares(grad)
        return dict(kinds)

    def sum_of_squares(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Return the squared L2 norm of these parts of this rank, without moments and buffers."""
        own = [
            grad for index, grad in pseudo_grads.items() if not self.space.parts[index].is_replaced
        ]
        return sum(map(sum_of_squares, own))

    def commit(
        self, means: Mapping[int, Mean], position: Position, num_given: int, *, observes: bool
    ) -> None:
        """Make one outer step on the parts in `means`, each the mean of `num_given` islands. Local
        params do not change.

        `observes`: this island contributed nothing; the caller must call `carry_over` next.
        """
        values = {index: mean.values for index, mean in means.items()}
        payloads = {index: mean.payload for index, mean in means.items()}
        self.carried.commit(
            values,
            position,
            payloads,
            num_given,
            keeps_bases=observes,
            digests=_digests_after(means),
        )
        self.digest = self._compute_digest(self.ranks.background)

    def digest_after(self, means: Mapping[int, Mean], position: Position) -> str:
        """Return the value of `digest` after a `commit` of these means, which contain the
        digests of their parts after it.
        """
        digests = self.carried.digests() | _digests_after(means)
        return state_digest(self.combine(digests, self.ranks.background), position.ledger.text)

    def go_back(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Make parts of an earlier state the newest one. Local params do not change: call
        `take_over` next.
        """
        self.carried.replace(parts, position)
        self.digest = self._compute_digest(self.ranks.background)

    def merge(self, round_number: int, mix: float) -> None:
        """Set local params and moments that the round sent to mix x local + (1 - mix) x global, and
        buffers to the global ones.
        """
        mixed, buffers = self._groups_in(round_number)
        if mix < 1:
            self.redistribution.scatter(self.carried.parts, mixed, mix)
        self.redistribution.scatter(self.carried.parts, buffers)

    def look_ahead(self, snapshot: Snapshot, share: float) -> dict[int, torch.Tensor]:
        """Set the fragment's local params to the global params after an outer step on this island's
        `share` alone.

        Returns the new values by carried part, for `correct`. No round may be in flight. Local
        buffers stay as they are.
        """
        grads = {
            i: grad
            for i, grad in snapshot.pseudo_grads.items()
            if not self.space.parts[i].is_replaced
        }
        ahead = {i: self.carried.preview(i, grad * share) for i, grad in grads.items()}
        self.redistribution.scatter(ahead, self._groups_in(snapshot.round)[0])
        return ahead

    def correct(self, ahead: Mapping[int, torch.Tensor], round_number: int) -> None:
        """Move local params that were trained from `ahead` as if they had been trained from the
        global params. Buffers become the global ones.
        """
        groups, buffers = self._groups_in(round_number)
        local = self.redistribution.gather(groups)
        moved = {i: values + (self.carried.parts[i] - ahead[i]) for i, values in local.items()}
        self.redistribution.scatter(moved, groups)
        self.redistribution.scatter(self.carried.parts, buffers)

    def carry_over(self, round_number: int) -> None:
        """Move local params that the round sent onto the current global params, keeping the
        progress made before. Buffers become the global ones.

        Rounds may be committed at the same time. Without a commit since the last call params do not
        change.
        """
        groups, buffers = self._groups_in(round_number)
        self.redistribution.scatter(
            self.carried.carry_over(self.redistribution.gather(groups)), groups
        )
        self._take_over(buffers)

    def take_over(self, round_number: int | None = None) -> None:
        """Set local params and buffers that the round sent, or all (None), to the current global
        ones.
        """
        own = self.space.part_groups_of("donor_buffer")
        everything = [group for group in range(len(self.space.part_groups)) if group not in own]
        self._take_over(
            everything if round_number is None else self.space.part_groups_in(round_number)
        )

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

        Local moments and the island's own buffers are set to those in `pseudo_grads`, averaged
        buffers to the global ones.
        """
        local = self.carried.local_values(pseudo_grads)
        buffers = {i: self.carried.parts[i] for i in local if self.space.parts[i].kind == "buffer"}
        self.redistribution.scatter(local | buffers)

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Let local params and averaged buffers hold the current global ones inside the context.
        Rounds may be committed at the same time.
        """
        groups = self.space.model_part_groups
        local = self.redistribution.gather(groups)
        now = self.carried.copies() if self._has_observers else self.carried.parts
        self.redistribution.scatter(now, groups)
        try:
            yield
        finally:
            self.redistribution.scatter(local, groups)

    def combine(self, digests_by_part: dict[int, bytes], ranks: RankGroup) -> str:
        """Return one digest over the parts of all ranks, in part order."""
        merged = {
            i: digest for digests in ranks.gather(digests_by_part) for i, digest in digests.items()
        }
        return combine_digests([merged[i] for i in sorted(merged)])

    def _groups_in(self, round_number: int) -> tuple[list[int], list[int]]:
        """Return the part groups that a round sends: those of params and moments, and those of
        buffers.
        """
        sent = self.space.part_groups_in(round_number)
        buffers = self.space.part_groups_of("buffer")
        return [group for group in sent if group not in buffers], [
            group for group in sent if group in buffers
        ]

    def _take_over(self, groups: Sequence[int]) -> None:
        carried = [
            i for group in groups for i in self.space.parts_in[group] if i in self.carried.parts
        ]
        self.redistribution.scatter(self.carried.take_over(carried), groups)

    def _compute_digest(self, ranks: RankGroup) -> str:
        return state_digest(
            self.combine(self.carried.digests(), ranks), self.carried.position.ledger.text
        )


def _digests_after(means: Mapping[int, Mean]) -> dict[int, bytes]:
    return {
        index: mean.digest_after for index, mean in means.items() if mean.digest_after is not None
    }
