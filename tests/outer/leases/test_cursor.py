"""Whole islands read each unit once in committed rounds, over deaths, joiners and re-based
progress.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch

import outer.leases.ledger
from outer.config import OuterConfig
from outer.errors import OuterError
from outer.leases.cursor import LeaseCursor
from outer.leases.ledger import Ledger
from outer.leases.ranges import Ranges
from outer.report import CaughtUp
from tests.outer.islands import GUARD_SECONDS, Island, attempt, dies_in, run_islands

torch.set_num_threads(1)

STEPS, ROUNDS, DEATH = 3, 10, 5


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "inner_steps": STEPS, "wait_seconds": GUARD_SECONDS}
    return OuterConfig(transport="loopback", **{**fields, **changes})


@dataclass
class Life:
    """Units that an island has read, by committed round, and the ledger that it ended with."""

    trained: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)


def live(island: Island, reached: Callable[[int], None] = lambda number: None) -> Life:
    """Train and commit until the end. The life of an island that dies ends with an attempt that
    does not commit.
    """
    outer, life, read = island.outer, Life(), list[int]()
    outer.begin()
    while outer.position.round < ROUNDS:
        reached(outer.position.round)
        read += [outer.cursor.next_unit() for _ in range(STEPS)]
        island.train(outer.position.round)
        try:
            report = attempt(outer, 100)
        except CaughtUp as caught:
            life.dropped += [] if caught.is_kept else read
            read = read if caught.is_kept else []
            continue
        if report.is_committed:
            assert report.units == () or units_of(report.units) == read
            life.trained.append(read)
            read = []
        elif (island.name, report.round) == ("b", DEATH):
            return life
    outer.finish()
    life.ledger = outer.position.ledger
    return life


def units_of(runs: Ranges) -> list[int]:
    return list(chain.from_iterable(runs))


def assert_each_unit_once(lives: Mapping[str, Life], ledger: Ledger) -> None:
    """All units that are trained, leased or returned."""
    trained = list(chain.from_iterable(units for life in lives.values() for units in life.trained))
    leased = (units_of(lease.runs) for lease in ledger.leases.values())
    still_open = [*units_of(ledger.returned), *chain.from_iterable(leased)]
    assert sorted(trained + still_open) == list(range(ledger.frontier))
    assert ledger.trained == len(trained)


@pytest.mark.parametrize("num_places", [16, 1], ids=["apart", "two joiners at one place"])
def test_over_a_death_and_two_joiners_every_unit_is_trained_once(
    monkeypatch, num_places: int
) -> None:
    monkeypatch.setattr(outer.leases.ledger, "NUM_SPARES", num_places)
    may_join, gather = threading.Event(), threading.Barrier(3)

    def meet(island: Island) -> Life:
        """Wait in rounds 2 and 3 until both joiners have the state, because rounds are fast."""
        wanted = {2, 3}

        def reached(number: int) -> None:
            if number in wanted:
                wanted.remove(number)
                may_join.set()
                gather.wait(GUARD_SECONDS)

        assert island.name == "a" or may_join.wait(GUARD_SECONDS)
        return live(island, reached)

    scripts = {"a": meet, "b": live, "c": meet, "d": meet}
    lives = run_islands(scripts, config(2), faults={"b": dies_in(DEATH)})
    assert lives["a"].ledger == lives["c"].ledger == lives["d"].ledger
    assert len(lives["b"].trained) == DEATH and lives["c"].trained and lives["d"].trained
    assert bool(lives["d"].dropped) is (num_places == 1), "who was refused begins anew"
    assert_each_unit_once(lives, lives["a"].ledger)


def test_islands_that_all_live_read_the_units_of_a_data_parallel_run_in_its_order() -> None:
    lives = run_islands(dict.fromkeys("abc", live), config(3))
    for index, name in enumerate("abc"):
        assert list(chain.from_iterable(lives[name].trained)) == list(
            range(index, 3 * STEPS * ROUNDS, 3)
        )
    assert lives["a"].ledger.trained == 3 * STEPS * ROUNDS and lives["a"].ledger.returned == ()


def test_two_islands_with_one_index_are_told_so() -> None:
    def script(island: Island) -> str:
        island.outer.pending.cursor = LeaseCursor(
            island.name, 0, "0" * 8, island.outer.replica.terms
        )
        island.outer.begin()
        island.outer.cursor.next_unit()
        island.outer.launch(100)
        if island.name == "b":
            with pytest.raises(OuterError) as caught:
                island.outer.land()
            told.set()
            return str(caught.value)
        assert told.wait(GUARD_SECONDS)
        return ""

    told = threading.Event()
    text = run_islands({"a": script, "b": script}, config(2))["b"]
    assert (
        "island.index is 1: islands 'a' and 'b' have read the same data; give each island its own"
        in text
    )
