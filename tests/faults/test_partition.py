"""Four islands whose links are cut and healed (network namespaces): the history with the most
tokens survives.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.network_emulation.namespaces import Namespace, Net, open_net
from tests.faults.bootstraps import bootstrap
from tests.faults.waits import (
    GUARD_SECONDS,
    assert_one_history,
    last_round,
    more_rounds,
    reached,
    until,
)
from tests.swarm import Island, Swarm, swarm

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
NAMES = [f"island-{i}" for i in range(4)]
SLOW = 6
slow = pytest.mark.slow


@dataclass
class Divided:
    """Four islands with links that can be cut, and the bootstrap process on the side of island
    0.
    """

    swarm: Swarm
    net: Net
    places: list[Namespace]
    """Namespaces of the islands, then of the bootstrap process."""
    small: list[int]
    """Indices of the islands on the side without the bootstrap process."""

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
def divided(
    folder: Path, transport: str, small: list[int], slowed: list[int], *overrides: str
) -> Iterator[Divided]:
    """Four islands that have committed some rounds together. Inner steps of `slowed` take SLOW
    times as long.
    """
    if transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it

    with open_net() as net:
        places = [net.add() for _ in range(5)]
        host, prefix = places[4].host, places[4].command()
        faults = [f"slow:{i}x{SLOW}" for i in slowed]
        islands = [{"listen_host": place.host, "faults": faults} for place in places[:4]]
        settings = [
            "outer.rounds=100000",
            "outer.inner_steps=4",
            f"outer.transport={transport}",
            *overrides,
        ]
        with (
            bootstrap(transport, folder, host, prefix) as served,
            swarm(folder, *settings, islands=islands, address=served.address) as made,
        ):
            made.inside = {i: place.name for i, place in enumerate(places[:4])}
            for island in made.start_all():
                reached(island, 4)
            yield Divided(made, net, places, small)


def rounds_with(island: Island, names: list[str], after: int, all_islands: list[Island]) -> None:
    """Wait until the island has committed three rounds later than `after` with exactly these
    participants.
    """

    def has_come() -> bool:
        return (
            sum(r["participants"] == names for n, r in island.committed().items() if n > after) >= 3
        )

    until(has_come, f"three rounds of {names} by {island.folder.name}", *all_islands)


def survivors_chain(winners: list[Island]) -> dict[int, str]:
    """Digests by round of the surviving history, which is all that the winners have committed."""
    assert_one_history(*winners)
    return {
        number: record["digest"]
        for island in winners
        for number, record in island.committed().items()
    }


def check_loser(island: Island, chain: dict[int, str], winner: Island) -> None:
    """Check that the loser's own history had fewer tokens and that it then took the survivors'
    state for good.
    """
    rounds = [r for r in island.records("round") if r["committed"] and r["round"] <= max(chain)]
    is_on = [chain.get(r["round"]) == r["digest"] for r in rounds]
    off = [i for i, on in enumerate(is_on) if not on]
    assert off, f"{island.folder.name} had no history of its own"
    assert off == list(range(off[0], off[-1] + 1)) and is_on[-1], (
        f"{island.folder.name} mixes histories: {is_on}"
    )
    returned_at = rounds[off[-1] + 1]["time"]
    assert any(
        r["name"] == "caught up" and r["time"] < returned_at for r in island.records("event")
    )
    lost, kept = (
        [r["tokens"] for r in i.records("eval") if r["time"] < returned_at][-1]
        for i in (island, winner)
    )
    assert lost < kept, "the history with most tokens survives"


@pytest.mark.parametrize(
    ("transport", "small", "slowed"),
    [
        pytest.param("gloo", [3], [3], id="gloo-3+1", marks=slow),
        pytest.param("gloo", [3], [0, 1, 2], id="gloo-3+1-the-one-has-more-tokens", marks=slow),
        pytest.param("gloo", [2, 3], [2, 3], id="gloo-2+2", marks=slow),
        pytest.param("hivemind", [3], [3], id="hivemind-3+1", marks=slow),
        pytest.param("hivemind", [2, 3], [0, 1], id="hivemind-2+2", marks=slow),
    ],
)
def test_both_sides_go_on_and_one_history_survives(tmp_path, transport, small, slowed):
    with divided(tmp_path, transport, small, slowed) as made:
        everybody = made.swarm.started
        made.cut()
        for side in made.sides:
            for island in side:
                rounds_with(island, [other.folder.name for other in side], -1, everybody)
        fast, late = sorted(made.sides, key=lambda side: everybody.index(side[0]) in slowed)
        behind = 2 * max(record["tokens"] for record in late[0].records("eval"))
        until(
            lambda: fast[0].records("eval")[-1]["tokens"] > behind, "more tokens on one side", *fast
        )
        healed_at = max(last_round(island) for island in everybody)
        made.heal()
        for island in everybody:
            rounds_with(island, NAMES, healed_at, everybody)
        made.swarm.end()
        chain = survivors_chain(fast)
        for island in late:
            check_loser(island, chain, fast[0])


@slow
def test_below_quorum_an_island_waits_and_goes_on_when_the_others_are_back(tmp_path):
    with divided(tmp_path, "gloo", [3], [], "outer.quorum=3") as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        more_rounds(others[0], 5, NAMES[:3])
        assert all(len(record["participants"]) >= 3 for record in single.committed().values())
        healed_at = last_round(others[0])
        made.heal()
        for island in made.swarm.started:
            rounds_with(island, NAMES, healed_at, made.swarm.started)
        made.swarm.end()
        assert not single.events("alone")
        assert_one_history(*made.swarm.started)


@slow
def test_below_quorum_an_island_stops_when_it_is_told_to(tmp_path):
    with divided(tmp_path, "gloo", [3], [], "outer.quorum=3", "outer.below_quorum=stop") as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        assert single.wait(GUARD_SECONDS) == [1]
        assert (
            "1 of outer.quorum 3 islands" in single.log
            and "outer.below_quorum is 'stop'" in single.log
        )
        more_rounds(others[0], 5, NAMES[:3])


@slow
def test_below_quorum_an_island_goes_on_loudly_when_it_is_told_to(tmp_path):
    with divided(
        tmp_path, "gloo", [3], [], "outer.quorum=3", "outer.below_quorum=continue"
    ) as made:
        (single,), others = made.sides[1], made.sides[0]
        made.cut()
        more_rounds(single, 3, [NAMES[3]])
        more_rounds(others[0], 3, NAMES[:3])
        assert "is ALONE in the run" in single.log and "alone" in {
            r["name"] for r in single.records("event")
        }
        assert not others[0].events("alone")
