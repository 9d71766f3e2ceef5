"""The account of the data: which units have been trained in committed rounds, and whose the others are.

A unit is one inner step's sequences of one island: the positions [u x S, (u + 1) x S) of the order in which the text
is read. Islands read units that are leased to them, in order; a committed round settles what its participants read.

    unit      0 . . . . . . . . . . . . . . . . . . frontier . . . . . . . . . . . .
              trained, or returned, or leased       | never leased; who has no lease reads here

Below the frontier a unit is in one place: in a lease, among those returned, or trained. The account is part of the
committed state: every participant makes the next one of the same plan.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field, model_validator

from outer.rounds import Message, parse
from outer.runs import MAX_UNIT, Run, Runs, append, count, deal, head, tail

LEASE_ROUNDS = 4
"""Units of a lease, in rounds: one made, one on its way, and as much again that was put on top of another state."""
SPARE_ROUNDS = 2
"""Of what an island without a lease reads until its first commit."""
NUM_SPARES = 16
"""Places beyond the frontier where an island without a lease may begin."""
MISSED_COMMITS = 1
"""An island may miss so many and keep its lease: its progress may be put on top of the later state."""
MAX_OPEN = 1 << 24
"""Units that a peer's or a file's account may have leased or returned."""
Holder = Annotated[str, Field(max_length=64, pattern=r"^#?[A-Za-z0-9._-]+$")]


class Claim(Protocol):
    """What an island says that its progress has read: `units` units of the lease that begins with `first`.

    `listens`: it gives none of them to this round, and goes on with them (outer/rounds.py).
    """

    @property
    def island(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def listens(self) -> bool: ...


class Lease(Message):
    """Units that one island reads, in this order."""

    runs: tuple[Run, ...] = Field(min_length=1)
    missed: int = Field(default=0, ge=0, le=MISSED_COMMITS)
    """Commits since the island took part in one."""


class Account(Message):
    """Whose the units are. From a peer or a file it is refused when two places have the same unit."""

    frontier: int = Field(default=0, ge=0, le=MAX_UNIT)
    """The first unit that has never been leased."""
    returned: tuple[Run, ...] = ()
    """Leased once, never trained, nobody's now; lowest first."""
    leases: dict[Holder, Lease] = Field(default={}, max_length=4096)
    """By island. `#i`: of the island with index i, whose name is not known before it takes part."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Account":
        runs = [*self.returned, *(run for lease in self.leases.values() for run in lease.runs)]
        if any(run[-1] >= self.frontier for run in runs):
            raise ValueError("a unit beyond the frontier is leased or returned")
        if sum(map(len, runs)) > MAX_OPEN:
            raise ValueError(f"more than {MAX_OPEN} units are leased or returned")
        units = np.concatenate([np.arange(r.start, r.stop, r.step) for r in runs] or [np.empty(0, np.int64)])
        if len(np.unique(units)) < len(units):
            raise ValueError("a unit is leased or returned twice")
        return self

    @property
    def trained(self) -> int:
        """Units in committed rounds."""
        return self.frontier - self.open

    @property
    def open(self) -> int:
        """Units below the frontier that no committed round has trained."""
        return count(self.returned) + sum(count(lease.runs) for lease in self.leases.values())


class Terms(Message):
    """How much is leased; the same on every island."""

    inner_steps: int = Field(ge=1)

    @property
    def lease(self) -> int:
        """Units to which a lease is filled up after each commit."""
        return LEASE_ROUNDS * self.inner_steps

    @property
    def spare(self) -> int:
        """Units that an island without a lease may read before its first commit."""
        return SPARE_ROUNDS * self.inner_steps


def reopen(account: Account, num_islands: int, terms: Terms) -> Account:
    """The same units trained, every other one to be read again; leases for islands with the indices 0, 1, ..."""
    closed = [*account.returned, *(run for lease in account.leases.values() for run in lease.runs)]
    needs = {seat(index): terms.lease for index in range(num_islands)}
    given, returned, frontier = deal(sorted(closed, key=_first), account.frontier, needs)
    return _account(frontier, returned, {name: Lease(runs=runs) for name, runs in given.items()})


def seat(index: int) -> str:
    """Who has a lease before its island has said its name; no island can be called so."""
    return f"#{index}"


def lease_for(account: Account, island: str, index: int, incarnation: str, terms: Terms) -> Runs:
    """What an island with no progress is to read: its own lease, its index's, or a place beyond the frontier.

    Of two that begin at one place a plan takes the first by name. The other chooses anew after that commit.
    """
    for name in (island, seat(index)):
        if name in account.leases:
            return account.leases[name].runs
    salt = hashlib.sha256(f"{incarnation} {account.frontier}".encode()).digest()
    first = account.frontier + int.from_bytes(salt[:4]) % NUM_SPARES * terms.spare
    return (range(first, first + terms.spare),)


def still_leased(account: Account, island: str, index: int, runs: Runs, num_read: int) -> Runs | None:
    """What an island goes on reading that has read `num_read` units of `runs`; None: they are not its own any more."""
    if not runs:
        return None
    if island in account.leases:
        now = account.leases[island].runs
    elif runs[0][0] >= account.frontier:
        now = runs
    elif seat(index) in account.leases:
        now = account.leases[seat(index)].runs
    else:
        return None
    return now if _units(head(now, num_read)) == _units(head(runs, num_read)) else None


def refused(account: Account, claims: Sequence[Claim], terms: Terms) -> dict[str, str]:
    """Islands that cannot be in one plan with those before them, and why. An island that read nothing can."""
    causes: dict[str, str] = {}
    begun: dict[int, str] = {}
    for claim in claims:
        if claim.units == 0:
            continue
        runs = _claimed(account, claim, terms)
        if runs is None:
            causes[claim.island] = f"no lease of island {claim.island!r} begins with unit {claim.first}"
        elif claim.units > count(runs):
            causes[claim.island] = f"island {claim.island!r} has read {claim.units} units, {count(runs)} are leased"
        elif (other := _same_place(account, claim.first, begun, terms)) is not None:
            causes[claim.island] = f"islands {other!r} and {claim.island!r} have read the same data"
        else:
            begun[claim.first] = claim.island
    return causes


def settle(account: Account, claims: Sequence[Claim], terms: Terms) -> Account:
    """The account after a commit of these participants, in plan order; none of them is refused.

    What they gave is trained. Their leases are filled up, every n-th unit to each of n, from the lowest units returned
    and then from the frontier. Who has missed too many commits has no lease any more.
    """
    assert not (causes := refused(account, claims, terms)), f"claims of a plan: {causes}"
    given = [claim for claim in claims if claim.units > 0]
    made = sorted([*given, *_seated(account, claims, given, terms)], key=lambda c: c.first)
    begun = {claim.first for claim in made}
    frontier, returned = account.frontier, list(account.returned)
    leases = {name: lease for name, lease in account.leases.items() if lease.runs[0][0] not in begun}
    for claim in made:
        runs = _claimed(account, claim, terms)
        assert runs is not None, "it has not been refused"
        if claim.first >= frontier:
            returned += [range(frontier, claim.first)] if claim.first > frontier else []
            frontier = runs[-1][-1] + 1
        leases[claim.island] = Lease.model_construct(runs=tail(runs, claim.units), missed=0)
    leases, lapsed = _without_lapsed(leases, {claim.island for claim in claims})
    runs_of = {c.island: leases[c.island].runs if c.island in leases else () for c in claims}
    # Who listens has a lease from its first commit on, be it another one than it has begun.
    needs = {c.island: terms.lease - count(runs_of[c.island]) for c in claims if c.island in leases or c.listens}
    dealt, returned, frontier = deal(sorted([*returned, *lapsed], key=_first), frontier, needs)
    leases |= {name: Lease(runs=_extended(runs_of[name], runs)) for name, runs in dealt.items()}
    return _account(frontier, returned, leases)


def to_json(account: Account) -> str:
    """For a checkpoint."""
    return account.model_dump_json()


def from_json(text: str | bytes) -> Account:
    """Raises MessageError unless it is an account that adds up."""
    return parse(Account, text.encode() if isinstance(text, str) else text)


def _claimed(account: Account, claim: Claim, terms: Terms) -> Runs | None:
    """The units that the island is entitled to read, if its claim begins with the first of them."""
    if own := account.leases.get(claim.island):
        return own.runs if own.runs[0][0] == claim.first else None
    if account.frontier <= claim.first < account.frontier + NUM_SPARES * terms.spare:
        return (range(claim.first, claim.first + terms.spare),)
    seats = (lease.runs for name, lease in account.leases.items() if name.startswith("#"))
    return next((runs for runs in seats if runs[0][0] == claim.first), None)


def _seated(account: Account, claims: Sequence[Claim], given: Sequence[Claim], terms: Terms) -> list[Claim]:
    """Of those that listen and have no lease in their own name: those that get the one that they have begun."""
    seated: list[Claim] = []
    begun = {claim.first: claim.island for claim in given}
    for claim in claims:
        is_new = claim.listens and claim.island not in account.leases
        if is_new and _claimed(account, claim, terms) and _same_place(account, claim.first, begun, terms) is None:
            seated.append(claim)
            begun[claim.first] = claim.island
    return seated


def _same_place(account: Account, first: int, begun: Mapping[int, str], terms: Terms) -> str | None:
    """Who has begun with this unit, or so near beyond the frontier that both may have read the same."""
    for unit, island in begun.items():
        if unit == first or (min(unit, first) >= account.frontier and abs(unit - first) < terms.spare):
            return island
    return None


def _without_lapsed(leases: Mapping[str, Lease], present: set[str]) -> tuple[dict[str, Lease], list[range]]:
    """(the leases kept, the runs of those whose islands have missed too many commits)"""
    kept: dict[str, Lease] = {}
    lapsed: list[range] = []
    for name, lease in leases.items():
        missed = 0 if name in present else lease.missed + 1
        if missed > MISSED_COMMITS:
            lapsed += lease.runs
        else:
            kept[name] = lease.model_copy(update={"missed": missed})
    return kept, lapsed


def _extended(runs: Runs, more: Runs) -> Runs:
    for run in more:
        runs = append(runs, run)
    return runs


def _account(frontier: int, returned: Iterable[range], leases: Mapping[str, Lease]) -> Account:
    in_order = {name: leases[name] for name in sorted(leases)}
    # Not checked again: that takes as long as all open units are many, on every island in every commit.
    return Account.model_construct(frontier=frontier, returned=tuple(sorted(returned, key=_first)), leases=in_order)


def _first(run: range) -> int:
    return run[0]


def _units(runs: Runs) -> list[int]:
    return [unit for run in runs for unit in run]
