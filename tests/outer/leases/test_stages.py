"""Stages of a run in the account of its data: what a unit means never depends on who reads it, or
when.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from outer.errors import MessageError
from outer.leases.cursor import LeaseCursor
from outer.leases.ledger import Ledger, Terms, find_refusals, reopen, settle
from outer.leases.ranges import count
from outer.leases.stages import stage_of
from outer.network.messages import parse

ROUNDS = (3, 5, 11)
TERMS = Terms(inner_steps=3, stage_rounds=ROUNDS)


@dataclass
class Claim:
    island: str
    first: int
    units: int
    listens: bool = False


class Island:
    """Reads units as `outer/loop.py` lets it; `seen` is the stage of the ledger under which each
    was read.
    """

    def __init__(self, name: str, index: int, ledger: Ledger) -> None:
        self.name, self.ledger, self.seen = name, ledger, list[tuple[int, int]]()
        self.cursor = LeaseCursor(name, index, name, TERMS)
        self.cursor.begin(0, ledger)

    def train(self, number: int) -> None:
        for _ in range(min(number, self.cursor.num_left)):
            self.seen.append((self.cursor.next_unit(), len(self.ledger.borders)))

    @property
    def claim(self) -> Claim:
        return Claim(self.name, self.seen[0][0] if self.seen else 0, len(self.seen))

    def settle(self, ledger: Ledger, number: int) -> None:
        self.ledger = ledger
        self.cursor.settle(0, ledger, number)
        del self.seen[:number]

    def catch_up(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if not self.cursor.keep(ledger):
            self.cursor.begin(0, ledger)
            self.seen.clear()


@pytest.mark.parametrize("seed", range(40))
def test_a_unit_is_trained_once_and_in_the_stage_to_which_it_belongs(seed: int) -> None:
    drawn = random.Random(seed)
    ledger = reopen(Ledger(), 2, TERMS)
    islands = [Island(f"i{index}", index, ledger) for index in range(4)]  # two of them join
    trained: list[tuple[int, int, int]] = []
    for number in range(14):
        for island in islands:
            island.train(drawn.randint(0, 4))
        there = [island for island in islands if drawn.random() < 0.7] or islands[:1]
        for island in there:
            if island.ledger is not ledger:
                island.catch_up(ledger)
        refused = find_refusals(ledger, [island.claim for island in there], TERMS)
        there = [island for island in there if island.name not in refused]
        trained += [(unit, stage, number) for island in there for unit, stage in island.seen]
        ledger = settle(ledger, [island.claim for island in there], TERMS, number + 1)
        for island in there:
            island.settle(ledger, len(island.seen))
        assert parse(Ledger, ledger.encode()) == ledger
        assert ledger.trained == len(trained)
    units = [unit for unit, _, _ in trained]
    assert len(set(units)) == len(units)
    for unit, stage, number in trained:
        assert stage_of(unit, ledger.borders) == stage == sum(number >= first for first in ROUNDS)


def test_a_run_without_stages_has_the_ledger_that_it_always_had() -> None:
    assert reopen(Ledger(), 1, Terms(inner_steps=1)).model_dump_json() == (
        '{"frontier":4,"returned":[],"leases":{"#0":{"runs":[[0,4,1]],"missed":0}}}'
    )


def test_what_is_open_at_a_border_is_closed_and_leased_anew() -> None:
    before = reopen(Ledger(), 2, TERMS)
    after = settle(before, [Claim("a", 0, 3), Claim("b", 1, 2)], TERMS, ROUNDS[0])
    assert (after.trained, set(after.leases)) == (5, {"a", "b"})
    ((end, first),) = after.borders
    assert (
        before.frontier <= end < first and after.open == after.frontier - first == 2 * TERMS.lease
    )
    assert all(runs[0] >= first for lease in after.leases.values() for runs in lease.runs)
    assert find_refusals(after, [Claim("a", 6, 1)], TERMS).keys() == {"a"}, (
        "a unit of the stage before"
    )
    assert count(after.leases["a"].runs) == TERMS.lease


@pytest.mark.parametrize(
    "borders, closed, text",
    [
        ([[3, 2]], 0, "not in order"),
        ([[1, 99]], 0, "not in order"),
        ([[-1, 2]], 0, "greater than or equal to 0"),
        ([[1, 2]], 3, "more units are closed"),
        ([], 1, "more units are closed"),
        ([[1, 6]], 0, "of an earlier stage"),
    ],
)
def test_a_ledger_of_a_peer_with_impossible_borders_is_refused(
    borders: Sequence[Sequence[int]], closed: int, text: str
) -> None:
    values = f'"frontier":8,"returned":[[4,1,1]],"leases":{{}},"closed":{closed},'
    values += f'"borders":{[*map(list, borders)]}'
    with pytest.raises(MessageError, match=text):
        parse(Ledger, f"{{{values}}}")
