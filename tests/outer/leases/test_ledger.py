"""Every unit of data is trained once, whichever islands die, join, return or miss commits."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outer.errors import MessageError
from outer.leases.cursor import LeaseCursor
from outer.leases.ledger import (
    NUM_SPARES,
    Lease,
    Ledger,
    Terms,
    find_lease,
    find_refusals,
    reopen,
    settle,
)
from outer.leases.ranges import append, count, deal, head, tail
from outer.network.messages import parse

TERMS = Terms(inner_steps=3)


@dataclass(frozen=True)
class Claim:
    island: str
    first: int
    units: int
    listens: bool = False


def parse_ledger(text: str) -> Ledger:
    return parse(Ledger, text)


def opened(num_islands: int) -> Ledger:
    return reopen(Ledger(), num_islands, TERMS)


def units_of(runs: tuple[range, ...]) -> list[int]:
    return [unit for run in runs for unit in run]


def open_units(ledger: Ledger) -> list[int]:
    leased = [unit for lease in ledger.leases.values() for unit in units_of(lease.runs)]
    return [*units_of(ledger.returned), *leased]


@dataclass
class Island:
    """Uses the ledger like outer/loop.py. `read`: units really read that no commit has settled."""

    name: str
    index: int
    incarnation: str
    ledger: Ledger
    num_missed: int = 0
    read: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cursor = LeaseCursor(self.name, self.index, self.incarnation, TERMS)
        self.cursor.begin(0, self.ledger)

    def train(self, number: int) -> None:
        for _ in range(min(number, self.cursor.num_left)):
            self.read.append(self.cursor.next_unit())

    @property
    def claim(self) -> Claim:
        assert units_of(self.cursor.read) == self.read
        return Claim(self.name, self.read[0] if self.read else 0, len(self.read))

    def commit(self, ledger: Ledger, number: int) -> None:
        self.ledger, self.num_missed = ledger, 0
        self.cursor.settle(0, ledger, number)
        del self.read[:number]

    def catch_up(self, ledger: Ledger, *, keeps: bool) -> None:
        """Take the state of others. `keeps`: the progress may be re-based on it."""
        self.ledger, may_keep = ledger, keeps and self.num_missed == 1
        self.num_missed = 0
        if not (may_keep and self.cursor.keep(ledger)):
            self.cursor.begin(0, ledger)
            self.read.clear()


class World:
    """Islands in one history, and the units that its committed rounds have really trained."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_start, self.num_lives = self.random.randint(1, 4), 0
        self.ledger = opened(self.num_start)
        self.trained: list[int] = []
        self.islands = {f"i{k}": self.new(f"i{k}", k) for k in range(self.num_start)}

    def new(self, name: str, index: int) -> Island:
        self.num_lives += 1
        return Island(name, index, f"{self.num_lives:08x}", self.ledger)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def come_and_go(self) -> None:
        """Kill islands, restart some under the same name, and let others join, several at once."""
        for name in [name for name in self.islands if len(self.islands) > 1 and self.chance(0.1)]:
            del self.islands[name]
        for index in range(self.num_start + 4):
            if f"i{index}" not in self.islands and self.chance(0.2):
                self.islands[f"i{index}"] = self.new(f"i{index}", index)

    def round(self) -> list[str]:
        """Commit a round of some islands that hold the newest state. Returns the refused
        islands.
        """
        for island in self.islands.values():
            island.train(self.random.randint(0, 5))
        ready = [
            i for _, i in sorted(self.islands.items()) if i.num_missed == 0 and self.chance(0.85)
        ]
        causes = find_refusals(self.ledger, [i.claim for i in ready], TERMS)
        participants = [i for i in ready if i.name not in causes]
        if not participants:
            return []
        claims = [i.claim for i in participants]
        for island in [i for i in participants if i.read]:
            # More units are read while the round is in flight.
            island.train(self.random.randint(0, 3) * self.chance(0.5))
        restarted = self.restart_after_vote(participants)
        before, self.ledger = self.ledger, settle(self.ledger, claims, TERMS)
        for island, claim in zip(participants, claims, strict=True):
            self.trained += island.read[: claim.units]
            if island.name not in restarted:
                # Each island derives the next ledger by itself.
                island.commit(settle(island.ledger, claims, TERMS), claim.units)
                assert island.ledger.model_dump_json() == self.ledger.model_dump_json()
        assert self.ledger.frontier >= before.frontier
        self.leave_behind(
            [i for i in self.islands.values() if i.name in restarted or i not in participants]
        )
        return list(causes)

    def restart_after_vote(self, participants: list[Island]) -> set[str]:
        """Restart some islands after their vote, with the state before the commit that contains
        their progress.
        """
        names = {i.name for i in participants[1:] if self.chance(0.05)}
        for name in names:
            self.islands[name] = self.new(name, self.islands[name].index)
            self.islands[name].train(2)
        return names

    def leave_behind(self, others: list[Island]) -> None:
        for island in others:
            island.num_missed += 1
            if self.chance(0.7):
                island.catch_up(self.ledger, keeps=self.chance(0.8))

    def check(self) -> None:
        """Check that each unit below the frontier is trained, leased or returned, exactly once."""
        assert len(self.trained) == self.ledger.trained
        assert sorted(self.trained + open_units(self.ledger)) == list(range(self.ledger.frontier))


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.slow)], ids=str
)
def test_no_unit_is_trained_twice_and_none_is_lost_whatever_happens_to_islands(
    seeds: range,
) -> None:
    num_refused = 0
    for seed in seeds:
        world = World(seed)
        for _ in range(20):
            world.come_and_go()
            num_refused += len(world.round())
            world.check()
        world.ledger = parse_ledger(world.ledger.model_dump_json())
        drain(world)
    assert num_refused > 0, "joiners have met at one place"


