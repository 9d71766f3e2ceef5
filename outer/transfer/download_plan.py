"""How an island that begins or is behind finds and takes the state of others."""

import time
from collections.abc import Callable, Sequence

from outer.averaging import Side
from outer.membership.base import Member
from outer.parts_cache import PartsCache
from outer.presence import Presence
from outer.reports import Settings
from outer.transfer import Fetch, Share

RESUME_SECONDS = 60.0
"""How long an island that goes on from a checkpoint waits for the others to do so; then it goes on alone."""
DONOR_WAIT_SECONDS = 10.0
"""How long an island that must not begin a run waits for one that can give a state."""


def has_donors(side: Side, presence: Presence, *, joins: bool) -> bool:
    """Whether others hold a state that survives; waited for when this one must not begin, or go on, without."""
    is_resumed = side.held.mine.position.round > 0
    seconds = DONOR_WAIT_SECONDS if joins else RESUME_SECONDS * is_resumed
    return come_in_time(
        presence.find_donors, seconds, lambda: is_resumed and presence.num_islands >= side.config.start_islands
    )


def come_in_time(
    find_donors: Callable[[], Sequence[Member]], seconds: float, is_hopeless: Callable[[], bool] = lambda: False
) -> bool:
    """Whether any donor is found in so many seconds; not waited for any longer once it is hopeless."""
    deadline = time.monotonic() + seconds
    while not (found := find_donors()) and time.monotonic() < deadline and not is_hopeless():
        time.sleep(0.2)
    return bool(found)


def fetch_of(side: Side, settings: Settings) -> Fetch:
    """What takes the parts that this rank carries."""
    folder, held, config = settings.cache_dir, side.held, side.config
    cache = None
    if folder is not None:
        run = side.identity.config_hash
        cache = PartsCache(folder / f"rank-{side.team.rank}", held.space.fingerprint, run)
    share = Share(held.space, held.exchange.carried, side.coding, config.optimizer, config.start_islands)
    return Fetch(side.network.messenger, [], share, cache, side.hooks)
