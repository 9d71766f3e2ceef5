"""Act on the islands of a run over the network, by orders that are signed with the operator's
key.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.config.schema import Config, RunConfig, parse_config
from diloco.records.logbook import Logbook
from diloco.status.operator_orders import Action, OrderText, sign_order
from diloco.watch.collection.collector import Collector
from diloco.watch.control import OPERATOR, invitation
from outer.errors import MessageError, first_line
from outer.identity.island_key import IslandKey
from outer.membership.base import Member

CALL_SECONDS = 10.0
ISLANDS_SHOWN = 12


@dataclass
class SwarmHand:
    """Signs one order per island, because an order is valid only for the island that it names."""

    collector: Collector
    key: IslandKey
    clock: Callable[[], float] = time.time
    where: str = "the run"

    @property
    def book(self) -> Logbook:
        """The logbook of the collected records. Each island also notes its orders in its own
        logbook.
        """
        return Logbook(self.collector.folder, OPERATOR)

    def act(self, action: Action, island: str) -> str:
        members = self.collector.members
        run = self._run
        targets = {
            name: each for name, each in members.items() if self._is_for(action, island, name)
        }
        if not targets or (action == "exclude" and island not in members):
            raise MessageError(f"{island or 'no island'} is not in the run now: no order was sent")
        argument = find_argument(action, island, members)
        text = {
            "run": run.name,
            "action": action,
            "argument": argument,
            "time": round(1000 * self.clock()),
        }
        orders = {name: sign_order(OrderText(island=name, **text), self.key) for name in targets}
        replies = self.collector.order(orders, CALL_SECONDS)
        said = [
            f"{name} {reply}" for name, reply in sorted(replies.items()) if isinstance(reply, str)
        ]
        failed = [
            f"{name}: {first_line(each)}"
            for name, each in sorted(replies.items())
            if not isinstance(each, str)
        ]
        if not said:
            raise MessageError(
                f"no island followed the order ({'; '.join(failed[:ISLANDS_SHOWN])})"
            )
        return "; ".join(said[:ISLANDS_SHOWN] + failed[:ISLANDS_SHOWN])

    def invite(self) -> str:
        own = parse_config("", self.collector.overrides, where="the command line").island
        config = Config(**self._run.model_dump(), island=own)
        return invitation(config, self.collector.address)

    @staticmethod
    def _is_for(action: Action, island: str, name: str) -> bool:
        return name != island if action == "exclude" else island in ("", name)

    @property
    def _run(self) -> RunConfig:
        assert self.collector.run is not None, "the collector has not been started"
        return self.collector.run


def find_argument(action: Action, island: str, members: dict[str, Member]) -> str:
    """Return the order's argument.

    For exclude it is the key of the excluded island, for stop the one round after which all islands
    stop.
    """
    if action == "exclude":
        return members[island].identity
    if action == "stop" and not island:
        return str(max(member.round for member in members.values()) + 1)
    return ""
