"""One process of an island dies: the whole island ends with a clear word, and its launcher brings
it back as the same.

The default suite kills one rank over gloo; all: scripts/test tests/faults/test_processes.py -m
"slow or not slow"
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import OVERRIDES as ROUNDS_AND_STEPS
from tests.faults.cases import ROUND, ROUNDS, SHAPES
from tests.faults.forked import train_at_pace
from tests.faults.launched import LaunchedIsland, ended, launch, send
from tests.faults.leftovers import nothing_left
from tests.faults.waits import last_round, until
from tests.swarm import Island, swarm

STEP_SECONDS = 0.05
VICTIM = 1
slow = pytest.mark.slow


class Case:
    """Three islands, of which VICTIM has several ranks, under their launchers."""

    def __init__(self, islands: dict[int, LaunchedIsland], readers: dict[int, Island]) -> None:
        self.victim, self.readers = islands[VICTIM], readers
        self.others = [reader for index, reader in readers.items() if index != VICTIM]

    def reach(self, round_number: int) -> None:
        until(
            lambda: last_round(self.readers[VICTIM]) >= round_number,
            f"round {round_number}",
            *self.readers.values(),
        )

    def is_back(self) -> bool:
        """Whether the victim's ranks were started again and have committed a round since."""
        before, _, since = self.victim.log.rpartition("starting all ranks again")
        return (
            bool(before)
            and "joined:" in since
            and "committed with" in since.partition("joined:")[2]
        )


@contextmanager
def running(folder: Path, transport: str, shape: str, address: str, **own: Any) -> Iterator[Case]:
    """Three islands that run until the end of the block, which then end well with one history and
    nothing left.
    """
    specs = [{}, {**SHAPES[shape], **own}, {}]
    settings = [
        f"name={folder.name}",
        *ROUNDS_AND_STEPS,
        f"outer.rounds={4 * ROUNDS}",
        f"outer.transport={transport}",
    ]
    with nothing_left(), swarm(folder, *settings, islands=specs, address=address) as made:
        islands: dict[int, LaunchedIsland] = {}
        with ended(islands):
            for index in range(len(specs)):
                islands[index] = launch(made, index, train_at_pace(STEP_SECONDS))
            readers = {index: Island(island.folder, []) for index, island in islands.items()}
            case = Case(islands, readers)
            yield case
            until(case.is_back, "the island's return", *readers.values())
            check_one_history(list(readers.values()))
            # Now each leaves after its round under way. On a busy machine that may be a round of
            # its own.
            (folder / folder.name / "stop-after-round").touch()
            until(
                lambda: all(island.exit_code is not None for island in islands.values()), "the end"
            )
            assert {island.exit_code for island in islands.values()} == {0}, case.victim.log[-3000:]


def check_one_history(islands: list[Island]) -> None:
    """Check that rounds of several islands have one digest. One island alone may commit what is
    thrown away later.
    """
    commits = [
        record
        for island in islands
        for record in island.committed().values()
        if len(record["participants"]) > 1
    ]
    digests: dict[int, set[str]] = {}
    for record in commits:
        digests.setdefault(record["round"], set()).add(record["digest"])
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}


def check_return(case: Case, word: str, key: str) -> None:
    """Check what the victim's log says, that it was started again once, and that it is the same
    island.
    """
    assert word in case.victim.log, case.victim.log[-3000:]
    assert case.victim.num_restarts == 1
    assert (case.victim.folder / "island.key").read_text() == key
    assert not any(other.events("failed") for other in case.others)


KILLS = [
    pytest.param(*case, marks=[] if case == ("gloo", "dp_shard2", 1) else [slow])
    for transport in ("gloo", "hivemind")
    for case in [
        (transport, "dp_shard2", 0),
        (transport, "dp_shard2", 1),
        *product([transport], ["pp2-tp2"], (0, 3)),
    ]
]


@pytest.mark.parametrize("transport,shape,rank", KILLS)
def test_an_island_of_which_one_rank_is_killed_ends_and_comes_back_as_the_same(
    transport: str, shape: str, rank: int, tmp_path: Path, place: Callable[[str], str]
):
    with running(tmp_path, transport, shape, place(transport)) as case:
        case.reach(ROUND)
        key = (case.victim.folder / "island.key").read_text()
        send(case.victim.ranks[rank], signal.SIGKILL)
        until(case.is_back, "the island's return", *case.readers.values())
        check_return(case, f"rank {rank} was ended by SIGKILL", key)


@slow
@pytest.mark.parametrize("shape", SHAPES)
def test_an_island_whose_libp2p_daemon_is_killed_ends_and_comes_back_as_the_same(
    shape: str, tmp_path: Path, place: Callable[[str], str]
):
    with running(tmp_path, "hivemind", shape, place("hivemind")) as case:
        case.reach(ROUND)
        key = (case.victim.folder / "island.key").read_text()
        (daemon,) = case.victim.daemons
        send(daemon, signal.SIGKILL)
        until(case.is_back, "the island's return", *case.readers.values())
        check_return(
            case,
            "the libp2p daemon of this node was ended by SIGKILL, and with it all of its "
            "connections",
            key,
        )


@slow
@pytest.mark.parametrize(
    "transport,shape,phase", product(("gloo", "hivemind"), SHAPES, ("sending", "decide", "applied"))
)
def test_an_island_of_several_ranks_whose_leader_is_killed_in_a_round_comes_back(
    transport: str, shape: str, phase: str, tmp_path: Path, place: Callable[[str], str]
):
    fault = f"kill:{VICTIM}@round={ROUND},phase={phase}"
    with running(tmp_path, transport, shape, place(transport), faults=[fault]) as case:
        until(case.is_back, "the island's return", *case.readers.values())
        assert "rank 0 was ended by SIGKILL" in case.victim.log


@slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_an_island_of_which_one_rank_freezes_goes_on_when_it_wakes(
    transport: str, tmp_path: Path, place: Callable[[str], str]
):
    with running(tmp_path, transport, "dp_shard2", place(transport)) as case:
        case.reach(ROUND)
        send(case.victim.ranks[1], signal.SIGSTOP)
        after = [last_round(other) for other in case.others]
        until(
            lambda: all(last_round(o) > n + 1 for o, n in zip(case.others, after, strict=True)),
            "two more rounds",
        )
        send(case.victim.ranks[1], signal.SIGCONT)
        case.reach(max(map(last_round, case.others)) + 1)
        send(case.victim.ranks[1], signal.SIGKILL)
