"""Four islands in network namespaces whose links are cut and healed: one history survives, the one with most tokens."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.netns import Namespace, Net, opened_net
from tests.faults.bootstraps import bootstrap
from tests.faults.waits import GUARD_SECONDS, all_records, more_rounds, until
from tests.swarm import Island, Swarm, swarm

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
NAMES = [f"island-{i}" for i in range(4)]
SLOW = 6
slow = pytest.mark.slow


@dataclass
class Divided:
    """Four islands, a link that can be cut, and the bootstrap, which is on the side of island 0."""

    swarm: Swarm
    net: Net
    places: list[Namespace]
    """Of the islands, then of the bootstrap."""
    small: list[int]
    """The side without the bootstrap."""

    @property
    def sides(self) -> list[list[Island]]:
        small = [self.swarm.started[i] for i in self.small]
        return [[island for island in self.swarm.started if island not in small], small]

    def cut(self) -> None:
        self.net.cut(*self._groups())

    def heal(self) -> None:
        self.net.heal(*self._groups())

    def _groups(self) -> tuple[list[Namespace], list[Namespace]]:
        away = [self.places[i] for i in self.small]
        return away, [place for place in self.places if place not in away]


@contextmanager
def divided(folder: Path, transport: str, small: list[int], slowed: list[int], *overrides: str) -> Iterator[Divided]:
    """All four have committed some rounds together; inner steps of `slowed` take SLOW times as long as need be."""
    if transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it

    with opened_net() as net:
        places = [net.add() for _ in range(5)]
        host, prefix = places[4].host, places[4].command()
        faults = [f"slow:{i}x{SLOW}" for i in slowed]
        islands = [{"listen_host": place.host, "faults": faults} for place in places[:4]]
        settings = ["outer.rounds=100000", "outer.inner_steps=4", f"outer.transport={transport}", *overrides]
        with (
            bootstrap(transport, folder, host, prefix) as served,
            swarm(folder, *settings, islands=islands, address=served.address) as made,
        ):
            made.inside = {i: place.name for i, place in enumerate(places[:4])}
            for island in made.start_all():
                island.wait_for_round(4, GUARD_SECONDS)
            yield Divided(made, net, places, small)


def all_together(made: Divided, after: dict[str, int]) -> None:
    """Wait until each island has committed three rounds with all others, later than its round in `after`."""
    for island in made.swarm.started:
        until(
            lambda: (
                sum(r["participants"] == NAMES for n, r in island.committed().items() if n > after[island.folder.name])
                >= 3
            ),
            "three rounds of all four",
            *made.swarm.started,
        )


def last_rounds(made: Divided) -> dict[str, int]:
    return {island.folder.name: max(island.committed()) for island in made.swarm.started}


def chain(island: Island) -> dict[int, str]:
    """Digests by round that it has committed since it took a state last."""
    digests: dict[int, str] = {}
    for record in all_records(island, ("round", "event")):
        if record["kind"] == "event" and record["name"] == "caught up":
            digests = {}
        if record["kind"] == "round" and record["committed"]:
            digests[record["round"]] = record["digest"]
    return digests


def tokens_before_catching_up(island: Island) -> int:
    """Tokens behind the state that it held when it took another."""
    tokens = 0
    for record in all_records(island, ("eval", "event")):
        if record["kind"] == "event" and record["name"] == "caught up":
            return tokens
        tokens = record["tokens"] if record["kind"] == "eval" else tokens
    raise AssertionError(f"{island.folder.name} never caught up")


def check(winners: list[Island], losers: list[Island]) -> None:
    """The losers have the winners' history now, theirs had fewer tokens, and nobody mixes two."""
    survivor = chain(winners[0])
    for island in winners:
        assert not island.events("caught up"), f"{island.folder.name} gave up the history that survives"
    for island in losers:
        lost = {record["digest"] for record in island.records("round") if record["committed"]} - set(survivor.values())
        assert lost, f"{island.folder.name} had no history of its own"
        assert not lost & set(chain(island).values())
        most = max(record["tokens"] for record in winners[0].records("eval"))
        assert tokens_before_catching_up(island) < most
        assert island.events("caught up")[0].count("tokens") == 2, "it says why"
    for island in [*winners, *losers]:
        mine = chain(island)
        shared = mine.keys() & survivor.keys()
        assert shared and all(mine[number] == survivor[number] for number in shared), f"{island.folder.name} mixes"


@pytest.mark.parametrize(
    ("transport", "small", "slowed"),
    [
        pytest.param("gloo", [3], [3], id="gloo-3+1"),
        pytest.param("gloo", [3], [0, 1, 2], id="gloo-3+1-the-one-has-more-tokens", marks=slow),
        pytest.param("gloo", [2, 3], [2, 3], id="gloo-2+2", marks=slow),
        pytest.param("hivemind", [3], [3], id="hivemind-3+1", marks=slow),
        pytest.param("hivemind", [2, 3], [0, 1], id="hivemind-2+2", marks=slow),
    ],
)
def test_both_sides_go_on_and_one_history_survives(tmp_path, transport, small, slowed):
    with divided(tmp_path, transport, small, slowed) as made:
        made.cut()
        for side in made.sides:
            names = [island.folder.name for island in side]
            for island in side:
                until(
                    lambda: sum(r["participants"] == names for r in island.committed().values()) >= 3,
                    f"three rounds of {names}",
                    *made.swarm.started,
                )
        # So that the rule has something to tell apart.
        fast, late = sorted(made.sides, key=lambda side: made.swarm.started.index(side[0]) in slowed)
        behind = 2 * max(record["tokens"] for record in late[0].records("eval"))
        until(lambda: fast[0].records("eval")[-1]["tokens"] > behind, "more tokens on one side", *fast)
        before = last_rounds(made)
        made.heal()
        all_together(made, before | {i.folder.name: before[fast[0].folder.name] for i in late})
        for island in made.swarm.started:
            island.signal(signal.SIGTERM)
            island.wait(GUARD_SECONDS)
        check(fast, late)


@slow
def test_below_quorum_an_island_waits_and_goes_on_when_the_others_are_back(tmp_path):
    with divided(tmp_path, "gloo", [3], [], "outer.quorum=3") as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        more_rounds(others[0], 5, NAMES[:3])
        before = last_rounds(made)
        assert {tuple(r["participants"]) for r in single.committed().values()} == {tuple(NAMES)}
        made.heal()
        all_together(made, before)
        assert not single.events("alone") and not any(island.events("caught up") for island in others)
        assert all(chain(single)[n] == chain(others[0])[n] for n in chain(single).keys() & chain(others[0]).keys())


@slow
def test_below_quorum_an_island_stops_when_it_is_told_to(tmp_path):
    with divided(tmp_path, "gloo", [3], [], "outer.quorum=3", "outer.below_quorum=stop") as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        assert single.wait(GUARD_SECONDS) == [1]
        assert "QuorumError" in single.log and "1 of outer.quorum 3 islands" in single.log
        more_rounds(others[0], 5, NAMES[:3])


@slow
def test_below_quorum_an_island_goes_on_loudly_when_it_is_told_to(tmp_path):
    with divided(tmp_path, "gloo", [3], [], "outer.quorum=3", "outer.below_quorum=continue") as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        more_rounds(single, 3, [NAMES[3]])
        more_rounds(others[0], 3, NAMES[:3])
        assert "is ALONE in the run" in single.log and "alone" in {r["name"] for r in single.records("event")}
        assert not others[0].events("alone")
