"""How the ranks of an island, together, give their share of a gossip round and take the partners'.

offer, to be there -> meet, who else is -> take their shares, and agree with each whether the pair counts
"""

from collections.abc import Mapping, Sequence

import torch

from outer.desk import Desk, Offer
from outer.errors import OuterError
from outer.gossip import Share
from outer.island_state import Snapshot
from outer.loop import LoopThread
from outer.partners import Met, Partners
from outer.phases import Hooks
from outer.shares import Shares, ShareTaker
from outer.team import Team


class Trade:
    """Every rank of the island builds it and makes the same calls; `partners` is the leader's alone."""

    def __init__(
        self, shares: ShareTaker, desk: Desk, partners: Partners | None, team: Team, loop: LoopThread, hooks: Hooks
    ) -> None:
        self._shares, self._desk, self._partners = shares, desk, partners
        self._team, self._loop, self._hooks = team, loop, hooks

    def offer(self, snapshot: Snapshot, params: Mapping[int, torch.Tensor], partners: Sequence[str]) -> Shares:
        """Lay this rank's parts out for the partners; its share as they decode it. Raises OuterError on every rank."""
        payloads, cause = {}, None
        try:
            for part, grad in snapshot.pseudo_grads.items():
                grad = self._hooks.pseudo_grad(snapshot.round, grad)
                payloads[part] = self._shares.coding.encode(part, Share(grad, params[part]))
        except OuterError as error:
            cause = str(error)
        if causes := [cause for cause in self._team.gather(cause) if cause is not None]:
            raise OuterError(causes[0])
        leaving = {part: self._hooks.payload(snapshot.round, payload) for part, payload in payloads.items()}
        self._loop.run(self._desk.open(Offer(snapshot.round, frozenset(partners), leaving)))
        return {part: self._shares.coding.decode(part, payload) for part, payload in payloads.items()}

    def meet(self, partners: Sequence[str], round_number: int, num_parts: int) -> Met:
        """Who is there."""
        return self._team.on_leader(lambda: self._loop.run(self._leader.meet(partners, round_number, num_parts)))

    def take(self, met: Met, round_number: int) -> tuple[dict[str, Shares], dict[str, str]]:
        """This rank's parts of the shares that count, and why the other partners' do not: the same on every rank.

        Nothing is given away after it.
        """
        self._hooks.reached("send", round_number)
        shares, failed = self._loop.run(self._shares.take_all(met.routes, round_number))
        lost = dict(met.lost)
        for causes in self._team.gather(failed):
            lost |= causes
        self._hooks.reached("vote", round_number)
        has_all = {name: name not in lost for name in [*met.routes, *met.lost]}
        told = self._team.on_leader(lambda: self._loop.run(self._leader.agree(has_all, round_number)))
        self._loop.run(self._desk.close(round_number + 1))
        lost = told | lost
        return {name: share for name, share in shares.items() if name not in lost}, lost

    @property
    def _leader(self) -> Partners:
        assert self._partners is not None, "only the leader speaks for the island"
        return self._partners