def drain(world: World) -> None:
    """After a resume with other islands the open units are trained first."""
    wanted = set(open_units(world.ledger))
    world.ledger = reopen(world.ledger, 3, TERMS)
    world.islands = {f"n{k}": world.new(f"n{k}", k) for k in range(3)}
    for _ in range(-(-len(wanted) // (3 * TERMS.inner_steps)) + 1):
        for island in world.islands.values():
            island.train(TERMS.inner_steps)
        claims = [island.claim for island in world.islands.values()]
        world.ledger = settle(world.ledger, claims, TERMS)
        for island in world.islands.values():
            world.trained += island.read
            island.commit(world.ledger, len(island.read))
        world.check()
    assert wanted <= set(world.trained)


@pytest.mark.parametrize("num_islands", [1, 2, 5])
def test_islands_that_all_live_read_as_one_data_parallel_run(num_islands: int) -> None:
    ledger = opened(num_islands)
    islands = [Island(f"i{k}", k, "0" * 8, ledger) for k in range(num_islands)]
    for round_number in range(6):
        for step in range(TERMS.inner_steps):
            for island in islands:
                island.train(1)
            row = (round_number * TERMS.inner_steps + step) * num_islands
            assert [island.read[-1] for island in islands] == list(range(row, row + num_islands))
        ledger = settle(ledger, [island.claim for island in islands], TERMS)
        for island in islands:
            island.commit(ledger, TERMS.inner_steps)
    assert ledger.returned == () and all(len(lease.runs) == 1 for lease in ledger.leases.values())


def test_a_dead_islands_units_are_read_next_by_the_others_after_two_commits() -> None:
    ledger = opened(2)
    left, lost = Island("a", 0, "0" * 8, ledger), Island("b", 1, "1" * 8, ledger)
    read: list[int] = []
    for _ in range(8):
        left.train(TERMS.inner_steps)
        read += left.read
        left.commit(settle(left.ledger, [left.claim], TERMS), TERMS.inner_steps)
    assert left.ledger.leases.keys() == {"a"} and left.ledger.returned == ()
    assert {unit for run in lost.cursor.read for unit in run} == set() and set(
        range(1, 12, 2)
    ) < set(read)


def test_an_island_that_missed_one_commit_keeps_its_lease_and_one_that_missed_two_does_not() -> (
    None
):
    ledger = opened(2)
    first, second = Island("a", 0, "0" * 8, ledger), Island("b", 1, "1" * 8, ledger)
    second.train(2)
    for kept in (True, False):
        first.train(1)
        first.commit(settle(first.ledger, [first.claim], TERMS), 1)
        assert second.cursor.keep(first.ledger) is kept


def test_of_two_that_begin_at_one_place_the_first_by_name_is_in_the_plan() -> None:
    ledger = opened(1)
    claims = [Claim(name, ledger.frontier, 2) for name in ("x", "y")]
    assert find_refusals(ledger, claims, TERMS).keys() == {"y"}
    assert "'x' and 'y' have read the same data" in find_refusals(ledger, claims, TERMS)["y"]
    near = replace(claims[1], first=ledger.frontier + TERMS.spare - 1)
    apart = replace(claims[1], first=ledger.frontier + TERMS.spare)
    assert find_refusals(ledger, [claims[0], near], TERMS) and not find_refusals(
        ledger, [claims[0], apart], TERMS
    )


def test_the_gap_before_a_joiners_place_is_read_next() -> None:
    ledger = opened(1)
    start = ledger.frontier
    after = settle(ledger, [Claim("a", 0, 3), Claim("x", start + 2 * TERMS.spare, 1)], TERMS)
    assert after.leases.keys() == {"a", "x"} and after.frontier == start + 3 * TERMS.spare
    assert set(range(start, start + 3)) < set(
        units_of(after.leases["a"].runs) + units_of(after.leases["x"].runs)
    )


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Claim("a", 1, 1), "no lease of island 'a' begins with unit 1"),
        (
            Claim("a", 0, TERMS.lease + 1),
            f"has read {TERMS.lease + 1} units, but {TERMS.lease} are leased to it",
        ),
        (Claim("x", 10**9, 1), "no lease of island 'x' begins"),
        (Claim("x", TERMS.lease, TERMS.spare + 1), f"{TERMS.spare} are leased"),
    ],
)
def test_a_claim_that_the_account_does_not_bear_is_refused(claim: Claim, text: str) -> None:
    assert text in find_refusals(opened(1), [claim], TERMS)[claim.island]


