"""Random faults that are done to running islands from outside: what is drawn, and what is found out
about each.

Nothing of the islands helps: processes are killed, stopped and ended by signals, and links are cut,
at random times. outside_runner.py does it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from outer.agreement.running.limits import commit_bound
from outer.network.deadlines import Deadlines
from tests.faults.shortages import has_process_groups

SHORTAGES = ("memory", "files", "threads", "disk", "shared memory")
"""Faults that leave an island for some seconds without more of something (shortages.py)."""
WEIGHTS = {
    "kill": 3,
    "rank": 4,
    "daemon": 3,
    "freeze": 3,
    "freeze one": 3,
    "terminate": 2,
    "cut": 2,
    "bootstrap": 1,
}
WEIGHTS |= dict.fromkeys(SHORTAGES, 2)
"""Kinds of faults. `rank` and `daemon` kill one process, `freeze one` stops one; `kill` and
`freeze` mean all.
"""
SHORT_SECONDS = (0.5, 12.0)
"""Range of the duration of a freeze and of a cut, and of the time until an island is started
again.
"""
PAUSE_SECONDS = 5.0
"""Mean time from one fault to the next, which has an exponential distribution."""
WAIT_SECONDS = 120.0
"""The runs' outer.wait_seconds."""


@dataclass(frozen=True)
class OutsideSettings:
    """A run. The islands' own settings are as in a config; `is_apart` gives each a network
    namespace, a disk and a /dev/shm of its own (root).
    """

    transport: str
    num_faults: int
    seed: int
    islands: tuple[dict[str, Any], ...] = ({}, {}, {}, {"ranks": 2})
    is_apart: bool = False
    kinds: tuple[str, ...] = tuple(WEIGHTS)


@dataclass(frozen=True)
class OutsideFault:
    """A fault to come: `pause` seconds after the one before; `pick` in [0, 1) chooses among the
    island's processes.
    """

    kind: str
    island: int
    pause: float
    seconds: float
    pick: float

    def choose(self, pids: Sequence[int]) -> int:
        return pids[int(self.pick * len(pids))]


@dataclass
class Strike:
    """A fault that has happened. Times are unix times, and seconds count from the fault; None: it
    has not come yet.
    """

    kind: str
    island: int
    at: float
    seconds: float
    bound: float
    """T by what the healthy islands measured of reduces and rounds, as if calls and votes took no
    time: the least T.
    """
    healthy: tuple[int, ...]
    first_round: int | None = None
    first_commit: float | None = None
    second_commit: float | None = None
    """Seconds to the next round that a healthy island commits, and to the one after it, which began
    after the fault.
    """
    ended_at: float | None = None
    back: float | None = None
    """Seconds from the end of the fault to a commit of the island that it hit."""


@dataclass
class Outcome:
    """What a run has shown. Each list of texts is empty if all went well."""

    strikes: list[Strike] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Launchers that ended, and islands that were started again, without a fault."""
    splits: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why the run was given up."""
    account: dict[str, Any] = field(default_factory=dict)
    """Units of text that were trained, repeated and not recorded."""
    num_rounds: int = 0
    num_restarts: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [*self.hangs, *self.exits, *self.splits, *self.failures]


def draw_faults(settings: OutsideSettings) -> Iterator[OutsideFault]:
    """The faults of a run. A seed gives the same faults each time; when they strike depends on the
    islands, too.
    """
    draw = random.Random(settings.seed)
    is_possible = {"daemon": settings.transport == "hivemind", "threads": has_process_groups()}
    is_possible |= dict.fromkeys(("cut", "disk", "shared memory"), settings.is_apart)
    kinds = [kind for kind in WEIGHTS if kind in settings.kinds and is_possible.get(kind, True)]
    for _ in range(settings.num_faults):
        kind = draw.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        island, pause = draw.randrange(len(settings.islands)), draw.expovariate(1 / PAUSE_SECONDS)
        yield OutsideFault(
            kind, island, round(pause, 2), round(draw.uniform(*SHORT_SECONDS), 1), draw.random()
        )


def least_bound(islands: Sequence[Sequence[RoundRecord]]) -> float:
    """T in seconds for the islands with these commits. What they do not record, calls and votes,
    counts as instant.
    """
    deadlines = Deadlines(WAIT_SECONDS)
    for _ in range(3):
        deadlines.observe("call", 0.0)
        deadlines.observe("vote", 0.0)
    for commits in islands:
        for before, record in zip(commits[-33:-1], commits[-32:], strict=False):
            deadlines.observe("reduce", record.reduce_seconds)
            deadlines.observe("round", record.time - before.time)
    return commit_bound(deadlines, num_waiting=max(len(islands) - 1, 1), num_absent=1)


def account(run_dir: Path, inner_steps: int, num_unrecorded: int) -> dict[str, Any]:
    """Units that the run's history has trained, those trained twice, and those whose record is
    missing, with a bound.

    `num_unrecorded`: commits that may have no record, because an island was killed in between or
    had no room for it.
    """
    found = data_account(read_run(run_dir).islands)
    missing = (found["units_trained"] or 0) - (found["steps_accounted"] or 0)
    return {
        "trained": found["units_trained"],
        "repeated": found["units_repeated"],
        "unrecorded": missing,
        "may_be_unrecorded": num_unrecorded * inner_steps,
    }
