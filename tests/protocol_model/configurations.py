"""What the model of the round protocol is checked with: islands, faults, and rules that are taken
away.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "violated"]
Search = Literal["whole", "bitstate"]


@dataclass(frozen=True)
class Configuration:
    """One run of Spin. `defines`: words that the model is compiled with, as for `-D`."""

    name: str
    model: str
    defines: str
    expected: Verdict = "holds"
    search: Search = "whole"
    """`bitstate` keeps a few bits of each state: states can be taken for one another and left
    out.
    """
    is_quick: bool = False
    """Whether it ends within seconds. Quick ones are part of the slow tests."""

    @property
    def is_liveness(self) -> bool:
        return "LIVENESS" in self.defines.split()


AGREEMENT = "agreement.pml"
HISTORIES = "histories.pml"
BLAME = "blame.pml"
VOTES_3 = "N=3 A=1 VOTES_ONLY"
VOTES_4 = "N=4 A=1 VOTES_ONLY"
ROUND_3 = "N=3 A=3 QUORUM=2"
ROUND_4 = "N=4 A=2 QUORUM=3"
RUN_3 = "N=3 ROUNDS=2 QUORUM=2"


def quick(name: str, model: str, defines: str, expected: Verdict = "holds") -> Configuration:
    return Configuration(name, model, defines, expected, is_quick=True)


CONFIGURATIONS = (
    quick("votes: 2 crashes", AGREEMENT, f"{VOTES_3} CRASHES=2"),
    quick("votes: a freeze", AGREEMENT, f"{VOTES_3} FREEZES=1"),
    quick(
        "votes: a freeze, a loss leads to an outcome query",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 LOSS_BINDS",
    ),
    quick("votes through the planner: 2 crashes", AGREEMENT, f"{VOTES_3} CRASHES=2 COORDINATOR"),
    quick("votes through the planner: a freeze", AGREEMENT, f"{VOTES_3} FREEZES=1 COORDINATOR"),
    quick(
        "votes through the planner: 2 crashes, a loss leads to an outcome query",
        AGREEMENT,
        f"{VOTES_3} CRASHES=2 COORDINATOR LOSS_BINDS ENDS",
    ),
    quick(
        "votes through the planner: a freeze, a loss leads to an outcome query",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 COORDINATOR LOSS_BINDS",
    ),
    quick("votes: a liar", AGREEMENT, f"{VOTES_3} LIAR=2"),
    Configuration("votes: a liar and a crash", AGREEMENT, f"{VOTES_3} LIAR=2 CRASHES=1"),
    Configuration("round: 2 crashes", AGREEMENT, "N=3 A=3 CRASHES=2"),
    Configuration("round: a crash and a restart", AGREEMENT, f"{ROUND_3} CRASHES=1 RESTARTS=1"),
    Configuration("round: a freeze", AGREEMENT, "N=3 A=2 QUORUM=2 FREEZES=1"),
    Configuration("round: a liar that plans", AGREEMENT, "N=3 A=1 LIAR=0"),
    quick("round ends: a crash", AGREEMENT, f"{ROUND_3} CRASHES=1 LIVENESS"),
    quick("round ends: a crash", AGREEMENT, f"{ROUND_3} CRASHES=1 ENDS"),
    quick("round ends: a crash and a restart", AGREEMENT, f"{ROUND_3} CRASHES=1 RESTARTS=1 ENDS"),
    quick("round ends: a freeze", AGREEMENT, "N=3 A=2 QUORUM=2 FREEZES=1 LOSS_BINDS ENDS"),
    quick("votes end: a freeze", AGREEMENT, f"{VOTES_3} FREEZES=1 LOSS_BINDS ENDS"),
    quick("votes end: a liar and a crash", AGREEMENT, f"{VOTES_3} LIAR=2 CRASHES=1 ENDS"),
    Configuration("votes: a crash", AGREEMENT, f"{VOTES_4} CRASHES=1 MORTAL=8 ENDS"),
    Configuration("votes: 2 crashes", AGREEMENT, f"{VOTES_4} CRASHES=2 MORTAL=12 ENDS"),
    Configuration("votes: 3 crashes", AGREEMENT, f"{VOTES_4} CRASHES=3 MORTAL=14 ENDS"),
    Configuration("votes: a liar", AGREEMENT, f"{VOTES_4} LIAR=3 ENDS"),
    Configuration(
        "votes: a liar and a crash", AGREEMENT, f"{VOTES_4} LIAR=3 CRASHES=1 MORTAL=4 ENDS"
    ),
    Configuration("votes: a freeze", AGREEMENT, f"{VOTES_4} FREEZES=1 MORTAL=8"),
    Configuration(
        "votes through the planner: the planner crashes",
        AGREEMENT,
        f"{VOTES_4} CRASHES=1 MORTAL=1 COORDINATOR ENDS",
    ),
    Configuration(
        "votes through the planner: another crashes",
        AGREEMENT,
        f"{VOTES_4} CRASHES=1 MORTAL=8 COORDINATOR LOSS_BINDS ENDS",
    ),
    Configuration(
        "round: the planner crashes", AGREEMENT, f"{ROUND_4} CRASHES=1 MORTAL=1 LOSS_BINDS ENDS"
    ),
    Configuration(
        "round: the planner crashes and comes back",
        AGREEMENT,
        f"{ROUND_4} CRASHES=1 RESTARTS=1 MORTAL=1 LOSS_BINDS ENDS",
    ),
    Configuration(
        "round: the last by name crashes",
        AGREEMENT,
        f"{ROUND_4} CRASHES=1 MORTAL=8 LOSS_BINDS ENDS",
    ),
    Configuration("round: a liar", AGREEMENT, "N=4 A=1 QUORUM=3 LIAR=3 LOSS_BINDS ENDS"),
    quick("histories: a cut", HISTORIES, f"{RUN_3} CUTS=1"),
    quick("histories: 2 cuts, quorum 1", HISTORIES, "N=3 ROUNDS=2 QUORUM=1 CUTS=2"),
    quick("histories: a cut, a crash, a restart", HISTORIES, f"{RUN_3} CUTS=1 CRASHES=1"),
    quick("histories: joiners, a cut", HISTORIES, f"{RUN_3} JOINERS CUTS=1"),
    quick("histories: a liar, a cut", HISTORIES, f"{RUN_3} LIAR CUTS=1"),
    quick("histories become one: a cut", HISTORIES, f"{RUN_3} CUTS=1 LIVENESS"),
    quick(
        "histories become one: a cut, quorum 1", HISTORIES, "N=3 ROUNDS=2 QUORUM=1 CUTS=1 LIVENESS"
    ),
    quick("histories become one: a crash, a restart", HISTORIES, f"{RUN_3} CRASHES=1 LIVENESS"),
    quick("histories: a cut, quorum 2", HISTORIES, "N=4 ROUNDS=2 QUORUM=2 CUTS=1 ENDS"),
    quick(
        "histories: a cut, a crash, a restart",
        HISTORIES,
        "N=4 ROUNDS=2 QUORUM=3 CUTS=1 CRASHES=1 ENDS",
    ),
    quick(
        "histories: a liar, a cut, a crash",
        HISTORIES,
        "N=4 ROUNDS=2 QUORUM=2 LIAR CUTS=1 CRASHES=1 ENDS",
    ),
    quick("histories: a cut, quorum 2", HISTORIES, "N=4 ROUNDS=3 QUORUM=2 CUTS=1 ENDS"),
    Configuration(
        "histories: a liar, a cut, a crash",
        HISTORIES,
        "N=4 ROUNDS=3 QUORUM=2 LIAR CUTS=1 CRASHES=1 ENDS",
    ),
    Configuration(
        "histories: a cut, 2 crashes", HISTORIES, "N=4 ROUNDS=2 QUORUM=3 CUTS=1 CRASHES=2 ENDS"
    ),
    Configuration(
        "histories: 2 cuts, 2 crashes", HISTORIES, "N=4 ROUNDS=2 QUORUM=3 CUTS=2 CRASHES=2 ENDS"
    ),
    quick("attempts: a liar", BLAME, "N=3 QUORUM=2 LIAR=0"),
    quick("attempts: a liar", BLAME, "N=4 QUORUM=3 LIAR=3"),
)
"""What must hold."""

MUTATIONS = (
    quick(
        "no island waits for receipts", AGREEMENT, f"{VOTES_3} FREEZES=1 NO_RECEIPTS", "violated"
    ),
    quick(
        "an island that replied open commits on votes",
        AGREEMENT,
        f"{VOTES_3} CRASHES=1 OPEN_MAY_COMMIT",
        "violated",
    ),
    quick(
        "no query after a freeze",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 NO_QUERY_AFTER_FREEZE",
        "violated",
    ),
    quick(
        "a reply of commit counts without a certificate",
        AGREEMENT,
        f"{VOTES_3} LIAR=2 BELIEVE_COMMIT",
        "violated",
    ),
    quick("digests need not agree", AGREEMENT, f"{VOTES_3} LIAR=2 COMMIT_BY_MAJORITY", "violated"),
    quick(
        "an island that holds all votes commits on a query",
        AGREEMENT,
        f"{VOTES_3} CRASHES=1 HELD_CERTIFICATE",
        "violated",
    ),
    quick(
        "islands commit when the list of votes comes",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 COORDINATOR COMMIT_ON_LIST",
        "violated",
    ),
    quick(
        "a planner that replied open commits",
        AGREEMENT,
        f"{VOTES_3} CRASHES=2 COORDINATOR PLANNER_IGNORES_OPEN",
        "violated",
    ),
    quick(
        "a planner that sends to all commits before all others",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 COORDINATOR LOSS_BINDS PLANNER_ALONE",
        "violated",
    ),
    quick("claims need no proof", HISTORIES, f"{RUN_3} LIAR NO_PROOF", "violated"),
    quick("progress is always re-based", HISTORIES, f"{RUN_3} CRASHES=1 REBASE_ALWAYS", "violated"),
    quick("units may overlap", HISTORIES, f"{RUN_3} JOINERS OVERLAPS", "violated"),
    quick("quorum 1 in a cut", HISTORIES, "N=3 ROUNDS=2 QUORUM=1 CUTS=1 ONE_HISTORY", "violated"),
    Configuration(
        "an island that replied open gets no second query",
        AGREEMENT,
        f"{VOTES_4} CRASHES=2 MORTAL=12 NO_ASKING_AGAIN",
        "violated",
    ),
    quick(
        "an abort ends the round",
        AGREEMENT,
        f"{ROUND_3} CRASHES=1 LIVENESS NO_NEXT_ATTEMPT",
        "violated",
    ),
    quick(
        "an abort ends the round",
        AGREEMENT,
        f"{ROUND_3} CRASHES=1 ENDS NO_NEXT_ATTEMPT",
        "violated",
    ),
    quick("states are not taken", HISTORIES, f"{RUN_3} CUTS=1 LIVENESS NO_CATCH_UP", "violated"),
    quick("states are not taken", HISTORIES, f"{RUN_3} CUTS=1 ENDS NO_CATCH_UP", "violated"),
    quick(
        "no query about a lost island of which nothing is missing",
        AGREEMENT,
        f"{VOTES_3} CRASHES=2 COORDINATOR ENDS",
        "violated",
    ),
    quick("no minority is left out in turn", BLAME, "N=3 QUORUM=2 LIAR=0 NO_TURNS", "violated"),
)
"""A rule is taken away, and Spin must find what it is for."""

LIMITS = (
    quick("a freeze and a crash", AGREEMENT, f"{VOTES_3} FREEZES=1 CRASHES=1", "violated"),
    quick(
        "a freeze while receipts are under way",
        AGREEMENT,
        f"{VOTES_3} FREEZES=1 SLOW_MAIL",
        "violated",
    ),
    quick("a liar raises the numbers of attempts", BLAME, "N=3 QUORUM=2 LIAR=2 RAISES", "violated"),
)
"""What the protocol does not give: an island that lives, or goes on, has ended an attempt as
another has not.
"""
