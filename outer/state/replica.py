"""The global state of one island as a whole: parts spread over its ranks, in step with the local params."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outer.account import Account, Terms, reopen, to_json
from outer.coding import Coding
from outer.config import OuterConfig
from outer.digest import combine, seal
from outer.exchange import Exchange, Params
from outer.fragments import groups_of, with_moments
from outer.payloads import Mean
from outer.runs import Runs
from outer.space import Space
from outer.state import GlobalState, PartState, Position
from outer.team import Team


@dataclass(frozen=True)
class Snapshot:
    """What an island gives to a round: its rank's parts of the pseudo-gradient, fp32, of the round's fragment.

    Among them, in the rounds that are for it, parts of the fragment's moments, which are sent as they are.
    """

    round: int
    fragment: int
    pseudo_grads: dict[int, torch.Tensor]
    norm: float
    """Of all ranks' parts together, but for moments."""
    tokens: int
    """Trained since the last round was sent."""
    weight: int
    """Trained since the fragment was averaged last: what the pseudo-gradient stands for."""
    units: Runs
    """Of text, read since the last commit."""


class IslandState:
    """Built, and each method called, by every rank of the island in the same order.

    `commit` may run in a thread of its own while local params are trained; it is over before the next call.
    """

    def __init__(self, config: OuterConfig, coding: Coding, params: Params, team: Team) -> None:
        self._team = team
        self._has_listeners = config.wait_for == "quorum"
        groups = groups_of(params.specs, config, splits_fine=coding.splits_fine)
        self.space = Space(with_moments(params.specs, config), config.part_elements, coding.block_elements, groups)
        self.exchange = Exchange(self.space, params, team)
        moments = [part.index for part in self.space.parts if part.is_moment]
        self.mine = GlobalState(self.exchange.gather(), config.optimizer, config.start_islands, moments)
        """What this rank carries."""
        self.terms = Terms(inner_steps=config.inner_steps)
        # Where there is no commit of all, there is nothing to lease.
        account = Account() if config.gossip else reopen(Account(), config.start_islands, self.terms)
        self.mine.position = Position(round=0, tokens=0, account=account)
        self.digest = self._digest(team)
        """Of the committed state over all ranks, with its account; changes by `commit` and `replace`."""

    def pseudo_grads(self, round_number: int | None = None) -> dict[int, torch.Tensor]:
        """This rank's parts of the pseudo-gradient, fp32; of what a round sends, or None: of all."""
        groups = None if round_number is None else self.space.sent_in(round_number)
        return self.mine.pseudo_grads(self.exchange.gather(groups))

    def norm(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Of all ranks' parts together, but for moments."""
        own = [grad for index, grad in pseudo_grads.items() if not self.space.parts[index].is_moment]
        square = sum(float(grad.double().square().sum()) for grad in own)
        return sum(self._team.gather(square)) ** 0.5

    def commit(self, means: Mapping[int, Mean], position: Position, num_given: int, *, listens: bool) -> None:
        """One outer step of the parts in `means`, of so many islands. Local params stay as they are: see `merge`.

        `listens`: nothing of this island is in it, and `carry_over` comes.
        """
        values = {index: mean.values for index, mean in means.items()}
        payloads = {index: mean.payload for index, mean in means.items()}
        self.mine.commit(values, position, payloads, num_given, keeps_bases=listens)
        self.digest = self._digest(self._team.background)

    def merge(self, round_number: int, mix: float) -> None:
        """Local params and moments that the round sent become mix x local + (1 - mix) x global."""
        if mix < 1:
            self.exchange.scatter(self.mine.parts, self.space.sent_in(round_number), mix)

    def look_ahead(self, snapshot: Snapshot, share: float) -> dict[int, torch.Tensor]:
        """Local params of the fragment become global params after an outer step on this island's share alone.

        Returns what they became, by carried part, for `correct`. No round may be on its way.
        """
        ahead = {i: self.mine.after(i, grad * share) for i, grad in snapshot.pseudo_grads.items()}
        self.exchange.scatter(ahead, self.space.sent_in(snapshot.round))
        return ahead

    def correct(self, ahead: Mapping[int, torch.Tensor], round_number: int) -> None:
        """Local params that the round sent, trained from `ahead`, go on as if trained from the global params."""
        groups = self.space.sent_in(round_number)
        local = self.exchange.gather(groups)
        moved = {i: values + (self.mine.parts[i] - ahead[i]) for i, values in local.items()}
        self.exchange.scatter(moved, groups)

    def carry_over(self, round_number: int) -> None:
        """Local params that the round sent go on from the global params of now, with the progress made before.

        A round may be committed meanwhile. Nothing changes when none was since the last call.
        """
        groups = self.space.sent_in(round_number)
        self.exchange.scatter(self.mine.carried_over(self.exchange.gather(groups)), groups)

    def take_over(self, round_number: int | None = None) -> None:
        """Local params that the round sent become the global params, or (None) all; as above."""
        groups = range(len(self.space.groups)) if round_number is None else self.space.sent_in(round_number)
        carried = [i for group in groups for i in self.space.parts_of[group] if i in self.mine.parts]
        self.exchange.scatter(self.mine.taken_over(carried), groups)

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Another island's state, in place of global state and local params, moments too."""
        self.restore(parts, position)
        self.exchange.scatter(self.mine.parts)

    def restore(self, parts: Mapping[int, PartState], position: Position) -> None:
        """A state that was saved, in place of the global state; local params are left alone."""
        self.mine.replace(parts, position)
        self.digest = self._digest(self._team)

    def rebase(self, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Local params become global params minus these parts: progress made on an earlier state, put on this one.

        Moments become those that the island had.
        """
        self.exchange.scatter(self.mine.locals_of(pseudo_grads))

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Local params are the global params as they are now while it lasts; rounds may be committed meanwhile."""
        local = self.exchange.gather(self.space.param_groups)
        now = self.mine.copies() if self._has_listeners else self.mine.parts
        self.exchange.scatter(now, self.space.param_groups)
        try:
            yield
        finally:
            self.exchange.scatter(local, self.space.param_groups)

    def combine(self, digests_by_part: dict[int, bytes], team: Team) -> str:
        """One digest of all ranks' parts, in part order."""
        merged = {i: digest for digests in team.gather(digests_by_part) for i, digest in digests.items()}
        return combine([merged[i] for i in sorted(merged)])

    def _digest(self, team: Team) -> str:
        return seal(self.combine(self.mine.digests(), team), to_json(self.mine.position.account))
