"""An island's own record of reducers that it audited: it takes part in no plan with a distrusted
one.

wrong mean: distrusted for 64 rounds, then 256, ...; the fault is certain, at least to this island.

nothing shown: distrusted for 0, 1, 3, 7, ... rounds, because a link may be at fault; never if there
are two islands.

An entry is forgotten FORGET_ROUNDS after it has ended. Other islands treat this island's refusal
like any other accusation (outer/agreement/suspicions.py).
"""

from dataclasses import dataclass

from outer.agreement.messages import Plan

WRONG_ROUNDS = 64
"""Rounds of distrust after the first wrong mean. The number is multiplied by 4 for each further
one."""
MAX_ROUNDS = 1 << 14
FORGET_ROUNDS = 64


@dataclass(frozen=True)
class _Entry:
    num_wrong: int
    num_hidden: int
    until: int
    """The island is distrusted in the rounds before this one."""


class Distrust:
    """The distrusted islands. Every rank of an island keeps its own copy, updated from the same
    audits.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def note(self, round_number: int, island: str, *, is_wrong: bool) -> None:
        """Record that an audit in this round found the island at fault: a wrong mean
        (`is_wrong`), or missing evidence.
        """
        old = self._entries.get(island, _Entry(0, 0, 0))
        if round_number >= old.until + FORGET_ROUNDS:
            old = _Entry(0, 0, 0)
        wrong = old.num_wrong + is_wrong
        hidden = old.num_hidden + (not is_wrong)
        rounds = WRONG_ROUNDS * 4 ** (wrong - 1) if is_wrong else 2 ** (hidden - 1)
        self._entries[island] = _Entry(
            wrong, hidden, max(old.until, round_number + min(rounds, MAX_ROUNDS))
        )

    def find(self, plan: Plan) -> tuple[str, str] | None:
        """Return a participant with which this island takes part in no plan of this round, and
        the reason; or None.
        """
        for name in plan.names:
            entry = self._entries.get(name)
            if entry is None or plan.round >= entry.until:
                continue
            if entry.num_wrong:
                return name, f"audits have found {entry.num_wrong} wrong means of island {name!r}"
            if entry.num_hidden > 1 and len(plan.names) > 2:
                return (
                    name,
                    f"island {name!r} did not show the payloads of {entry.num_hidden} parts that "
                    "it reduced",
                )
        return None
