"""Check that an island still has its network, for a loop that would otherwise train alone for
ever.
"""

from outer.connect.settings import Network
from outer.errors import TransportError
from outer.network.event_loop import EventLoop


class NetworkWatch:
    """Waits on the event loop until a network is lost permanently."""

    def __init__(self, network: Network, event_loop: EventLoop) -> None:
        self._lost = ""
        wait_for_loss = network.wait_for_loss
        if wait_for_loss is not None:

            async def watch() -> None:
                self._lost = await wait_for_loss()

            event_loop.start(watch())

    def require(self) -> None:
        """Raise TransportError, with the cause, if the network is lost."""
        if self._lost:
            raise TransportError(self._lost)
