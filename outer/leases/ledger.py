"""The data ledger: which units of data committed rounds have trained, and which islands have leased
the other units.

A unit is the data of one inner step of one island: the sequences [u x S, (u + 1) x S) of the order
in which the text is read, for unit u and S sequences per inner step. Islands read the units that
are leased to them in order, and a commit settles what its participants have read, so no unit is
trained twice.

    unit      0 . . . . . . . . . . . . . . . . . . frontier . . . . . . . . . . . .
              trained, returned or leased           | never leased; islands without a lease read
                                                    here

Below the frontier every unit is in exactly one place: it is in a lease, returned, or trained. The
ledger is part of the committed state, and every participant derives the next ledger from the same
plan.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from outer.leases.ranges import MAX_UNIT, Ranges, UnitRange, append, count, deal, head, tail
from outer.leases.stages import MAX_STAGES, Border, Unit
from outer.leases.terms import Terms
from outer.network.endpoints import ISLAND_NAME
from outer.network.messages import Message, do_shared

NUM_SPARES = 16
"""Number of places beyond the frontier where an island without a lease may begin."""
MISSED_COMMITS = 1
"""Commits that an island may miss without losing its lease, because its progress may be
re-based.
"""
MAX_OPEN = 1 << 24
"""Limit for the leased and returned units of a ledger, and for the distance from the first to the
last of them.
"""
MAX_RANGES = 1 << 12
"""Maximum number of ranges in one lease, and in the list of returned units."""
Holder = Annotated[str, Field(max_length=64, pattern=f"^#?{ISLAND_NAME}$")]


class UnitsClaim(Protocol):
    """Claim of an island that it has read the first `units` units of the lease that begins with
    `first`, as in `Ready`.
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
    """The units that one island reads, in this order. No other island reads them."""

    runs: tuple[UnitRange, ...] = Field(min_length=1, max_length=MAX_RANGES)
    missed: int = Field(default=0, ge=0, le=MISSED_COMMITS)
    """Number of commits since the last one in which the island took part."""


