"""The overview of a run: its first line, the line under it, and the incidents, for every place that
shows them.
"""

import time
from dataclasses import dataclass
from typing import Any

from diloco.overview.account import Absence, RunAccount, account_for, count_missed, find_left_out
from diloco.overview.headline import OVER_SECONDS, Headline, describe, find_headline
from diloco.overview.since import describe_since, lines_since
from diloco.records.kept_config import RunPlan, read_plan
from diloco.records.run_folder import RunRecords

MAX_ABSENCES = 200
"""Most absences of an island that a page gets; the newest."""


@dataclass(frozen=True)
class Overview:
    """What is said first about a run."""

    headline: Headline
    since: str
    """The line under the first one."""
    lines: list[str]
    """One line for each incident, the worst and newest first."""

    @property
    def head(self) -> list[str]:
        """The two lines that head every description of the run."""
        return [describe(self.headline), self.since]


def find_overview(
    account: RunAccount, plan: RunPlan, since: float = 0.0, now: float | None = None
) -> Overview:
    """Return the overview of a run since a unix time, by default since its beginning."""
    at = moment_of(account, now)
    return Overview(
        find_headline(account, plan, at),
        describe_since(account, since, at),
        lines_since(account, since, at),
    )


def overview_of(run: RunRecords, since: float = 0.0) -> Overview:
    """Return the overview of the run in a folder."""
    return find_overview(account_of(run), read_plan(run.run_dir), since)


def account_of(run: RunRecords) -> RunAccount:
    """Return the account of the run in a folder."""
    return account_for((island.name, island.all) for island in run.islands)


def moment_of(account: RunAccount, now: float | None = None) -> float:
    """Return the unix time for which the state of a run is told: now, or its last record if it is
    over.
    """
    now = time.time() if now is None else now
    return now if now - account.last <= OVER_SECONDS else account.last


def describe_islands(account: RunAccount) -> dict[str, Any]:
    """Return which islands never came back, joined late, or were left out of rounds, as values for
    JSON.
    """
    return {
        "islands_gone": {
            name: island.absences[-1].cause
            for name, island in account.islands.items()
            if island.is_away and not island.is_over
        },
        "islands_late": {
            name: island.entry_round
            for name, island in account.islands.items()
            if island.entry_round
        },
        "rounds_left_out": dict(find_left_out(account)),
    }


def absence_row(account: RunAccount, name: str, absence: Absence) -> list[Any]:
    """Return begin, end or None, cause, whether it is a failure, and the number of missed
    rounds.
    """
    missed = count_missed(account, name, absence) if absence.is_failure else 0
    return [absence.begin, absence.end, absence.cause, int(absence.is_failure), missed]


def page_values(account: RunAccount, plan: RunPlan, now: float | None = None) -> dict[str, Any]:
    """Return the headline and the absences as the page takes them."""
    absences = {
        name: [absence_row(account, name, each) for each in island.absences[-MAX_ABSENCES:]]
        for name, island in account.islands.items()
        if island.absences
    }
    headline = find_headline(account, plan, moment_of(account, now))
    return {"headline": headline.to_json(), "absences": absences}
