"""The exchange of shares in a gossip round, over all ranks of an island.

publish our share -> find the partners that are present -> fetch theirs -> confirm each pair
"""

from collections.abc import Mapping, Sequence

import torch

from outer.errors import OuterError
from outer.gossip.partners import Met, Partners
from outer.gossip.server import GossipServer, PublishedShare
from outer.gossip.shares import ShareDownload, Shares
from outer.gossip.step import Share
from outer.network.event_loop import EventLoop
from outer.space.ranks import RankGroup


class GossipExchange:
    """One rank's part in the exchange. Every rank of the island makes the same calls; only the
    leader has `partners`.
    """

    def __init__(
        self,
        download: ShareDownload,
        server: GossipServer,
        partners: Partners | None,
        ranks: RankGroup,
        event_loop: EventLoop,
    ) -> None:
        self._download = download
        self._server = server
        self._partners = partners
        self._ranks = ranks
        self._event_loop = event_loop

    def encode(
        self, grads: Mapping[int, torch.Tensor], params: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return this rank's share, encoded, by part. Raises OuterError on every rank if one
        rank cannot encode its parts.
        """
        payloads = {}
        cause = None
        try:
            for part, grad in grads.items():
                payloads[part] = self._download.coding.encode(part, Share(grad, params[part]))
        except OuterError as error:
            cause = str(error)
        if causes := [cause for cause in self._ranks.gather(cause) if cause is not None]:
            raise OuterError(causes[0])
        return payloads

    def decode(self, payloads: Mapping[int, torch.Tensor]) -> Shares:
        """Return this rank's own share, as partners decode it."""
        return {
            part: self._download.coding.decode(part, payload) for part, payload in payloads.items()
        }

    def publish(self, share: PublishedShare) -> None:
        """Let the partners fetch this rank's parts."""
        self._event_loop.run(self._server.publish(share))

    def meet(self, partners: Sequence[str], round_number: int, num_parts: int) -> Met:
        """Find out which partners are present in the round."""
        return self._ranks.on_leader(
            lambda: self._event_loop.run(self._leader.meet(partners, round_number, num_parts))
        )

    def fetch(self, met: Met, round_number: int) -> tuple[dict[str, Shares], dict[str, str]]:
        """Return (this rank's parts of the partners' shares, causes by partner whose share is
        missing on some rank).
        """
        shares, failed = self._event_loop.run(self._download.fetch_all(met.routes, round_number))
        lost = dict(met.lost)
        for causes in self._ranks.gather(failed):
            lost |= causes
        return shares, lost

    def confirm(
        self, met: Met, shares: Mapping[str, Shares], lost: Mapping[str, str], round_number: int
    ) -> tuple[dict[str, Shares], dict[str, str]]:
        """Return (the shares that count, causes by partner whose share does not count), the same
        partners on every rank.

        `shares` and `lost` are the results of `fetch`. Afterwards partners can no longer fetch this
        island's share.
        """
        has_all = {name: name not in lost for name in [*met.routes, *met.lost]}
        refusals = self._ranks.on_leader(
            lambda: self._event_loop.run(self._leader.confirm(has_all, round_number))
        )
        self.close(round_number + 1)
        lost = refusals | dict(lost)
        return {name: share for name, share in shares.items() if name not in lost}, lost

    def close(self, round_number: int) -> None:
        """Enter this round without a published share."""
        self._event_loop.run(self._server.close(round_number))

    @property
    def _leader(self) -> Partners:
        assert self._partners is not None, "only the leader sends messages for the island"
        return self._partners