class Ledger(Message):
    """The state of all units of data. Validation refuses a ledger that lists a unit twice."""

    frontier: int = Field(default=0, ge=0, le=MAX_UNIT)
    """First unit that has never been leased."""
    returned: tuple[UnitRange, ...] = Field(default=(), max_length=MAX_RANGES)
    """Units of leases that ended before they were trained, in ascending order."""
    leases: dict[Holder, Lease] = Field(default={}, max_length=4096)
    """Leases by island. `#i` stands for the island with index i until its first commit gives its
    name.
    """
    borders: tuple[Border, ...] = Field(default=(), max_length=MAX_STAGES)
    """The borders at which the stages after the first begin."""
    closed: int = Field(default=0, ge=0, le=MAX_UNIT)
    """Number of units below the last border that no committed round has trained, and none will
    train.
    """
    trained_by: dict[Holder, Unit] = Field(default={}, max_length=4096)
    """Number of trained units by island, for the islands in `Terms.counted`."""

    @model_serializer(mode="wrap")
    def _leave_out_stages(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that the run does not use, so that its digests stay as in earlier
        versions.
        """
        values = handler(self)
        used = {"borders": self.borders, "closed": self.borders, "trained_by": self.trained_by}
        return {name: value for name, value in values.items() if used.get(name, True)}

    @model_validator(mode="after")
    def _check_units(self) -> "Ledger":
        ranges = [
            *self.returned,
            *(units for lease in self.leases.values() for units in lease.runs),
        ]
        if any(units[-1] >= self.frontier for units in ranges):
            raise ValueError("a unit beyond the frontier is leased or returned")
        bounds = [unit for border in self.borders for unit in border]
        if (
            bounds != sorted(bounds)
            or bounds[-1:] > [self.frontier]
            or any(unit < 0 for unit in bounds)
        ):
            raise ValueError("the borders of stages are not in order")
        if bounds and any(units[0] < bounds[-1] for units in ranges):
            raise ValueError("a unit of an earlier stage is leased or returned")
        if self.closed > bounds[-1] if bounds else self.closed:
            raise ValueError("more units are closed than exist before the last border")
        if sum(map(len, ranges)) > MAX_OPEN:
            raise ValueError(f"more than {MAX_OPEN} units are leased or returned")
        if has_repetitions(ranges):
            raise ValueError("a unit is leased or returned twice")
        return self

    @cached_property
    def text(self) -> str:
        """The ledger as JSON, as it enters the digest of a state."""
        return self.model_dump_json()

    @cached_property
    def unnamed(self) -> dict[int, Ranges]:
        """Leases of islands whose names are not known yet, by the first unit of the lease."""
        return {
            lease.runs[0][0]: lease.runs
            for name, lease in self.leases.items()
            if name.startswith("#")
        }

    @property
    def trained(self) -> int:
        """Number of units that committed rounds have trained."""
        return self.frontier - self.open - self.closed

    @property
    def open(self) -> int:
        """Number of units below the frontier that no committed round has trained."""
        return count(self.returned) + sum(count(lease.runs) for lease in self.leases.values())


def has_repetitions(ranges: Sequence[range]) -> bool:
    """Return whether these ranges contain a unit twice. Raises ValueError if they span too many
    units.
    """
    if not ranges:
        return False
    first = min(r[0] for r in ranges)
    last = max(r[-1] for r in ranges)
    if last - first >= MAX_OPEN:
        raise ValueError(f"the leased and returned units span more than {MAX_OPEN} units")
    seen = np.zeros(last - first + 1, np.bool_)
    for each in ranges:
        units = seen[each[0] - first : each[-1] - first + 1 : each.step]
        if units.any():
            return True
        units[:] = True
    return False


def reopen(ledger: Ledger, num_islands: int, terms: Terms) -> Ledger:
    """Return the ledger for a new start: all units that are not trained are leased again, to
    indices 0, 1, ...
    """
    closed = [
        *ledger.returned,
        *(units for lease in ledger.leases.values() for units in lease.runs),
    ]
    needs = {placeholder(index): terms.lease for index in range(num_islands)}
    given, returned, frontier = deal(sorted(closed, key=itemgetter(0)), ledger.frontier, needs)
    return _build_ledger(
        ledger, frontier, returned, {name: Lease(runs=ranges) for name, ranges in given.items()}
    )


def begin_ledger(num_islands: int, terms: Terms) -> Ledger:
    """Return the ledger of a run that begins."""
    return do_shared(("ledger", num_islands, terms), lambda: reopen(Ledger(), num_islands, terms))


def placeholder(index: int) -> str:
    """Return the name that holds the lease of an island whose name is not known yet. No island can
    have such a name.
    """
    return f"#{index}"


def find_lease(ledger: Ledger, island: str, index: int, incarnation: str, terms: Terms) -> Ranges:
    """Return the units for an island without progress: its own lease, its index's lease, or units
    beyond the frontier.

    If two islands choose the same units there, a plan takes the first by name, and the other one
    chooses again afterwards.
    """
    for name in (island, placeholder(index)):
        if name in ledger.leases:
            return ledger.leases[name].runs
    salt = hashlib.sha256(f"{incarnation} {ledger.frontier}".encode()).digest()
    first = ledger.frontier + int.from_bytes(salt[:4]) % NUM_SPARES * terms.spare
    return (range(first, first + terms.spare),)


def extend_lease(
    ledger: Ledger, island: str, index: int, ranges: Ranges, num_read: int
) -> Ranges | None:
    """Return the units after `num_read` units of `ranges` for an island; None if they are not
    leased to it.
    """
    if not ranges:
        return None
    if island in ledger.leases:
        now = ledger.leases[island].runs
    elif ranges[0][0] >= ledger.frontier:
        now = ranges
    elif placeholder(index) in ledger.leases:
        now = ledger.leases[placeholder(index)].runs
    else:
        return None
    return now if [*chain(*head(now, num_read))] == [*chain(*head(ranges, num_read))] else None


def find_refusals(ledger: Ledger, claims: Sequence[UnitsClaim], terms: Terms) -> dict[str, str]:
    """Return the islands whose claims conflict with the ledger or an earlier claim, with the
    reasons.
    """
    causes: dict[str, str] = {}
    begun: dict[int, str] = {}
    for claim in claims:
        if claim.units == 0:
            continue
        ranges = _find_claimed_lease(ledger, claim, terms)
        if ranges is None:
            causes[claim.island] = (
                f"no lease of island {claim.island!r} begins with unit {claim.first}"
            )
        elif claim.units > count(ranges):
            causes[claim.island] = (
                f"island {claim.island!r} has read {claim.units} units, but {count(ranges)} are "
                "leased to it"
            )
        elif (other := _find_overlap(ledger, claim.first, begun, terms)) is not None:
            causes[claim.island] = f"islands {other!r} and {claim.island!r} have read the same data"
        else:
            begun[claim.first] = claim.island
    return causes


def settle(
    ledger: Ledger, claims: Sequence[UnitsClaim], terms: Terms, num_rounds: int = 0, tokens: int = 0
) -> Ledger:
    """Return the ledger after a commit with these claims, in plan order. None of them may be
    refused.

    The claimed units become trained. The participants' leases are filled up, first with returned
    units, then from the frontier. Leases of islands that have missed too many commits end, and
    their units are returned. `num_rounds` and `tokens` are those of the run with this commit. If a
    stage ends with them, all units so far are closed.
    """
    assert not (causes := find_refusals(ledger, claims, terms)), f"claims of a plan: {causes}"
    contributing = [claim for claim in claims if claim.units > 0]
    begun = {claim.first: claim.island for claim in contributing}
    settled = contributing + _find_new_observers(ledger, claims, begun, terms)
    frontier = ledger.frontier
    returned = list(ledger.returned)
    leases = {name: lease for name, lease in ledger.leases.items() if lease.runs[0][0] not in begun}
    for claim in sorted(settled, key=lambda claim: claim.first):
        ranges = _find_claimed_lease(ledger, claim, terms)
        assert ranges is not None, "it has not been refused"
        if claim.first >= frontier:
            returned += [range(frontier, claim.first)] if claim.first > frontier else []
            frontier = ranges[-1][-1] + 1
        leases[claim.island] = Lease.model_construct(runs=tail(ranges, claim.units), missed=0)
    leases, lapsed = _end_lapsed(leases, {claim.island for claim in claims})
    left = {c.island: leases[c.island].runs if c.island in leases else () for c in claims}
    # An observer gets a lease at its first commit, even if it has begun to read other units.
    needs = {
        c.island: terms.lease - count(left[c.island])
        for c in claims
        if c.island in leases or c.listens
    }
    dealt, returned, frontier = deal(
        sorted([*returned, *lapsed], key=itemgetter(0)), frontier, needs
    )
    leases |= {
        name: Lease(runs=reduce(append, ranges, left[name])) for name, ranges in dealt.items()
    }
    counted = {claim.island: claim.units for claim in contributing if claim.island in terms.counted}
    trained_by = ledger.trained_by | {
        name: ledger.trained_by.get(name, 0) + n for name, n in sorted(counted.items())
    }
    settled_ledger = _build_ledger(
        ledger, frontier, returned, leases, trained_by=dict(sorted(trained_by.items()))
    )
    # A commit of many tokens may end two short stages.
    while len(settled_ledger.borders) < terms.count_borders(num_rounds, tokens):
        settled_ledger = open_stage(settled_ledger, terms)
    return settled_ledger


def open_stage(ledger: Ledger, terms: Terms) -> Ledger:
    """Return the ledger at the border to a new stage: open units are closed, and all leases are
    new.
    """
    first = ledger.frontier + (NUM_SPARES + 1) * terms.spare
    needs = dict.fromkeys(sorted(ledger.leases), terms.lease)
    dealt, _, frontier = deal([], first, needs)
    leases = {
        name: Lease(runs=ranges, missed=ledger.leases[name].missed)
        for name, ranges in dealt.items()
    }
    borders = (*ledger.borders, Border(ledger.frontier, first))
    closed = ledger.closed + ledger.open + first - ledger.frontier
    return _build_ledger(ledger, frontier, (), leases, borders=borders, closed=closed)


def _find_claimed_lease(ledger: Ledger, claim: UnitsClaim, terms: Terms) -> Ranges | None:
    """Return the units that the island may read, or None if they do not begin with the first unit
    of the claim.
    """
    if own := ledger.leases.get(claim.island):
        return own.runs if own.runs[0][0] == claim.first else None
    if ledger.frontier <= claim.first < ledger.frontier + NUM_SPARES * terms.spare:
        return (range(claim.first, claim.first + terms.spare),)
    return ledger.unnamed.get(claim.first)


def _find_new_observers(
    ledger: Ledger, claims: Sequence[UnitsClaim], begun: dict[int, str], terms: Terms
) -> list[UnitsClaim]:
    """Return the new observers that get the units they began to read as a lease. Add them to
    `begun`.
    """
    granted: list[UnitsClaim] = []
    for claim in claims:
        is_new = claim.listens and claim.island not in ledger.leases
        has_lease = is_new and _find_claimed_lease(ledger, claim, terms) is not None
        if has_lease and _find_overlap(ledger, claim.first, begun, terms) is None:
            granted.append(claim)
            begun[claim.first] = claim.island
    return granted


def _find_overlap(ledger: Ledger, first: int, begun: Mapping[int, str], terms: Terms) -> str | None:
    """Return an island that began so close to this unit that both may have read the same units, or
    None.
    """
    if first in begun or first < ledger.frontier:
        return begun.get(first)
    near = (
        island
        for unit, island in begun.items()
        if unit >= ledger.frontier and abs(unit - first) < terms.spare
    )
    return next(near, None)


def _end_lapsed(
    leases: Mapping[str, Lease], present: set[str]
) -> tuple[dict[str, Lease], list[range]]:
    """Return (remaining leases, units of the leases whose islands have missed too many commits)."""
    missed = {name: 0 if name in present else lease.missed + 1 for name, lease in leases.items()}
    kept = [name for name in leases if missed[name] <= MISSED_COMMITS]
    lapsed = [units for name, lease in leases.items() if name not in kept for units in lease.runs]
    return {name: leases[name].model_copy(update={"missed": missed[name]}) for name in kept}, lapsed


def _build_ledger(
    before: Ledger,
    frontier: int,
    returned: Iterable[range],
    leases: Mapping[str, Lease],
    **others: Any,
) -> Ledger:
    """Return the ledger after `before` with these units. `others`: other changed fields."""
    kept = {"borders": before.borders, "closed": before.closed, "trained_by": before.trained_by}
    # Validation is skipped, because it takes time in proportion to the open units in every commit.
    return Ledger.model_construct(
        frontier=frontier,
        returned=tuple(sorted(returned, key=itemgetter(0))),
        leases=dict(sorted(leases.items())),
        **(kept | others),
    )
