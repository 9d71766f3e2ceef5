"""The global state of one island as a whole: parts spread over its ranks, in step with the local params."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outer.coding import Coding
from outer.config import OuterConfig
from outer.digest import combine
from outer.exchange import Exchange, Params
from outer.fragments import groups_of
from outer.reduce import Mean
from outer.space import Space
from outer.state import GlobalState, PartState, Position
from outer.team import Team


@dataclass(frozen=True)
class Snapshot:
    """What an island gives to a round: its rank's parts of the pseudo-gradient, fp32, of the round's fragment."""

    round: int
    fragment: int
    pseudo_grads: dict[int, torch.Tensor]
    norm: float
    """Of all ranks' parts together."""
    tokens: int
    """Trained since the last round was sent."""
    weight: int
    """Trained since the fragment was averaged last: what the pseudo-gradient stands for."""


class IslandState:
    """Built, and each method called, by every rank of the island in the same order.

    `commit` may run in a thread of its own while local params are trained; it is over before the next call.
    """

    def __init__(self, config: OuterConfig, coding: Coding, params: Params, team: Team) -> None:
        self._team = team
        self._has_listeners = config.wait_for == "quorum"
        groups = groups_of(params.specs, config, splits_fine=coding.splits_fine)
        self.space = Space(params.specs, config.part_elements, coding.block_elements, groups)
        self.exchange = Exchange(self.space, params, team)
        self.mine = GlobalState(self.exchange.gather(), config.optimizer, config.start_islands)
        """What this rank carries."""
        self.digest = self.combine(self.mine.digests(), team)
        """Of global params and outer momentum, over all ranks; changes by `commit` and `replace`."""

    def pseudo_grads(self, fragment: int | None = None) -> dict[int, torch.Tensor]:
        """This rank's parts of the pseudo-gradient, fp32; of a fragment, or None: of all."""
        return self.mine.pseudo_grads(self.exchange.gather(fragment))

    def norm(self, pseudo_grads: Mapping[int, torch.Tensor]) -> float:
        """Of all ranks' parts together."""
        square = sum(float(grad.double().square().sum()) for grad in pseudo_grads.values())
        return sum(self._team.gather(square)) ** 0.5

    def commit(self, means: Mapping[int, Mean], position: Position, num_given: int, *, listens: bool) -> None:
        """One outer step of the parts in `means`, of so many islands. Local params stay as they are: see `merge`.

        `listens`: nothing of this island is in it, and `carry_over` comes.
        """
        values = {index: mean.values for index, mean in means.items()}
        payloads = {index: mean.payload for index, mean in means.items()}
        self.mine.commit(values, position, payloads, num_given, keeps_bases=listens)
        self.digest = self.combine(self.mine.digests(), self._team.background)

    def merge(self, fragment: int, mix: float) -> None:
        """Local params of the fragment become mix x local + (1 - mix) x global."""
        if mix < 1:
            self.exchange.scatter(self.mine.parts, fragment, mix)

    def look_ahead(self, snapshot: Snapshot, share: float) -> dict[int, torch.Tensor]:
        """Local params of the fragment become global params after an outer step on this island's share alone.

        Returns what they became, by carried part, for `correct`. No round may be on its way.
        """
        ahead = {i: self.mine.after(i, grad * share) for i, grad in snapshot.pseudo_grads.items()}
        self.exchange.scatter(ahead, snapshot.fragment)
        return ahead

    def correct(self, ahead: Mapping[int, torch.Tensor], fragment: int) -> None:
        """Local params of the fragment, trained from `ahead`, go on as if trained from the global params."""
        local = self.exchange.gather(fragment)
        moved = {i: values + (self.mine.parts[i] - ahead[i]) for i, values in local.items()}
        self.exchange.scatter(moved, fragment)

    def carry_over(self, fragment: int) -> None:
        """Local params of the fragment go on from the global params of now, with the progress made before.

        A round may be committed meanwhile. Nothing changes when none was since the last call.
        """
        self.exchange.scatter(self.mine.carried_over(self.exchange.gather(fragment)), fragment)

    def take_over(self, fragment: int) -> None:
        """Local params of the fragment become the global params; a round of it may be committed meanwhile."""
        carried = [i for i in self.space.fragments[fragment] if i in self.mine.parts]
        self.exchange.scatter(self.mine.taken_over(carried), fragment)

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Another island's state, in place of global state and local params."""
        self.mine.replace(parts, position)
        self.exchange.scatter(self.mine.parts)
        self.digest = self.combine(self.mine.digests(), self._team)

    def rebase(self, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Local params become global params minus these parts: progress made on an earlier state, put on this one."""
        self.exchange.scatter({i: self.mine.parts[i] - grad for i, grad in pseudo_grads.items()})

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Local params are the global params as they are now while it lasts; rounds may be committed meanwhile."""
        local = self.exchange.gather()
        self.exchange.scatter(self.mine.copies() if self._has_listeners else self.mine.parts)
        try:
            yield
        finally:
            self.exchange.scatter(local)

    def combine(self, digests_by_part: dict[int, bytes], team: Team) -> str:
        """One digest of all ranks' parts, in part order."""
        merged = {i: digest for digests in team.gather(digests_by_part) for i, digest in digests.items()}
        return combine([merged[i] for i in sorted(merged)])
