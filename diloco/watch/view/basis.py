"""Measurements of a run that has begun, from which its further course can be predicted."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from diloco.config.own_code import outer_code
from diloco.config.schema import Config, load_config
from diloco.errors import ConfigError
from diloco.formatting import human_duration, human_rate
from diloco.network_emulation.links import AccessLink, parse_links
from diloco.records.kept_config import read_plan
from diloco.records.run_folder import CONFIG
from diloco.watch.view.history import IslandHistory
from diloco.watch.view.run_view import RunView

if TYPE_CHECKING:
    from diloco.planning.predict import LinkSpeed

STEPS = 50
REDUCES = 20
"""Number of last inner steps and reduces over which an island's median is taken."""


@dataclass(frozen=True)
class Basis:
    """A run's config, and measurements since the run began."""

    config: Config
    step_seconds: dict[str, float]
    """Median seconds of an inner step, by island: those in the last committed round whose records
    are here."""
    num_islands: int
    """Number of islands in the last committed round."""
    ranks: int
    """Ranks of the island with the fewest ranks."""

    @property
    def fastest(self) -> str:
        """The island with the shortest inner steps."""
        return min(self.step_seconds, key=lambda name: self.step_seconds[name])

    @property
    def spread(self) -> float:
        """How much longer the steps of the slowest island take: 0.1 for 10 %."""
        return max(self.step_seconds.values()) / self.step_seconds[self.fastest] - 1

    def words(self) -> Iterator[str]:
        """Yield the assumptions of the prediction, in words."""
        seconds = human_duration(self.step_seconds[self.fastest])
        slowest = f", and {self.spread:.0%} longer on the slowest" if self.spread >= 0.005 else ""
        yield (
            f"an inner step takes {seconds}, the median of the last steps on "
            f"{self.fastest}{slowest}"
        )
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        yield f"{self.num_islands} islands, as in the last committed round, of {ranks}"
        yield "the work besides the network takes as long as on this machine"


def find_basis(view: RunView) -> Basis:
    """Return the measurements of the run so far. Raises ConfigError if they are not enough for a
    prediction.
    """
    config = load_config(view.run_dir / CONFIG)
    if config.params or config.model.name is not None:
        raise ConfigError("the shapes of an own model are not known, so there is no prediction")
    if outer_code(config.run):
        raise ConfigError(
            "the run uses own code, which a page does not import: `diloco plan` predicts such a run"
        )
    commits = [
        island.rows["pace"][-1][0] for island in view.islands.values() if island.rows["pace"]
    ]
    if not commits:
        raise ConfigError("a prediction needs two committed rounds; the run has fewer")
    present = last_participants(view)
    seconds = {
        name: found
        for name in present & view.islands.keys()
        if (found := usual_step(view.islands[name]))
    }
    if not seconds:
        raise ConfigError("no inner step has been recorded yet")
    ranks = min(
        len(rows[-1][2]) if (rows := view.islands[name].rows["ranks"]) else 1 for name in seconds
    )
    return Basis(config, seconds, len(present), ranks)


def last_participants(view: RunView) -> set[str]:
    """Return the islands in the last committed round."""
    rounds = [
        row
        for island in view.islands.values()
        for row in island.rows["rounds"][-REDUCES:]
        if row[3]
    ]
    return set(view.groups.names[max(rounds, key=lambda row: row[0])[9]]) if rounds else set()


def usual_step(island: IslandHistory) -> float | None:
    """Return the median seconds of an island's last inner steps; None before the first step."""
    seconds = [end - begin for begin, end in island.rows["work"][-STEPS:]]
    return median(seconds) or None if seconds else None


def find_link(view: RunView, config: Config) -> "tuple[LinkSpeed, str]":
    """Return an island's link, and where it is known from: the user, `simulate --link`, the config,
    or the last reduces.

    Raises ConfigError if none of them gives a link.
    """
    from diloco.planning.predict import LinkSpeed

    if (given := view.link) is not None:
        return LinkSpeed(given.rate, given.rtt), f"a link of {describe(given)}, as --link says"
    facts = read_plan(view.run_dir).facts
    if (
        facts is not None
        and facts.links
        and (links := parse_links(facts.links.split(), facts.num_islands).all)
    ):
        slowest = AccessLink(min(link.rate for link in links), max(link.rtt for link in links))
        return LinkSpeed(
            slowest.rate, slowest.rtt
        ), f"a link of {describe(slowest)}, as simulate --link shaped it"
    islands = [config.for_island(index) for index in range(max(len(config.islands), 1))]
    if rates := [island.link_mbit for island in islands if island.link_mbit is not None]:
        text = (
            f"a link of {human_rate(1e6 * min(rates))}, by island.link_mbit; its round trip is "
            "not known"
        )
        return LinkSpeed(1e6 * min(rates)), text
    rows = [
        row[4]
        for island in view.islands.values()
        for row in island.rows["pace"][-REDUCES:]
        if row[4]
    ]
    if not rows:
        raise ConfigError(
            "the speed of the links is not known; give it by --link, as in --link 100mbit,rtt=50ms"
        )
    rate = median(rows)
    text = (
        f"no link is given (--link): {human_rate(rate)}, the rate of the last reduces; the "
        "link may be faster"
    )
    # The measured rate counts payload only and already includes round trips.
    return LinkSpeed(rate, payload_share=1.0), text


def describe(link: AccessLink) -> str:
    """Return a link in words."""
    return human_rate(link.rate) + (f" and {1000 * link.rtt:g} ms" if link.rtt else "")
