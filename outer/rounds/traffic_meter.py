"""Counts the bytes that an island sends and receives between two reports."""

from outer.network.endpoints import Traffic
from outer.space.ranks import RankGroup


class TrafficMeter:
    """Counts the traffic of one rank's transport. Every rank of the island builds one and calls
    it together with the others.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic) -> None:
        self._ranks = ranks
        self._traffic = traffic
        self._counted = 0, 0

    def count(self) -> tuple[int, int]:
        """Return (bytes sent, bytes received) over all ranks since the last call. Peers may send
        before a round begins.
        """
        counts = self._ranks.gather((self._traffic.bytes_sent, self._traffic.bytes_received))
        before = self._counted
        self._counted = (sum(sent for sent, _ in counts), sum(got for _, got in counts))
        return self._counted[0] - before[0], self._counted[1] - before[1]
