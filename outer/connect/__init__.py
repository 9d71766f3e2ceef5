"""A rank's connections to other islands: their settings, how they are opened, and where islands meet."""

from outer.connect.meeting import find_runs
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings

__all__ = ["Network", "NetworkSettings", "find_runs", "open_network"]
