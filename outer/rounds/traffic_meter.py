"""How many bytes an island sends and receives, from one report to the next."""

from outer.team import Team
from outer.transports.base import Traffic


class TrafficMeter:
    """Of one rank's transport. Every rank of the island makes one, and calls it together with the others."""

    def __init__(self, team: Team, traffic: Traffic) -> None:
        self._team, self._traffic = team, traffic
        self._counted = 0, 0

    def count(self) -> tuple[int, int]:
        """(bytes sent, bytes received) over all ranks since it was asked last: peers send before a round begins."""
        counts = self._team.gather((self._traffic.bytes_sent, self._traffic.bytes_received))
        before, self._counted = self._counted, (sum(sent for sent, _ in counts), sum(got for _, got in counts))
        return self._counted[0] - before[0], self._counted[1] - before[1]