def test_an_island_that_read_nothing_is_in_any_plan_and_gets_no_lease() -> None:
    claims = [Claim("a", 0, 2), Claim("listener", 0, 0)]
    assert not find_refusals(opened(1), claims, TERMS)
    assert settle(opened(1), claims, TERMS).leases.keys() == {"a"}


def test_a_joiners_place_follows_from_its_incarnation() -> None:
    ledger = opened(2)
    places = [find_lease(ledger, "x", 7, f"{life:08x}", TERMS)[0][0] for life in range(200)]
    assert {(place - ledger.frontier) % TERMS.spare for place in places} == {0}
    assert len(set(places)) == NUM_SPARES and min(places) == ledger.frontier


LEASES = '{"#0":{"runs":[[0,2,2]],"missed":0},"b":{"runs":[[23,1,1]],"missed":1}}'
GOOD = '{"frontier":24,"returned":[[5,2,3]],"leases":' + LEASES + "}"
BAD = {
    "not JSON": GOOD[:-1],
    "a unit twice": GOOD.replace("[[5,2,3]]", "[[2,2,3]]"),
    "beyond the frontier": GOOD.replace("[23,1,1]", "[23,2,1]"),
    "a run without end": GOOD.replace("[5,2,3]", f"[5,{1 << 70},3]"),
    "too many units": GOOD.replace("24", str(1 << 50)).replace("[23,1,1]", f"[23,{1 << 40},1]"),
    "an empty run": GOOD.replace("[5,2,3]", "[5,0,3]"),
    "a stride of nothing": GOOD.replace("[5,2,3]", "[5,2,0]"),
    "a run of two numbers": GOOD.replace("[5,2,3]", "[5,2]"),
    "no number": GOOD.replace("[5,2,3]", '["5",2,3]'),
    "true for a number": GOOD.replace("[5,2,3]", "[5,true,3]"),
    "a lease of nothing": GOOD.replace("[[23,1,1]]", "[]"),
    "a name that cannot be": GOOD.replace('"b"', '"b/c"'),
    "another key": GOOD.replace('"frontier"', '"more":1,"frontier"'),
    "missed too much": GOOD.replace('"missed":1', '"missed":2'),
    "a negative frontier": GOOD.replace("24", "-1"),
}


