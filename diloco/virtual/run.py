"""A run in virtual time: its islands, links and faults, from the first start to the end."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from diloco.faults.spec import Fault
from diloco.network_emulation.links import AccessLink, Links
from diloco.planning.predict import find_payload_share
from diloco.virtual.faults import VirtualFaults
from diloco.virtual.fleet import VirtualFleet
from diloco.virtual.island import Seat
from diloco.virtual.network import VirtualNetwork
from diloco.virtual.stand_in import build_stand_in
from diloco.virtual.world import SharedWork, World
from diloco.watchdog.life_signs import life_signs
from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.network.messages import sharing
from outer.transports.loopback import Hub

MOST_PERIODS = 20
MOST_SECONDS = 3600.0
"""A run is given up after MOST_PERIODS times the time of its inner steps, plus MOST_SECONDS."""
MOST_SHARE = 0.99
"""The run is told to be nearly over when its inner steps alone would be."""
MOST_MEASURED = 64
SAMPLED = 16
"""With more than MOST_MEASURED islands, processor time is measured in one of SAMPLED actions
only."""
NO_LINKS = Links()


@dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """The description of a simulated run."""

    outer: OuterConfig
    specs: tuple[ParamSpec, ...]
    """Parameters of the run's model."""
    num_islands: int
    step_seconds: float
    """Duration of an inner step on the first island."""
    spread: float = 0.0
    """How much longer an inner step takes on the last island: 0.1 for 10 %. The other islands are
    in between."""
    host_seconds: float = 0.0
    """Time of an island's own work in a round, between its reduce and its vote: coding, outer step,
    digests, copies."""
    links: Links = NO_LINKS
    tokens_per_step: int = 1
    config_hash: str = "0" * 32
    seed: int = 0
    faults: Sequence[Fault] = ()
    storm: Iterable[Fault] = ()

    def step_seconds_of(self, index: int) -> float:
        """Return the time of an inner step on an island. Islands that join are as fast as the first
        island.
        """
        place = index / max(self.num_islands - 1, 1) if index < self.num_islands else 0.0
        return self.step_seconds * (1 + self.spread * place)


def run_virtually(run: VirtualRun) -> VirtualFleet:
    """Simulate the run and return its islands. Raises ConfigError if it does not end."""
    torch.set_num_threads(1)
    outer = run.outer.model_copy(update={"start_islands": run.num_islands})
    slowest = run.step_seconds * (1 + run.spread)
    world = World(outer.rounds * (MOST_PERIODS * outer.inner_steps * slowest + MOST_SECONDS))
    world.sampled = 1 if run.num_islands <= MOST_MEASURED else SAMPLED
    stand_in = build_stand_in(run.specs, outer, run.num_islands)
    share = find_payload_share(outer, run.num_islands)
    find_link = cache(lambda name: _find_link(run.links, name))
    network = VirtualNetwork(world, stand_in, find_link, share)
    hub = Hub(network.deliver)
    fleet = VirtualFleet(world, hub, network, run.seed)

    def seat_of(index: int) -> Seat:
        link = run.links.of(index)
        return Seat(
            name=f"island-{index}",
            index=index,
            step_seconds=run.step_seconds_of(index),
            host_seconds=run.host_seconds,
            link_kbit=round(link.rate / 1000) if link else 0,
            stand_in=stand_in,
            hub=hub,
            tokens_per_step=run.tokens_per_step,
            config_hash=run.config_hash,
            seed=run.seed,
        )

    # All islands are in one process, so one garbage collection takes seconds and would be charged
    # to a single island.
    gc.disable()
    try:
        for index in range(run.num_islands):
            fleet.start(seat_of(index), joins=False)
        faults = VirtualFaults(fleet, run.faults, run.storm, seat_of)
        what = f"simulating {run.num_islands} islands in virtual time"
        # Without the network and faults the run would take so long.
        least_seconds = outer.rounds * outer.inner_steps * slowest
        with (
            sharing(SharedWork(world)),
            life_signs(what, lambda: min(world.now / least_seconds, MOST_SHARE)),
        ):
            world.run(lambda: faults.is_over)
        fleet.watch()
    finally:
        gc.enable()
        fleet.close()
    return fleet


def _find_link(links: Links, island: str) -> AccessLink | None:
    return links.of(int(island.removeprefix("island-")))
