"""The assignment of parts to the participants that reduce them: equal shares, or larger ones for
faster links.

Of a model of P bytes, an island that reduces the share s of the parts sends (1 - s) P of its own
pseudo-gradient to the other reducers, and the means s P to n - 1 islands. Over a link of rate u
that takes

    T = (1 + s (n - 2)) P / u

The shares add up to 1, so the round takes at least T = (2 n - 2) P / (sum of all u), and at least P
/ u on the slowest link. An island that ends by then has a share of (T u / P - 1) / (n - 2) at most.
Of all such shares the most equal ones are taken. With two islands both send P, whatever the shares.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from outer.agreement.messages import Plan

SLOTS_PER_ISLAND = 16
"""Number of parts per island in one turn over all islands. It sets the precision of unequal
shares."""


class Assignment:
    """The reducer of each part in a plan. Every participant computes the same assignment from
    the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._turn = [
            plan.names[index] for index in _find_turn(tuple(p.link_kbit for p in plan.participants))
        ]

    def reducer_of(self, part: int) -> str:
        return self._turn[part % len(self._turn)]


@lru_cache(maxsize=32)
def _find_turn(rates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the participants that reduce the parts of a turn. Cached, because fractions are
    slow and most plans have the last rates.
    """
    return tuple(take_turns(reduce_shares(rates), SLOTS_PER_ISLAND * len(rates)))


def reduce_shares(rates: Sequence[int]) -> list[Fraction]:
    """Return the share of the parts that each island reduces. The shares are equal if a rate is 0,
    which means unknown.

    >>> [str(share) for share in reduce_shares([100, 100, 100, 100])]
    ['1/4', '1/4', '1/4', '1/4']
    >>> [str(share) for share in reduce_shares([100, 100, 100, 20])]
    ['1/3', '1/3', '1/3', '0']
    >>> [str(share) for share in reduce_shares([100, 90, 80])]
    ['13/27', '1/3', '5/27']
    """
    num_islands = len(rates)
    if num_islands <= 2 or 0 in rates:
        return [Fraction(1, num_islands)] * num_islands
    time = max(Fraction(2 * num_islands - 2, sum(rates)), Fraction(1, min(rates)))
    shares = [Fraction(0)] * num_islands
    rest = Fraction(1)
    for place, index in enumerate(sorted(range(num_islands), key=lambda index: rates[index])):
        shares[index] = min(
            (time * rates[index] - 1) / (num_islands - 2), rest / (num_islands - place)
        )
        rest -= shares[index]
    return shares


def take_turns(shares: Sequence[Fraction], num_slots: int) -> list[int]:
    """Return indices in an order in which each has its share of `num_slots` places, spread
    evenly. The shares add up to 1.
    """
    counts = [int(share * num_slots) for share in shares]
    rest = sorted(
        range(len(shares)), key=lambda index: (counts[index] - shares[index] * num_slots, index)
    )
    for index in rest[: num_slots - sum(counts)]:
        counts[index] += 1
    # The division of two integers is rounded in the same way on every machine.
    places = [
        ((2 * k + 1) / (2 * count), index)
        for index, count in enumerate(counts)
        for k in range(count)
    ]
    return [index for _, index in sorted(places)]