def test_an_account_in_json_is_the_same_account() -> None:
    assert parse_ledger(GOOD).model_dump_json() == GOOD
    assert parse_ledger(GOOD).trained == 24 - 5 and parse_ledger(GOOD).open == 5


@pytest.mark.parametrize("kind", BAD)
def test_json_that_is_no_account_is_refused(kind: str) -> None:
    assert BAD[kind] != GOOD
    with pytest.raises(MessageError, match="not a Ledger"):
        parse_ledger(BAD[kind])


@given(
    needs=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 9), max_size=4),
)
def test_what_is_dealt_and_what_is_left_are_the_pool_and_what_follows(
    needs: list[int], sizes: list[int]
) -> None:
    pool = [range(100 * i, 100 * i + 7 * size, 7) for i, size in enumerate(sizes)]
    given_out, left, frontier = deal(pool, 1000, {str(i): need for i, need in enumerate(needs)})
    assert [count(runs) for runs in given_out.values()] == needs
    dealt = [unit for runs in given_out.values() for unit in units_of(runs)]
    everything = [unit for run in pool for unit in run] + list(range(1000, frontier))
    assert sorted(dealt + units_of(tuple(left))) == sorted(everything)
    assert not left or frontier == 1000


@given(sizes=st.lists(st.integers(1, 6), max_size=5), number=st.integers(0, 30))
def test_head_and_tail_cut_runs_in_two(sizes: list[int], number: int) -> None:
    runs: tuple[range, ...] = ()
    for i, size in enumerate(sizes):
        runs = append(runs, range(6 * i, 6 * i + size))
    assert units_of(head(runs, number)) == units_of(runs)[:number]
    assert units_of(tail(runs, number)) == units_of(runs)[number:]
    assert all(head(runs, number)) and all(tail(runs, number))


def test_a_lease_knows_no_empty_runs() -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        Lease(runs=())


def test_who_listens_keeps_the_lease_that_it_has_begun_however_often_others_give() -> None:
    ledger = opened(2)
    mine = ledger.leases["#1"].runs
    for _ in range(5):
        first = ledger.leases["a"].runs[0][0] if "a" in ledger.leases else 0
        ledger = settle(
            ledger, [Claim("a", first, 2), Claim("b", mine[0][0], 0, listens=True)], TERMS
        )
    assert ledger.leases["b"].runs[0] == mine[0] and ledger.leases.keys() == {"a", "b"}
    assert ledger.trained == 10
    assert not find_refusals(ledger, [Claim("b", mine[0][0], TERMS.lease)], TERMS)


def test_a_joiner_that_listens_keeps_its_place_beyond_the_frontier() -> None:
    ledger = opened(1)
    place = ledger.frontier + TERMS.spare
    ledger = settle(ledger, [Claim("a", 0, 2), Claim("x", place, 0, listens=True)], TERMS)
    assert units_of(ledger.leases["x"].runs)[: TERMS.spare] == list(
        range(place, place + TERMS.spare)
    )
    assert ledger.trained == 2


def test_who_listens_where_another_gives_gets_another_lease() -> None:
    ledger = opened(1)
    claims = [
        Claim("a", 0, 2),
        Claim("x", ledger.frontier, 0, listens=True),
        Claim("y", ledger.frontier, 2),
    ]
    after = settle(ledger, claims, TERMS)
    assert not set(units_of(after.leases["x"].runs)) & set(units_of(after.leases["y"].runs))
    assert after.leases.keys() == {"a", "x", "y"} and after.trained == 4
